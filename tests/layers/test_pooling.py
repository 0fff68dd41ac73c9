import re
from pathlib import Path

import numpy as np
import pytest

from cgdnn.errors import DescriptionError
from cgdnn.layers._layout import lanes
from cgdnn.runtime.net import Net
from tests.layers.contract import Case, Trial, apart, given, normal

RUN = Path(__file__).parents[1] / "cases" / "run"


def pooling(fields, bottom, *tops, **more):
    return Case("Pooling", f"pooling_param {{ {fields} }}", [bottom], tops, **more)


CASES = [
    pooling("kernel_size: 2 stride: 2", apart(3, 2, 4, 6), (3, 2, 2, 3)),
    pooling("kernel_size: 3 stride: 2 pad: 1 engine: CAFFE", apart(2, 2, 5, 6), (2, 2, 3, 4)),
    pooling("kernel_size: 3 stride: 2", apart(2, 2, 6, 4), *[(2, 2, 3, 2)] * 2, passive=[1]),
    pooling(
        "kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 2 pad_w: 1",
        apart(2, 1, 5, 4),
        (2, 1, 4, 5),
    ),
    pooling("kernel_size: 2 stride: 2 round_mode: FLOOR", apart(2, 2, 5, 5), (2, 2, 2, 2)),
    pooling("global_pooling: true", apart(2, 3, 3, 4), (2, 3, 1, 1)),
    pooling(
        "kernel_size: 1 stride: 3",
        apart(1, 1, 5, 5),
        (1, 1, 3, 3),
        hides_nan="it lies between the windows, or its window outside the bottom",
    ),
    pooling("pool: AVE kernel_size: 3 stride: 2 pad: 1", normal(2, 2, 5, 6), (2, 2, 3, 4)),
    pooling("pool: AVE kernel_size: 3 stride: 2", normal(2, 2, 6, 6), (2, 2, 3, 3)),
    pooling(
        "pool: AVE kernel_h: 1 kernel_w: 4 stride_h: 1 stride_w: 3 pad_w: 2 pad_h: 0",
        normal(2, 1, 2, 7),
        (2, 1, 2, 3),
    ),
    pooling("pool: AVE global_pooling: true", normal(2, 3, 3, 4), (2, 3, 1, 1)),
]


def test_the_mask_counts_places_within_each_plane():
    plane = [[1, 5], [7, 2]]
    case = pooling("kernel_size: 2", given([[plane, plane]]), *[(1, 2, 1, 1)] * 2)
    values, mask = Trial(case).forward()
    assert values.ravel().tolist() == [7, 7]
    assert mask.ravel().tolist() == [2, 2]


def test_a_window_outside_the_bottom_gives_zero_and_no_gradient():
    fields = "kernel_size: 1 stride: 3"
    trial = Trial(pooling(fields, given([[[[4, 9, 9, 5, 9]]]]), *[(1, 1, 1, 3)] * 2, passive=[1]))
    values, mask = trial.forward()
    assert values.ravel().tolist() == [4, 5, 0]
    assert mask.ravel().tolist() == [0, 3, -1]
    trial.weights[0][...] = 1
    assert trial.backward()[0].ravel().tolist() == [1, 0, 0, 1, 0]


