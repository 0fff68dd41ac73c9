"""Which steps hand a blob on piece by piece."""

from __future__ import annotations

from math import prod

import pytest

from cgdnn.kernels.activation import relu_forward
from cgdnn.layers._base import BEGIN, END, Buffer, Step, read, read_all, update, write
from cgdnn.plan.chain import Chain, chains

KIB = 256  # in elements
BIG = (8, 100 * KIB)


def buffer(name: str, *shape: int) -> Buffer:
    return Buffer(name, shape)


def step(*uses: object, extent: int = 8, **options: object) -> Step:
    return Step(relu_forward, [*uses, 0.0, BEGIN, END], extent, **options)  # type: ignore[arg-type]


def size_of(blob: Buffer) -> int:
    return 4 * prod(blob.shape)


X, Y, Z, OTHER = (buffer(name, *BIG) for name in "xyzo")


def test_a_blob_between_two_steps_is_handed_on():
    steps = [step(read(X), write(Y)), step(read(Y), write(Z), extent=16), step(read(Z), write(X))]
    found = chains(steps, {Y}, size_of)
    assert found == dict.fromkeys([0, 1], Chain(0, 1, Y, 8, 4, 200 << 10))
    chain = found[0]
    assert [chain.range_of(piece, 8) for piece in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [chain.range_of(piece, 16) for piece in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]


def test_two_steps_that_can_be_merged_are_whatever_the_size():
    both = step(read(X), write(Z))
    small, behind = buffer("s", 8, 1), []

    def merge(reader):
        behind.append(reader)
        return both if len(behind) == 1 else None

    steps = [step(read(X), write(small), merge=merge), step(read(small), write(Z))]
    assert chains(steps, {small}, size_of)[0].merged is both
    assert behind == [steps[1]]
    assert chains(steps, {small}, size_of) == {}
    steps.insert(1, step(update(small)))
    assert chains(steps, {small}, size_of) == {}
    assert len(behind) == 2


def test_steps_in_place_belong_to_the_chain():
    steps = [step(read(X), write(Y)), step(update(Y)), step(read(Y), write(Z))]
    assert chains(steps, {Y}, size_of)[1].last == 2


def test_each_step_has_one_chain_at_most():
    steps = [step(read(X), write(Y)), step(read(Y), write(Z)), step(read(Z), write(OTHER))]
    found = chains(steps, {Y, Z}, size_of)
    assert sorted(found) == [0, 1]


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([step(read(X), write(Y)), step(read_all(Y), write(Z))], "reads all of it"),
        ([step(read(Y), write(X)), step(read(Y), write(Z))], "was there before"),
        ([step(read(X), write(Y)), step(read(X), write(Z)), step(read(Y), write(X))], "later"),
        ([step(read(X), write(Y))], "nobody reads it"),
        ([step(read(X), write(Y)), step(read(Y), write(Z), extent=1)], "not cut"),
        (
            [step(read(X), write(Y)), step(read(Y), write(Z), explain=lambda status: None)],
            "can fail",
        ),
        ([Step(print, [read(X), write(Y)], 8), step(read(Y), write(Z))], "runs Python"),
    ],
)
def test_no_chain(steps, why):
    assert chains(steps, {Y}, size_of) == {}, why


def test_pieces_are_as_small_as_steps_can_be_cut():
    large, huge = (Buffer(name, (8, size * KIB)) for name, size in (("large", 700), ("huge", 800)))
    found = chains([step(read(X), write(large)), step(read(large), write(Z))], {large}, size_of)
    assert (found[0].pieces, found[0].piece_bytes) == (8, 700 << 10)
    assert chains([step(read(X), write(huge)), step(read(huge), write(Z))], {huge}, size_of) == {}


def test_no_chain_where_somebody_may_look_or_all_of_it_stays_near():
    small = buffer("small", 8, KIB)
    assert chains([step(read(X), write(Y)), step(read(Y), write(Z))], set(), size_of) == {}
    assert (
        chains([step(read(X), write(small)), step(read(small), write(Z))], {small}, size_of) == {}
    )
