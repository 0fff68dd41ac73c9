import numpy as np
import pytest

from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.reduce import reduce_rows
from cgdnn.layers._base import (
    BEGIN,
    END,
    PIECE,
    Buffer,
    Slot,
    Step,
    read,
    row,
    rows,
    update,
    update_all,
    write_all,
)
from cgdnn.plan.lower import Work
from cgdnn.plan.partition import PIECE_NANOSECONDS
from cgdnn.runtime.serial import run_serial
from cgdnn.runtime.state import State, allocate
from tests.runtime.programs import bound


@kernel(array(1), REAL, INT, INT, INT, INT)
def note(x, rate, counter, piece, begin, end):  # type: ignore[no-untyped-def]
    """Write what the slots hold."""
    for i in range(begin, end):
        x[i] = rate + 100 * counter + 1000 * piece


@kernel(array(1), REAL)
def accumulate_one(x, accumulate):  # type: ignore[no-untyped-def]
    """Set x = accumulate x + 1."""
    for i in range(x.shape[0]):
        x[i] = accumulate * x[i] + 1


@kernel(array(2), INT, INT, INT)
def write_row(partial, piece, begin, end):  # type: ignore[no-untyped-def]
    """Put into row `piece` how many units there are."""
    for i in range(partial.shape[1]):
        partial[piece, i] = end - begin


def test_allocated_memory_is_aligned_and_zero():
    for size in (0, 1, 63, 1000):
        memory = allocate(size)
        assert memory.size == size
        assert memory.ctypes.data % 64 == 0 or size == 0
        assert not memory.any()


def test_arrays_of_aliases_share_memory():
    state = State("float64")
    base = Buffer("base", (2, 6))
    view = Buffer("view", (3, 4), alias=base)
    state.array(base)[...] = np.arange(12).reshape(2, 6)
    assert state.array(view).dtype == np.float64
    np.testing.assert_array_equal(state.array(view).ravel(), np.arange(12))
    state.array(view)[0, 0] = 7
    assert state.array(base)[0, 0] == 7


def test_array_type_is_that_of_the_buffer():
    assert State("float32").array(Buffer("places", (3,), "int32")).dtype == np.int32


def test_adopted_array_is_used():
    state, buffer = State("float32"), Buffer("w", (2,), kind="param")
    weights = np.ones(2, np.float32)
    state.adopt(buffer, weights)
    assert state.array(buffer) is weights


def test_numbers_are_patched_into_their_slots():
    state, x = State("float32"), Buffer("x", (4,))
    arguments = [update(x), Slot("rate"), Slot("counter"), PIECE, BEGIN, END]
    program = bound([Work("note", -1, Step(note, arguments, 4, 1e5))], state=state)
    for name, value in (("rate", 0.5), ("counter", 3), ("nobody", 1.0)):
        program.patch(name, value)
    assert run_serial(program) is None
    assert state.array(x).tolist() == [300.5, 1300.5, 2300.5, 3300.5]
    program.patch("rate", 2.0)
    run_serial(program)
    assert state.array(x)[0] == 302


def test_only_the_first_writer_of_a_gradient_overwrites_it():
    state, diff = State("float32"), Buffer("w.diff", (2,), kind="param_diff")
    step = [Step(accumulate_one, [update_all(diff), Slot("accumulate", diff)]) for _ in range(2)]
    program = bound([Work(str(i), -1, one) for i, one in enumerate(step)], state=state)
    state.array(diff)[...] = 50
    program.patch("accumulate", 0.0)
    run_serial(program)
    assert state.array(diff).tolist() == [2, 2]
    program.patch("accumulate", 1.0)
    run_serial(program)
    assert state.array(diff).tolist() == [4, 4]


def test_rows_of_a_partial_are_added_in_order():
    state = State("float32")
    partial, total = Buffer("partial", (3,), kind="partial"), Buffer("total", (3,))
    half = PIECE_NANOSECONDS / 2
    works = [
        Work("rows", -1, Step(write_row, [row(partial), PIECE, BEGIN, END], 10, half)),
        Work("sum", -1, Step(reduce_rows, [rows(partial), update(total), 0.0, BEGIN, END], 3)),
    ]
    run_serial(bound(works, state=state))
    assert partial.rows == 5
    assert state.array(total).tolist() == [10, 10, 10]


def test_python_step_sees_short_lived_arrays():
    state = State("float32")
    passed, total = Buffer("passed", (2, 3), kind="temporary"), Buffer("total", (6,))

    def fill(array: np.ndarray) -> None:
        array[...] = [[1, 2, 3], [4, 5, 6]]

    add = Step(reduce_rows, [read(passed, (1, 6)), update(total), 0.0, BEGIN, END], 6)
    works = [Work("fill", -1, Step(fill, [write_all(passed)])), Work("add", -1, add)]
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(state.array(total), [1, 2, 3, 4, 5, 6])
    run_serial(bound(works, state=state))
    np.testing.assert_array_equal(state.array(total), [1, 2, 3, 4, 5, 6])
