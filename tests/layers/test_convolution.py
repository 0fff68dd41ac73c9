import re

import numpy as np
import pytest
from google.protobuf import text_format

from cgdnn.errors import DescriptionError
from cgdnn.kernels.conv_winograd import FLIPPED, FORWARD, TRANSPOSED
from cgdnn.layers import _winograd, convolution
from cgdnn.layers._images import WinogradImages
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net
from tests.layers.contract import Case, Trial, check_accumulation, check_gradients, given, normal


def case(fields, x, shape, bottoms=1, **more):
    text = f"convolution_param {{ num_output: {fields} }}"
    return Case("Convolution", text, [normal(*x)] * bottoms, [shape] * bottoms, **more)


CASES = [
    case("3 kernel_size: 3", (2, 2, 5, 6), (2, 3, 3, 4)),
    case("3 kernel_size: 3 bias_term: false", (2, 2, 5, 6), (2, 3, 3, 4)),
    case(
        '3 kernel_size: 2 weight_filler { type: "xavier" } bias_filler { value: 1 }',
        (1, 2, 3, 3),
        (1, 3, 2, 2),
    ),
    case("2 kernel_size: 3 pad: 1 stride: 2", (2, 3, 5, 6), (2, 2, 3, 3)),
    case("2 kernel_size: 3 pad: 2 dilation: 2", (2, 2, 6, 5), (2, 2, 6, 5)),
    case(
        "2 kernel_h: 2 kernel_w: 3 pad_h: 1 pad_w: 2 stride_h: 2 stride_w: 3",
        (2, 2, 5, 6),
        (2, 2, 3, 3),
    ),
    case(
        "2 kernel_size: 2 kernel_size: 3 pad: 1 pad: 0 stride: 2 stride: 1 dilation: 1 dilation: 2",
        (1, 2, 5, 6),
        (1, 2, 3, 2),
    ),
    case("4 kernel_size: 3 group: 2", (2, 6, 4, 4), (2, 4, 2, 2)),
    case("3 kernel_size: 1", (2, 4, 3, 5), (2, 3, 3, 5)),
    case("3 kernel_size: 1 stride: 2", (2, 4, 3, 5), (2, 3, 2, 3), hides_nan="between the strides"),
    case("3 kernel_size: 5 pad: 4", (1, 1, 2, 3), (1, 3, 6, 7)),
    case("2 kernel_size: 3", (2, 2, 7), (2, 2, 5)),
    case("2", (3, 4), (3, 2)),
    case("2 kernel_size: 2 pad: 1 stride: 2", (2, 2, 3, 4, 5), (2, 2, 2, 3, 3)),
    case("2 kernel_size: 3 axis: 2", (2, 3, 2, 4, 5), (2, 3, 2, 2, 3)),
    case("2 kernel_size: 3 axis: -2", (2, 4, 2, 5), (2, 4, 2, 3)),
    case("2 kernel_size: 3 axis: 0", (2, 5, 6), (2, 3, 4)),
    case("2 kernel_size: 3 force_nd_im2col: true engine: CAFFE", (1, 2, 4, 4), (1, 2, 2, 2)),
    case("2 kernel_size: 3 pad: 1", (2, 2, 4, 4), (2, 2, 4, 4), bottoms=3),
    # Large enough for Winograd's algorithm.
    case("32 kernel_size: 3 pad: 1", (2, 32, 8, 7), (2, 32, 8, 7)),
    case("16 kernel_size: 5 group: 2", (3, 32, 9, 12), (3, 16, 5, 8), bottoms=2),
]


def test_known_values():
    made = Case(
        "Convolution",
        "convolution_param { num_output: 1 kernel_size: 2 stride: 1 }",
        [given([[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]])],
        [(1, 1, 2, 2)],
        params=[given([[[[1, 0], [0, 10]]]]), given([0.5])],
    )
    trial = Trial(made)
    np.testing.assert_array_equal(trial.forward()[0], [[[[51.5, 62.5], [84.5, 95.5]]]])
    trial.weights = [np.array([[[[1.0, 0.0], [0.0, 2.0]]]])]
    (dx,) = trial.backward()
    np.testing.assert_array_equal(dx, [[[[1, 0, 0], [0, 12, 0], [0, 0, 20]]]])
    dw, db = trial.param_diffs()
    np.testing.assert_array_equal(dw, [[[[11, 14], [20, 23]]]])
    np.testing.assert_array_equal(db, [3])


def test_large_weights_are_cut_over_filters(monkeypatch):
    monkeypatch.setattr(convolution, "_MOST_PARTIAL", 0)
    for made in (CASES[0], CASES[1], CASES[7], CASES[-1]):
        assert not Trial(made).uses_partials()
        check_gradients(made)
        check_accumulation(made)


