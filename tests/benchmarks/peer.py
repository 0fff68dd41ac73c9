"""The peer's side of the benchmarks: whole training steps of the same nets in PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable

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


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lenet, (64, 1, 28, 28)),
    "cifar10_quick": (lambda: cifar10(full=False), (100, 3, 32, 32)),
    "cifar10_full": (lambda: cifar10(full=True), (100, 3, 32, 32)),
}


def make_step(name: str, threads: int, channels_last: bool) -> Callable[[], float]:
    """Return a function that runs one training step and gives its seconds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    form = torch.channels_last if channels_last else torch.contiguous_format
    make, shape = NETS[name]
    net = make().to(memory_format=form)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    x = torch.rand(shape).to(memory_format=form)
    y = torch.randint(0, 10, (shape[0],))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step