# Output sizes of Caffe: rounding up, and clipped by one where there is padding.
@pytest.mark.parametrize(
    ("fields", "size", "pooled"),
    [
        ("kernel_size: 3 stride: 2", 8, 4),
        ("kernel_size: 3 stride: 2 round_mode: FLOOR", 8, 3),
        ("kernel_size: 3 stride: 2 pad: 1", 7, 4),
        ("kernel_size: 2 stride: 2 pad: 1", 5, 3),
        ("kernel_size: 2 stride: 3 pad: 1", 4, 2),
        ("kernel_size: 3 stride: 2", 2, 1),
    ],
)
def test_sizes(fields, size, pooled):
    trial = Trial(pooling(fields, normal(1, 1, size, size), (1, 1, pooled, pooled)))
    assert trial.net.blobs["top0"].shape == (1, 1, pooled, pooled)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("", "got no kernel, expected kernel_size, or kernel_h and kernel_w"),
        ("kernel_h: 2", "got kernel_h, expected kernel_size, or kernel_h and kernel_w"),
        ("kernel_size: 2 kernel_h: 2 kernel_w: 2", "got kernel_size and kernel_h and kernel_w"),
        ("kernel_size: 3 pad: 1 pad_h: 1 pad_w: 1", "got pad and pad_h and pad_w"),
        ("kernel_size: 3 pad_w: 1", "got pad_w, expected pad, or pad_h and pad_w"),
        ("kernel_size: 3 stride: 1 stride_w: 1", "got stride and stride_w"),
        ("kernel_size: 0", "got kernel 0x0, expected 1 or more"),
        ("kernel_size: 2 stride: 0", "got stride 0x0, expected 1 or more"),
        ("kernel_size: 2 pad: 2", "got pad 2x2 with kernel 2x2, expected pad < kernel"),
        ("kernel_h: 3 kernel_w: 1 pad_h: 1 pad_w: 1", "got pad 1x1 with kernel 3x1"),
        ("kernel_size: 9", "kernel 9x9 does not fit input 6x6 (+pad 0x0)"),
        ("global_pooling: true kernel_size: 2", "got kernel_size 2 with global_pooling"),
        ("global_pooling: true stride: 2", "got pad 0x0 and stride 2x2 with global_pooling"),
        ("pool: STOCHASTIC kernel_size: 2", "got pool: STOCHASTIC, which has no CPU"),
    ],
)
def test_windows_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(DescriptionError, match=re.escape(message)):
        Trial(pooling(fields, normal(1, 1, 6, 6), (1, 1, 6, 6)))


def test_other_than_four_axes_are_refused():
    with pytest.raises(DescriptionError, match=r"shape \(2, 3, 4\), expected four axes"):
        Trial(pooling("kernel_size: 2", normal(2, 3, 4), (2, 3, 4)))


def test_average_has_no_mask():
    with pytest.raises(DescriptionError, match="got 2 tops with pool: AVE, expected 1"):
        Trial(pooling("pool: AVE kernel_size: 2", normal(1, 1, 2, 2), *[(1, 1, 1, 1)] * 2))


IN_LANES = [
    ("kernel_size: 2 stride: 2", (6, 4), (3, 2)),
    ("kernel_size: 3 stride: 2", (8, 7), (4, 3)),
    ("kernel_size: 3 pad: 1", (5, 4), (5, 4)),
    ("kernel_size: 1 stride: 3", (5, 5), (3, 3)),
    ("kernel_h: 4 kernel_w: 5 stride: 3 pad_h: 1 pad_w: 2", (9, 7), (4, 3)),
    ("global_pooling: true", (4, 3), (1, 1)),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("pool", ["MAX", "AVE"])
@pytest.mark.parametrize(("fields", "size", "pooled"), IN_LANES, ids=str)
@pytest.mark.parametrize("name", ["image_lanes", "channel_lanes"])
def test_lanes_give_the_same_bits(name, fields, size, pooled, pool, dtype):
    shape = (2 * lanes(), lanes() + 3)
    case = pooling(f"pool: {pool} {fields}", normal(*shape, *size), (*shape, *pooled))
    expected = Trial(case, dtype).both()
    forced = {f"layer.{which}": name for which in ("forward", "backward_data")}
    trial = Trial(case, dtype)
    trial.net.choose_kernels({}, forced)
    assert forced.items() <= trial.net.lowering.chosen_names().items()
    for got, wanted in zip(trial.both(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_lanes_are_refused_where_they_cannot_serve():
    def refused(count, *tops):
        case = pooling("kernel_size: 2", normal(count, 2, 2, 2), *tops)
        layer = Trial(case).planned.layer
        return {c.name: c.refuse(layer) for c in layer.candidates("forward")}

    images, top = lanes() + 1, (lanes() + 1, 2, 1, 1)
    assert refused(images, top) == {
        "plain": None,
        "image_lanes": f"{images} images do not fill lanes of {lanes()}",
        "channel_lanes": None,
    }
    masked = refused(lanes(), *[(lanes(), 2, 1, 1)] * 2)
    assert set(masked.values()) == {None, "the mask is in N, C, H, W"}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("pool_pad_ge_kernel", "got pad 2x2 with kernel 2x2, expected pad < kernel"),
        ("pool_kernel_gt_input", "kernel 5x5 does not fit input 3x3 (+pad 0x0)"),
    ],
)
def test_public_failures_name_file_and_line(case, message):
    path = RUN / case / "net.prototxt"
    lines = path.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "Pooling" in text)
    with pytest.raises(DescriptionError, match=re.escape(message)) as raised:
        Net(path)
    assert f"net.prototxt:{line}:" in str(raised.value)
    assert 'layer "p" (Pooling)' in str(raised.value)
