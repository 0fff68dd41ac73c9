"""The peer's side of the benchmarks: whole training steps of the same nets in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional


class WithinChannelLRN(nn.Module):
    """Caffe's WITHIN_CHANNEL region over 3 x 3 windows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 5e-5 * functional.avg_pool2d(x * x, 3, 1, 1)) ** -0.75


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def cifar10(full: bool) -> nn.Module:
    def norm() -> list[nn.Module]:
        return [WithinChannelLRN()] if full else []

    head = [nn.Linear(1024, 10)] if full else [nn.Linear(1024, 64), nn.Linear(64, 10)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        *norm(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        *norm(),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
        *head,
    )


def alexnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(), nn.LocalResponseNorm(5, 1e-4, 0.75)),
        nn.MaxPool2d(3, 2),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU()),
        *(nn.LocalResponseNorm(5, 1e-4, 0.75), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU()),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        *classifier(9216),
    )


def classifier(features: int) -> list[nn.Module]:
    """Return the three inner products that AlexNet and VGG end with."""
    hidden = [
        layer
        for inputs in (features, 4096)
        for layer in (nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout())
    ]
    return [*hidden, nn.Linear(4096, 1000)]


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(inplace=True)]
            channels = filters
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, nn.Flatten(), *classifier(25088))


class Bottleneck(nn.Module):
    """A residual block that strides in its first convolution, as Caffe's ResNet does."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()

        def norm(inputs: int, outputs: int, *window: int) -> list[nn.Module]:
            conv = nn.Conv2d(inputs, outputs, *window, bias=False)
            return [conv, nn.BatchNorm2d(outputs)]

        self.body = nn.Sequential(
            *(*norm(channels, middle, 1, stride), nn.ReLU(inplace=True)),
            *(*norm(middle, middle, 3, 1, 1), nn.ReLU(inplace=True)),
            *norm(middle, 4 * middle, 1),
        )
        same = channels == 4 * middle and stride == 1
        skip = [] if same else norm(channels, 4 * middle, 1, stride)
        self.skip = nn.Sequential(*skip)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x), inplace=True)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
    channels = 64
    for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(count):
            layers.append(Bottleneck(channels, middle, stride if block == 0 else 1))
            channels = 4 * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Inception(nn.Module):
    """Four branches over the same bottom, put behind each other along the channels."""

    def __init__(
        self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, kernel: int) -> nn.Module:
            layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
            return nn.Sequential(layer, nn.ReLU(inplace=True))

        self.branches = nn.ModuleList(
            [
                conv(channels, one, 1),
                nn.Sequential(conv(channels, three[0], 1), conv(*three, 3)),
                nn.Sequential(conv(channels, five[0], 1), conv(*five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, pooled, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet() -> nn.Module:
    """Without the auxiliary heads."""

    def norm() -> nn.Module:
        return nn.LocalResponseNorm(5, 1e-4, 0.75)

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(inplace=True), pool(), norm()),
        *(nn.Conv2d(64, 64, 1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(inplace=True), norm(), pool()),
        Inception(192, 64, (96, 128), (16, 32), 32),
        Inception(256, 128, (128, 192), (32, 96), 64),
        pool(),
        Inception(480, 192, (96, 208), (16, 48), 64),
        Inception(512, 160, (112, 224), (24, 64), 64),
        Inception(512, 128, (128, 256), (24, 64), 64),
        Inception(512, 112, (144, 288), (32, 64), 64),
        Inception(528, 256, (160, 320), (32, 128), 128),
        pool(),
        Inception(832, 256, (160, 320), (32, 128), 128),
        Inception(832, 384, (192, 384), (48, 128), 128),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, 1000)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "lenet": lenet,
    "cifar10_quick": lambda: cifar10(full=False),
    "cifar10_full": lambda: cifar10(full=True),
    "alexnet": alexnet,
    "vgg16": vgg16,
    "googlenet": googlenet,
    "resnet50": resnet50,
}


def make_step(
    name: str, shape: tuple[int, ...], classes: int, threads: int, way: str
) -> Callable[[], float]:
    """Return a function that runs one training step and gives its seconds.

    Parameters
    ----------
    name : str
    shape : tuple of int
        Of the images, which are random.
    classes, threads : int
    way : str
        "default", "channels_last" or "compile".
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    form = torch.channels_last if way == "channels_last" else torch.contiguous_format
    net = NETS[name]().to(memory_format=form)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    forward = torch.compile(net) if way == "compile" else net
    x = torch.rand(shape).to(memory_format=form)
    y = torch.randint(0, classes, (shape[0],))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def make_forward(sizes: Sequence[int], threads: int, way: str) -> Callable[[], float]:
    """Return a function that runs one convolution and gives its seconds.

    Parameters
    ----------
    sizes : sequence of int
        Batch, input size, filters, channels, kernel and stride.
    threads : int
    way : str
        "default" or "channels_last".
    """
    batch, size, filters, channels, kernel, stride = sizes
    torch.set_num_threads(threads)
    form = torch.channels_last if way == "channels_last" else torch.contiguous_format
    net = nn.Conv2d(channels, filters, kernel, stride).to(memory_format=form)
    x = torch.randn(batch, channels, size, size).to(memory_format=form)

    def step() -> float:
        with torch.no_grad():
            start = time.perf_counter()
            net(x)
            return time.perf_counter() - start

    return step
