import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels._jit import INT, REAL, array, kernel
from cgdnn.kernels.vector import add_sum, constant, emitted, lanes_of, sums, transpose_block


@kernel(array(1), array(1, "int64"))
def report_lanes(x, lanes):
    lanes[0] = lanes_of(x)


@kernel(array(1), array(1), INT, INT)
def add_part(y, x, start, length):
    add_sum(y, 1, x, start, length)


@kernel(array(2), array(2), INT, INT, INT)
def transpose(y, x, rows, columns, keep):
    transpose_block(y, y.shape[1] + 1, y.shape[1], x, 0, x.shape[1], rows, columns, keep)


@emitted
def _copy_inside(e, y, x, first, bound):
    """Copy the lanes of one vector whose number, from `first` on, is in 0 <= number < bound."""
    mask = e.within(e.lane_numbers(first), bound)
    e.store(e.load(e.at(x, first), mask), y)


@emitted
def _multiply_add(e, y, a, b):
    mask = e.first_lanes(e.integer(3))
    e.store(e.multiply_add(e.load(a, mask), e.load(b, mask), e.load(y, mask)), y, mask)


@emitted
def _sweep(e, y, x, count, step):
    with e.sweep(count, (x, step), (y, e.integer(1))) as (source, target):
        e.builder.store(e.scalar(source), target)


@constant
def _three(e, x):
    return 3


@kernel(array(1), array(1), INT, INT)
def copy_inside(y, x, first, bound):
    _copy_inside(y, x, first, bound)


@kernel(array(1), array(1), array(1))
def multiply_add(y, a, b):
    _multiply_add(y, a, b)


@kernel(array(1), array(1), INT, INT)
def sweep(y, x, count, step):
    _sweep(y, x, count, step)


@kernel(array(1))
def three(x):
    x[0] = _three(x)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def test_lanes_fill_a_register(dtype):
    lanes = np.zeros(1, np.int64)
    report_lanes(np.zeros(1, dtype), lanes)
    assert lanes[0] == machine.vector_bytes() // np.dtype(dtype).itemsize


@pytest.mark.parametrize("length", [0, 1, 3, 15, 16, 17, 63, 64, 65, 200])
def test_add_sum(dtype, length):
    x = np.arange(300, dtype=dtype)
    y = np.array([7, 5, 7], dtype)
    add_part(y, x, 11, length)
    np.testing.assert_array_equal(y, [7, 5 + x[11 : 11 + length].sum(), 7])


@pytest.mark.parametrize("keep", [0, 1])
def test_transpose_block_writes_its_part_only(dtype, keep):
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    for rows in range(1, lanes + 1):
        for columns in (1, lanes // 2, lanes):
            x = np.arange(lanes * lanes, dtype=dtype).reshape(lanes, lanes)
            y = np.full((lanes + 2, lanes + 2), 0.5, dtype)
            want = y.copy()
            want[1 : 1 + columns, 1 : 1 + rows] = x[:rows, :columns].T + (0.5 if keep else 0)
            transpose(y, x, rows, columns, keep)
            np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(("first", "bound"), [(0, 1), (-2, 3), (-40, 9), (4, 7), (9, 7), (0, 0)])
def test_lanes_outside_of_a_range_are_zero_and_never_read(dtype, first, bound):
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    x = np.arange(1, 8, dtype=dtype)  # reading beyond it would be seen by a checker of memory
    y = np.full(lanes, np.nan, dtype)
    copy_inside(y, x, first, bound)
    numbers = first + np.arange(lanes)
    inside = (numbers >= 0) & (numbers < bound)
    np.testing.assert_array_equal(y, np.where(inside, numbers + 1, 0))


def test_multiply_add_of_the_first_lanes(dtype):
    a, b = np.array([1, 2, 3, 9], dtype), np.array([10, 20, 30, 9], dtype)
    y = np.array([0.5, 0.5, 0.5, 0.5], dtype)
    if machine.vector_bytes() // np.dtype(dtype).itemsize < 3:
        pytest.skip("a vector holds fewer than three lanes")
    multiply_add(y, a, b)
    np.testing.assert_array_equal(y, [10.5, 40.5, 90.5, 0.5])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_sweep_advances_each_pointer_by_its_step(dtype, count):
    y = np.full(5, -1, dtype)
    sweep(y, np.arange(20, dtype=dtype), count, 3)
    np.testing.assert_array_equal(y, [*range(0, 3 * count, 3), *[-1] * (5 - count)])


def test_constants_are_known_in_kernels(dtype):
    x = np.zeros(1, dtype)
    three(x)
    assert x[0] == 3


@emitted
def _add_number(e, y, x, length, number):
    for (source, target), mask in e.along(length, x, y):
        e.store(e.builder.fadd(e.load(source, mask), e.splat(number)), target, mask)


@sums(2)
def _halves_and_whole(e, x, rows, row_step, length):
    slots = [e.variable(part) for part in e.wide(e.zero())]
    for (source,), mask in e.along_rows(rows, row_step, length, x):
        for slot, part in zip(slots, e.wide(e.load(source, mask)), strict=True):
            e.builder.store(e.builder.fadd(e.builder.load(slot), part), slot)
    totals = [e.total(e.builder.load(slot)) for slot in slots]
    return totals[0], totals[-1]


@kernel(array(1), array(1), REAL, INT)
def add_number(y, x, number, length):
    _add_number(y, x, length, number)


@kernel(array(2), array(1, "float64"))
def sum_corner(x, y):
    y[0], y[1] = _halves_and_whole(x, 3, x.shape[1], x.shape[1] - 1)


@pytest.mark.parametrize("length", [0, 1, 16, 37])
def test_along_a_row_touches_all_of_it_and_no_more(dtype, length):
    x, y = np.arange(40, dtype=dtype), np.full(40, -1, dtype)
    add_number(y, x, 0.5, length)
    np.testing.assert_array_equal(y, np.where(x < length, x + 0.5, -1))


@pytest.mark.parametrize("columns", [2, 9, 40])
def test_sums_over_rows_are_taken_in_float64(dtype, columns):
    x = np.full((4, columns), 2.0**24, dtype)
    x[:, 0] += 1 if dtype == "float64" else 2
    x[:, -1], x[3] = np.nan, np.nan
    y = np.zeros(2)
    sum_corner(x, y)
    if dtype == "float64":
        assert y[0] == y[1] == x[:3, :-1].sum()
    else:
        assert y[0] + y[1] == x[:3, :-1].astype("float64").sum()
