"""cgdnn: train convolutional networks on multicore CPUs from Caffe's network descriptions.

>>> import cgdnn
>>> solver = cgdnn.Solver("lenet_solver.prototxt")
>>> solver.solve()
>>> net = cgdnn.Net("lenet.prototxt", phase="TEST", weights="lenet_iter_10000.caffemodel")
>>> net.forward()["accuracy"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgdnn.errors import CgdnnError
    from cgdnn.runtime.net import Net
    from cgdnn.solvers._base import Solver

__all__ = ["CgdnnError", "Net", "Solver", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "CgdnnError": "cgdnn.errors",
    "Net": "cgdnn.runtime.net",
    "Solver": "cgdnn.solvers._base",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for on first use, so that ``import cgdnn`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cgdnn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
