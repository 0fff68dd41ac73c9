"""Find every layer: each module of this package may define any number of `Layer` classes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from functools import lru_cache

import cgdnn.layers
from cgdnn.errors import DescriptionError
from cgdnn.layers._base import Layer
from cgdnn.layers._fillers import check_fillers
from cgdnn.netdef.graph import Node


@lru_cache(maxsize=1)
def layer_types() -> dict[str, type[Layer]]:
    """Return every layer class by its type string, in alphabetical order."""
    found: dict[str, type[Layer]] = {}
    for module_info in pkgutil.iter_modules(cgdnn.layers.__path__):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"cgdnn.layers.{module_info.name}")
        found |= {
            name: member
            for name, member in vars(module).items()
            if inspect.isclass(member)
            and issubclass(member, Layer)
            and member.__module__ == module.__name__
            and not name.startswith("_")
        }
    return dict(sorted(found.items()))


def make_layer(node: Node, phase: str) -> Layer:
    """Return the layer that `node` describes.

    Raises
    ------
    DescriptionError
        The type is unknown, or a field is wrong for it.
    """
    types = layer_types()
    if node.type not in types:
        close = difflib.get_close_matches(node.type, types, n=1)
        hint = f'Did you mean "{close[0]}"?' if close else f"Known types: {', '.join(types)}."
        raise DescriptionError(
            f'{node.at("type")}: layer "{node.name}": unknown layer type "{node.type}". {hint}'
        )
    check_fillers(node)
    return types[node.type](node, phase)
