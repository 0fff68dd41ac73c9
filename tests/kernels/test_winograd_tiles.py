import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgdnn import machine
from cgdnn.kernels._jit import INT, array, kernel
from cgdnn.kernels.vector import lanes_of
from cgdnn.kernels.winograd_tiles import multiply_blocks, panel_vectors

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@kernel(array(3), array(3), array(3), INT, INT, INT)
def products(a, b, c, rows, depth, keep):
    """C (+)= A B for a (blocks of k, rows, L), b (depth, vectors, L) and c (rows, vectors, L)."""
    lanes = lanes_of(a)
    multiply_blocks(
        *(a, 0, lanes, lanes * lanes, 1, a.shape[1] * lanes, rows, depth),
        *(b, 0, b.shape[1] * lanes, lanes, b.shape[1]),
        *(c, 0, c.shape[1] * lanes, c.shape[1] * lanes * lanes, lanes, keep, 0),
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("depth", [1, 3, 16, 37])
@pytest.mark.parametrize("vectors", range(1, panel_vectors() + 1))
def test_products_of_one_panel(dtype, keep, depth, vectors):
    lanes = machine.vector_bytes() // np.dtype(dtype).itemsize
    rng = np.random.default_rng(depth)
    rows, room = 11, 16  # a product computes up to a multiple of 8 rows
    blocks = -(-depth // lanes)
    a = rng.standard_normal((blocks, room, lanes)).astype(dtype)
    b = rng.standard_normal((depth, vectors, lanes)).astype(dtype)
    c = np.full((room, vectors, lanes), 0.5 if keep else np.nan, dtype)
    products(a, b, c, rows, depth, keep)
    left = a.transpose(1, 0, 2).reshape(room, -1)[:rows, :depth]
    want = keep / 2 + np.einsum("ik,kvl->ivl", left, b)
    np.testing.assert_allclose(c[:rows], want, rtol=0, atol=depth * TOLERANCE[dtype])


def innermost_loops(assembly):
    """Yield the lines of each loop that has no loop in it."""
    lines = assembly.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.LBB\w+:", line)}
    loops = []
    for end, line in enumerate(lines):
        jump = re.match(r"\tj\w+\t(\.LBB\w+)", line)
        if jump and labels.get(jump[1], end) < end:
            loops.append((labels[jump[1]], end))
    for start, end in loops:
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops):
            yield lines[start:end]


@pytest.mark.slow
@pytest.mark.parametrize("target", [{}, {"NUMBA_CPU_NAME": "haswell"}])
def test_sums_stay_in_registers(target, tmp_path):
    script = "from tests.kernels.test_winograd_tiles import products; products.entry('float32')"
    run = subprocess.run(
        [sys.executable, "-c", script],
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
    assert len(multiplies) >= 2
    for loop in multiplies:
        assert not [line for line in loop if "mm" in line and "(%rsp" in line]