def made_alone(fields, shape, exact=False):
    text = f"""
    force_backward: true
    input: "x" input_shape {{ {" ".join(f"dim: {size}" for size in shape)} }}
    layer {{ name: "conv" type: "Convolution" bottom: "x" top: "y"
             convolution_param {{ num_output: {fields} }} }}
    """
    return Net(text_format.Parse(text, NetParameter()), threads=1, exact=exact)


def chosen(fields, shape, exact=False):
    net = made_alone(fields, shape, exact)
    return net.lowering.choices[-1], net.assembly.layers[-1].layer


def test_winograd_is_chosen_for_wide_layers_in_every_pass():
    for fields, shape in (
        ("32 pad: 2 kernel_size: 5", (100, 32, 16, 16)),
        ("50 kernel_size: 5", (64, 20, 12, 12)),
        ("512 pad: 1 kernel_size: 3", (8, 512, 14, 14)),
    ):
        names = {candidate.name for candidate in chosen(fields, shape)[0].values()}
        assert names <= {"winograd", "winograd_images"}
        exact = chosen(fields, shape, exact=True)[0]
        assert not any("winograd" in candidate.name for candidate in exact.values())


@pytest.mark.parametrize(
    ("size", "outputs"), [(5, 5), (7, 4), (10, 5), (13, 7), (14, 7), (28, 7), (56, 7)]
)
def test_winograd_takes_the_tiles_that_cover_a_plane_best(size, outputs):
    winograd = chosen("64 kernel_size: 3 pad: 1", (8, 64, size, size))[1]._winograd()
    for form in (FORWARD, FLIPPED, TRANSPOSED):
        assert winograd._blocking(form).outputs == outputs
    assert winograd._summing.outputs == outputs


def test_winograd_takes_smaller_tiles_where_these_are_few_and_filters_many():
    _, layer = chosen("512 kernel_size: 3 pad: 1", (8, 512, 14, 14))
    assert layer._winograd()._blocking(FORWARD).outputs == 5


@pytest.mark.parametrize(
    ("fields", "channels", "size", "outputs"),
    [
        ("50 kernel_size: 5", 20, 12, 8),
        ("50 kernel_size: 5", 20, 8, 4),
        ("32 kernel_size: 3 pad: 1", 16, 14, 7),
        ("32 kernel_size: 3 pad: 1", 16, 8, 4),
    ],
)
def test_winograd_takes_the_tiles_that_cover_a_plane_best_with_images_in_lanes(
    fields, channels, size, outputs
):
    layer = chosen(fields, (64, channels, size, size))[1]
    winograd = layer._images(WinogradImages)
    for which in ("forward", "backward_data", "backward_weights"):
        assert winograd._outputs(which) == outputs


def test_winograd_leaves_pieces_for_several_cores():
    net = made_alone("384 kernel_size: 3 pad: 1", (32, 256, 13, 13))
    tasks = net.lowering.single_pass(1, "forward").tasks
    names = [task.step.kernel.name for task in tasks if task.step is not None]  # not of joins
    assert names.count("conv_winograd.conv_winograd") >= 4


def test_winograd_is_worth_it_for_colour_images():
    _, layer = chosen("32 kernel_size: 5 pad: 2", (100, 3, 32, 32))
    (winograd,) = (c for c in layer.candidates("forward") if c.name == "winograd")
    assert winograd.refuse(layer) is None


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ("96 kernel_size: 11 stride: 4", (32, 3, 227, 227)),
        ("250 kernel_size: 5 stride: 2", (16, 120, 64, 64)),
    ],
)
def test_winograd_is_chosen_for_phases_of_large_kernels(fields, shape):
    assert {candidate.name for candidate in chosen(fields, shape)[0].values()} == {"winograd"}
    exact = chosen(fields, shape, exact=True)[0]
    assert "winograd" not in {candidate.name for candidate in exact.values()}


@pytest.mark.parametrize(
    ("fields", "shape", "reason"),
    [
        ("32 kernel_size: 3 stride: 2", (8, 32, 32, 32), "times as long as"),
        ("32 kernel_size: 3 stride_h: 2 stride_w: 1", (2, 32, 16, 16), "the same stride on both"),
        ("32 kernel_size: 11 stride: 2", (2, 32, 16, 16), "up to 5 times the stride"),
        ("32 kernel_size: 3 dilation: 2", (2, 32, 16, 16), "with dilation 1"),
        ("32 kernel_size: 3", (2, 32, 16), "serves two spatial axes"),
        ("32 kernel_size: 7", (2, 32, 16, 16), "serves kernels of 3x3 and 5x5"),
        ("32 kernel_h: 3 kernel_w: 5", (2, 32, 16, 16), "serves kernels of 3x3 and 5x5"),
        ("20 kernel_size: 5", (64, 1, 28, 28), "times as long as"),
        ("32 kernel_size: 3 group: 32", (8, 32, 32, 32), "times as long as"),
    ],
)
def test_winograd_is_refused_with_a_reason(fields, shape, reason):
    choices, layer = chosen(fields, shape)
    assert choices["forward"].name != "winograd"
    refused = {c.name: c.refuse(layer) for c in layer.candidates("forward")}
    assert reason in refused["winograd"]


