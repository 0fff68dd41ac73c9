"""Sums stay in registers: the innermost loops of compiled tiles touch no vector on the stack."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cgdnn.kernels.stencil import Side, Window

ROOT = Path(__file__).parents[2]
WINDOW = Window(1, 20, 50, *[Side(12, 5, 1, 2, 1)] * 2)
# By its name alone Numba would tune for that processor, but still use all that this one has: 32
# registers, and masks in others. An empty list of features leaves those that go with the name.
HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
TILES = [
    "cgdnn.kernels.conv_direct.conv_direct_filters",
    "cgdnn.kernels.conv_direct.conv_direct_pixels",
    "cgdnn.kernels.conv_direct.conv_direct_backward_weights",
    "cgdnn.kernels.conv_images.forward(WINDOW)",
    "cgdnn.kernels.conv_images.backward_data(WINDOW)",
    "cgdnn.kernels.conv_images.backward_data_routed(WINDOW)",
    "cgdnn.kernels.conv_images.backward_weights(WINDOW)",
    "cgdnn.kernels.conv_images.backward_weights_routed(WINDOW)",
    "cgdnn.kernels.conv_unfold.conv_forward_unfold",
    "cgdnn.kernels.conv_unfold.conv_backward_weights_unfold",
    "cgdnn.kernels.conv_sparse.conv_backward_weights_sparse('blocks', 5, 0)",
    "cgdnn.kernels.conv_sparse.conv_backward_weights_sparse('spread', 5, 3, 'lanes')",
    "cgdnn.kernels.conv_sparse.conv_backward_data_sparse(5, False)",
    "cgdnn.kernels.conv_sparse.conv_backward_data_sparse(5, True)",
    "cgdnn.kernels.inner_product.product_nt",
    "cgdnn.kernels.inner_product_sparse.sgd_over_nonzeros",
    "cgdnn.kernels.inner_product_sparse.product_listed",
    "tests.kernels.test_winograd_tiles.products",
]


def innermost_loops(assembly):
    """Yield the lines of each loop that is one block: a label, and a jump back to it."""
    lines = assembly.splitlines()
    start = 0
    for end, line in enumerate(lines):
        if re.fullmatch(r"\.LBB\w+:", line):
            start = end
        jump = re.match(r"\tj\w+\t(\.LBB\w+)", line)
        if jump and lines[start] == f"{jump[1]}:":
            yield lines[start:end]


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("target", [{}, HASWELL])
def test_sums_stay_in_registers(target, tile, tmp_path):
    module = tile.partition("(")[0].rpartition(".")[0]
    imports = f"import {module}; from tests.kernels.test_registers import WINDOW"
    run = subprocess.run(
        [sys.executable, "-c", f"{imports}; {tile}.entry('float32')"],
        env={
            **os.environ,
            **target,
            "NUMBA_DUMP_ASSEMBLY": "1",
            "CGDNN_CACHE_DIR": str(tmp_path),
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    multiplies = [
        loop for loop in innermost_loops(run.stdout) if any("vfmadd" in line for line in loop)
    ]
    assert multiplies
    for loop in multiplies:  # an array on the stack that a loop runs over has an index, too
        assert not [line for line in loop if "mm" in line and "(%rsp)" in line]
