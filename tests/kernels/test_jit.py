import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = """
import sys
import numpy as np
from cgdnn.kernels import conv_sparse

for columns in map(int, sys.argv[1:]):
    window = conv_sparse.Window(1, 1, 1, (1, columns), (1, 1), (1, columns), (1, 1), (0, 0))
    w = np.arange(1, columns + 1, dtype=np.float32).reshape(1, 1, 1, columns)
    packed = np.zeros((1, window.data_row), np.float32)
    conv_sparse.conv_sparse_pack_weights(w, packed, 0, 1)
    dtypes = {"real": np.float32, "int32": np.int32, "int64": np.int64}
    scratch = [np.zeros(length, dtypes[kind]) for length, kind in window.data_scratch()]
    dx, dy = np.zeros_like(w), np.ones((1, 1, 1, 1), np.float32)
    kernel = conv_sparse.conv_backward_data_sparse(columns, False)
    kernel(dy, packed, dx, 1, 1, 1, 0, 0, 1, window.data_band(), window.data_room, *scratch, 0, 1)
    print(*dx.ravel().astype(int))
"""


def run_generated(cache, *columns):
    return subprocess.run(
        [sys.executable, "-c", GENERATED, *map(str, columns)],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "CGDNN_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def test_kernels_of_one_generator_stay_apart_in_the_cache(tmp_path):
    # After the first process the others compile one kernel each, which only its name tells apart.
    for columns in (2, 1, 3):
        run_generated(tmp_path, columns)
    assert run_generated(tmp_path, 1, 3) == ["1", "1 2 3"]