def test_winograd_is_refused_where_exact_results_are_asked_for():
    _, layer = chosen("32 kernel_size: 3", (8, 32, 16, 16), exact=True)
    refused = {c.name: c.refuse(layer) for c in layer.candidates("forward")}
    assert "exact" in refused["winograd"]


def test_transformed_weights_are_cut_over_filters(monkeypatch):
    monkeypatch.setattr(_winograd, "_MOST_PARTIAL", 0)
    made = CASES[-2]
    assert not Trial(made).uses_partials()
    check_gradients(made)
    check_accumulation(made)


@pytest.mark.parametrize(
    ("fields", "shape", "text"),
    [
        ("2", (2, 3, 6, 6), "got kernel_size 0 times, expected once, or once for each of the 2"),
        ("2 kernel_size: [1, 2, 3]", (2, 3, 6, 6), "got kernel_size 3 times"),
        ("2 kernel_h: 3", (2, 3, 6, 6), "got kernel_size 3x0, expected 1 or more"),
        ("2 kernel_size: 3 kernel_h: 3", (2, 3, 6, 6), "kernel_h or kernel_w together with"),
        ("2 kernel_h: 3 kernel_w: 3", (2, 3, 6), "kernel_h or kernel_w with 1 spatial axes"),
        ("2 kernel_size: 3 pad: 1 pad_w: 1", (2, 3, 6, 6), "pad_h or pad_w together with pad"),
        ("2 kernel_size: 3 stride: 0", (2, 3, 6, 6), "got stride 0x0, expected 1 or more"),
        ("2 kernel_size: 3 dilation: 0", (2, 3, 6, 6), "got dilation 0x0, expected 1 or more"),
        ("0 kernel_size: 3", (2, 3, 6, 6), "got num_output 0, expected 1 or more"),
        ("4 kernel_size: 3 group: 0", (2, 3, 6, 6), "not divisible by group 0"),
        (
            "50 kernel_size: 3 group: 4",
            (2, 4, 6, 6),
            "num_output 50 is not divisible by group 4. Use a multiple of 4, such as 48 or 52.",
        ),
        (
            "4 kernel_size: 3 group: 2",
            (2, 3, 6, 6),
            "3 input channels are not divisible by group 2. Use a multiple of 2, such as 2 or 4.",
        ),
        (
            "2 kernel_size: 5",
            (2, 3, 3, 3),
            "kernel 5x5 does not fit input 3x3 (+pad 0). Use a smaller kernel, or more padding.",
        ),
        (
            "2 kernel_h: 3 kernel_w: 2 dilation: 2 pad_w: 1",
            (2, 3, 4, 6),
            "kernel 3x2, dilated to 5x3, does not fit input 4x6 (+pad 0x1)",
        ),
        ("2 kernel_size: 3 axis: 4", (2, 3, 6, 6), "axis 4 does not exist"),
    ],
)
def test_refusals(fields, shape, text):
    with pytest.raises(DescriptionError, match=re.escape(text)):
        Trial(case(fields, shape, (1,)))


def test_refusals_name_the_place(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: [1, 3, 6, 6] } } }\n'
        'layer { name: "c" type: "Convolution" bottom: "x" top: "y"\n'
        "  convolution_param { num_output: 2 kernel_size: 3\n"
        "    group: 2 } }\n"
    )
    with pytest.raises(DescriptionError, match=r'prototxt:4:5: layer "c" \(Convolution\): 3 input'):
        Net(path)


def test_tops_match_bottoms():
    two = Case("Convolution", CASES[0].fields, [normal(2, 2, 5, 6)] * 2, [(2, 3, 3, 4)])
    with pytest.raises(DescriptionError, match="got 2 bottoms and 1 tops"):
        Trial(two)
    mixed = [normal(2, 2, 5, 6), normal(2, 2, 5, 5)]
    with pytest.raises(DescriptionError, match=r"got \(2, 2, 5, 5\), expected \(2, 2, 5, 6\)"):
        Trial(Case("Convolution", CASES[0].fields, mixed, [(1,), (1,)]))


def test_multiply_adds():
    layer = Trial(case("6 kernel_size: 3 group: 2", (2, 4, 5, 6), (2, 6, 3, 4))).planned.layer
    assert layer.multiply_adds() == 2 * (6 * 3 * 4) * (2 * 3 * 3)
