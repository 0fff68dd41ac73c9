from __future__ import annotations

import numpy as np
import pytest

from cgdnn.layers.convolution import Convolution
from cgdnn.plan.intensity import ConvolutionShape
from cgdnn.proto.cgdnn_pb2 import NetParameter
from cgdnn.runtime.net import Net

# The characterization table of spg-CNN: size, Nf, Nc, kernel, intrinsic, unfold, regions.
TABLE = [
    (32, 32, 32, 4, 362, 25, (4, 5)),
    (64, 1024, 512, 2, 2015, 725, (0, 1)),
    (256, 256, 128, 3, 1510, 226, (2, 3)),
    (128, 128, 64, 7, 3561, 113, (2, 3)),
    (128, 512, 256, 5, 6567, 456, (2, 3)),
    (64, 64, 16, 11, 1921, 44, (4, 5)),
]


@pytest.mark.parametrize(("size", "nf", "nc", "kernel", "intrinsic", "unfold", "regions"), TABLE)
def test_the_papers_table(
    size: int,
    nf: int,
    nc: int,
    kernel: int,
    intrinsic: int,
    unfold: int,
    regions: tuple[int, int],
) -> None:
    shape = ConvolutionShape(nc, nf, (size, size), (kernel, kernel), (1, 1), (1, 1))
    assert int(shape.intrinsic_intensity) == intrinsic
    assert int(shape.unfold_intensity) == unfold
    assert (shape.region(0.2), shape.region(0.9)) == regions


def test_stride_and_flops_by_hand() -> None:
    shape = ConvolutionShape(3, 96, (227, 227), (11, 11), (4, 4), (1, 1))
    assert shape.output_size == (55, 55)
    assert shape.flops == 2 * 96 * 55 * 55 * 3 * 121


def test_the_shape_of_a_layer() -> None:
    message = NetParameter()
    layer = message.layer.add(name="x", type="Input", top=["x"])
    layer.input_param.shape.add(dim=[5, 6, 9, 10])
    conv = message.layer.add(name="c", type="Convolution", bottom=["x"], top=["y"])
    param = conv.convolution_param
    param.num_output, param.group, param.kernel_h, param.kernel_w = 4, 2, 3, 2
    param.stride_h, param.stride_w, param.pad_h = 1, 2, 1
    param.dilation.extend([2, 3])
    planned = Net(message, threads=1).assembly.layers[1].layer
    assert isinstance(planned, Convolution)
    shape = ConvolutionShape.of(planned)
    assert shape == ConvolutionShape(3, 2, (11, 10), (3, 2), (1, 2), (2, 3))
    assert (2, *shape.output_size) == (2, 7, 4)
    assert 5 * 2 * shape.flops == 2 * planned.multiply_adds()


def test_the_papers_worked_example() -> None:
    message = NetParameter()
    layer = message.layer.add(name="x", type="Input", top=["x"])
    layer.input_param.shape.add(dim=[1, 2, 3, 3])
    conv = message.layer.add(name="c", type="Convolution", bottom=["x"], top=["y"])
    conv.convolution_param.num_output = 2
    conv.convolution_param.kernel_size.append(2)
    conv.convolution_param.bias_term = False
    net = Net(message, threads=1)
    net.params["c"][0].data[...] = [
        [[[1, 0], [0, 1]], [[0, 1], [1, 0]]],
        [[[1, 1], [0, 0]], [[0, 0], [2, 2]]],
    ]
    image = [[[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[2, 3, 2], [1, 0, 1], [2, 1, 2]]]
    y = net.forward(x=np.array([image]))["y"]
    np.testing.assert_array_equal(y[0], [[[6, 2], [3, 4]], [[3, 3], [7, 7]]])
