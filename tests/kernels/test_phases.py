import numpy as np
import pytest

from cgdnn.kernels import phases as kernels
from cgdnn.kernels.reorder import PLACE

# channels, (size, stride, pad) of both axes, phases of an axis, (rows, columns) of a phase
SHAPES = {
    "stride2": (3, (9, 2, 0), (71, 2, 0), 2, (4, 35)),
    "stride2_pad": (2, (8, 2, 3), (37, 2, 3), 2, (6, 21)),
    "stride4": (3, (27, 4, 0), (131, 4, 0), 4, (7, 33)),
    "stride4_pad": (1, (12, 4, 2), (33, 4, 5), 4, (4, 10)),
    "stride3": (2, (10, 3, 1), (13, 3, 2), 3, (4, 5)),
    "beyond": (1, (3, 2, 5), (4, 2, 9), 2, (9, 20)),
    "some_phases": (2, (9, 4, 1), (40, 4, 1), 2, (3, 10)),
    "sampled": (3, (9, 2, 0), (35, 2, 0), 1, (5, 18)),
    "sampled3": (3, (9, 3, 0), (11, 3, 0), 1, (3, 4)),
    "lanes2": (2 * PLACE, (9, 2, 0), (71, 2, 0), 2, (4, 35)),
    "lanes2_pad": (PLACE // 4, (8, 2, 3), (37, 2, 3), 2, (7, 22)),
    "lanes4": (3 * PLACE // 4, (27, 4, 0), (131, 4, 0), 4, (7, 33)),
    "lanes4_pad": (PLACE // 4, (12, 4, 2), (33, 4, 5), 4, (4, 11)),
    "two_strides": (2, (9, 3, 0), (40, 2, 0), 1, (3, 20)),
}
IMAGES = 4
IN_PIECE = (slice(1, 3), slice(None))


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=SHAPES)
def case(request, dtype):
    return Case(request.param, dtype)


class Case:
    def __init__(self, name, dtype):
        channels, self.rows, self.columns, self.phases, size = SHAPES[name]
        rng = np.random.default_rng(len(name))
        self.image = rng.standard_normal(
            (IMAGES, channels, self.rows[0], self.columns[0])
        ).astype(dtype)  # fmt: skip
        self.planes = rng.standard_normal((IMAGES, channels * self.phases**2, *size)).astype(dtype)

    def places(self):
        """Yield (place of a phase, place of an image) for all that are in both."""
        rows, columns = self.planes.shape[2:]
        for a, b, i, j in np.ndindex(self.phases, self.phases, rows, columns):
            r = self.rows[1] * i + a - self.rows[2]
            k = self.columns[1] * j + b - self.columns[2]
            if 0 <= r < self.rows[0] and 0 <= k < self.columns[0]:
                yield (a, b, i, j), (r, k)

    def phases_view(self, planes):
        return planes.reshape(IMAGES, -1, self.phases, self.phases, *planes.shape[2:])


def test_a_piece_writes_the_phases_of_its_images(case):
    want = np.full_like(case.planes, np.nan)
    want[1:3] = 0
    for phase, place in case.places():
        case.phases_view(want)[(*IN_PIECE, *phase)] = case.image[(*IN_PIECE, *place)]
    got = np.full_like(case.planes, np.nan)
    firsts = np.arange(case.phases) - case.columns[2]
    kernels.phases_of_image(
        *(case.image, got, firsts, case.rows[1], case.columns[1], case.rows[2], 1, 3)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["lanes2", "lanes2_pad", "lanes4", "lanes4_pad"])
def test_phases_with_channels_in_the_lanes(name, dtype):
    case = Case(name, dtype)
    stride = case.rows[1]
    if stride not in kernels.LANE_STRIDES:
        pytest.skip("a vector is too short for the stride")
    plain = np.zeros_like(case.planes)
    firsts = np.arange(stride) - case.columns[2]
    kernels.phases_of_image(case.image, plain, firsts, stride, stride, case.rows[2], 0, IMAGES)
    rows, columns = plain.shape[2:]
    want = plain.reshape(IMAGES, -1, PLACE, rows, columns).transpose(0, 1, 3, 4, 2).copy()
    want[[0, 3]] = np.nan
    got = np.full_like(want, np.nan)
    kernels.phases_in_lanes(case.image, got, stride, case.rows[2], case.columns[2], 1, 3)
    np.testing.assert_array_equal(got, want)


def test_a_piece_writes_its_images_and_zeros_where_no_phase_is(case):
    want = np.full_like(case.image, np.nan)
    want[1:3] = 0
    for phase, place in case.places():
        want[(*IN_PIECE, *place)] = case.phases_view(case.planes)[(*IN_PIECE, *phase)]
    got = np.full_like(case.image, np.nan)
    steps = (case.rows[1], case.columns[1], case.rows[2], case.columns[2])
    kernels.phases_to_image(case.planes, got, case.phases, *steps, 1, 3)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_taps_are_set_or_added_to(dtype, keep):
    x = np.arange(12, dtype=dtype).reshape(3, 4)
    table = np.array([2, -1, 0, 3, 1, -1])
    y = np.full((3, 6), 0.5 if keep else np.nan, dtype)
    kernels.phases_of_taps(x, y, table, keep, 1, 3)
    want = np.where(table >= 0, x[:, table], 0) + keep / 2
    np.testing.assert_array_equal(y[1:], want[1:])
    np.testing.assert_array_equal(y[0], 0.5 if keep else np.nan)
