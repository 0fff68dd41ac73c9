from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cgdnn.netdef.read import read_solver
from cgdnn.proto.cgdnn_pb2 import SolverParameter
from cgdnn.solvers.lr_policy import LearningRate

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in (GOLDEN / "solvers").glob("*.npz"))


def rates(count: int, **fields: object) -> list[float]:
    policy = LearningRate(SolverParameter(**fields))
    return [policy.at(iteration) for iteration in range(count)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"lr_policy": "fixed"}, [0.5, 0.5, 0.5, 0.5, 0.5]),
        ({"lr_policy": "step", "gamma": 0.5, "stepsize": 2}, [0.5, 0.5, 0.25, 0.25, 0.125]),
        ({"lr_policy": "exp", "gamma": 0.5}, [0.5, 0.25, 0.125, 0.0625, 0.03125]),
        ({"lr_policy": "inv", "gamma": 1, "power": 2}, [0.5, 0.125, 0.5 / 9, 0.03125, 0.02]),
        (
            {"lr_policy": "multistep", "gamma": 0.5, "stepvalue": [1, 3]},
            [0.5, 0.25, 0.25, 0.125, 0.125],
        ),
        ({"lr_policy": "poly", "power": 2, "max_iter": 4}, [0.5, 0.28125, 0.125, 0.03125, 0]),
        (
            {"lr_policy": "sigmoid", "gamma": math.log(2), "stepsize": 2},
            [0.1, 0.5 / 3, 0.25, 1 / 3, 0.4],
        ),
    ],
    ids=lambda value: value["lr_policy"] if isinstance(value, dict) else "",
)
def test_policy_follows_its_formula(fields: dict[str, object], expected: list[float]) -> None:
    assert rates(5, base_lr=0.5, **fields) == pytest.approx(expected, rel=1e-6)


def test_multistep_takes_one_step_an_iteration() -> None:
    got = rates(4, base_lr=1, lr_policy="multistep", gamma=0.5, stepvalue=[1, 1, 1])
    assert got == [1, 0.5, 0.25, 0.125]


def test_multistep_goes_on_from_its_current_step() -> None:
    policy = LearningRate(
        SolverParameter(base_lr=1, lr_policy="multistep", gamma=0.5, stepvalue=[2, 4])
    )
    policy.current_step = 1
    assert [policy.at(iteration) for iteration in (3, 4)] == [0.5, 0.25]


def test_poly_stays_at_zero_past_max_iter() -> None:
    assert rates(5, base_lr=1, lr_policy="poly", power=0.5, max_iter=2)[2:] == [0, 0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_policy": "exp", "gamma": 10},
        {"lr_policy": "step", "gamma": 10, "stepsize": 1},
        {"lr_policy": "inv", "gamma": 1, "power": -200},
        {"lr_policy": "poly", "power": -1, "max_iter": 5},
    ],
    ids=lambda fields: str(fields["lr_policy"]),
)
def test_a_rate_beyond_all_numbers_is_infinite(fields: dict[str, object]) -> None:
    assert LearningRate(SolverParameter(base_lr=1, **fields)).at(100_000) == math.inf


def test_sigmoid_far_from_its_middle_has_no_overflow() -> None:
    policy = LearningRate(
        SolverParameter(base_lr=1, lr_policy="sigmoid", gamma=10, stepsize=100_000)
    )
    assert policy.at(0) == pytest.approx(0)
    assert policy.at(200_000) == 1


@pytest.mark.parametrize("name", CASES)
def test_rates_are_those_of_caffe(name: str) -> None:
    policy = LearningRate(read_solver(GOLDEN / "solvers" / f"{name}.prototxt").message)
    with np.load(GOLDEN / "solvers" / f"{name}.npz") as values:
        expected = values["lr"]
    got = np.array([policy.at(iteration) for iteration in range(len(expected))])
    np.testing.assert_allclose(got, expected, rtol=2e-6)
