from __future__ import annotations

from cgdnn.cli import bench
from cgdnn.cli.bench import CONVOLUTION, SUITE, _flips, runnable
from cgdnn.plan.intensity import ConvolutionShape
from cgdnn.plan.lower import PASSES

TINY = bench.SuiteLayer("mnist.1", 6, 4, 2, 3, 1)


def test_the_suite_is_the_papers():
    assert len(SUITE) == 12
    by_name = {layer.name: layer for layer in SUITE}
    layer = by_name["imagenet1k.1"].assemble(2).layers[CONVOLUTION].layer
    assert ConvolutionShape.of(layer) == ConvolutionShape(
        3, 96, (224,) * 2, (11,) * 2, (4,) * 2, (1, 1)
    )
    assert layer.multiply_adds() == 2 * (96 * 54 * 54) * (3 * 11 * 11)


def test_kernels_that_skip_zeros_run_whatever_the_zeros():
    assembly = TINY.assemble(2)
    names = [candidate.name for candidate in runnable(assembly, "backward_weights")]
    assert names[0] == "sparse"
    assert names[-2:] == ["unfold_gemm", "parallel_gemm"]
    assert assembly.layers[CONVOLUTION].layer.zeros == 0


def test_the_tables(cgdnn, monkeypatch):
    monkeypatch.setattr(bench, "SUITE", (TINY,))
    code, out, _ = cgdnn("bench", "convs", "--quick", "--batch=2")
    assert code == 0
    head, dense, weights, data, flips = out.strip().split("\n\n")
    assert head.endswith("GF/s at best on a core; 2 images, 1 core")
    title, columns, *rows = dense.splitlines()
    assert title == "mnist.1: 2 x 6 x 6 to 4 filters of 3 x 3, stride 1"
    assert columns.split(maxsplit=3)[:3] == ["pass", "kernel", "ms"]
    assert {row.split()[0] for row in rows} >= set(PASSES)
    assert sum("parallel_gemm" in row for row in rows) == 3
    for row in rows:
        milliseconds, _, share = map(float, row.split()[-3:])
        assert milliseconds > 0
        assert 0 <= share < 1
    for table in (weights, data):
        title, columns, *rows = table.splitlines()
        assert "parallel_gemm" not in columns
        assert [float(row.split()[0]) for row in rows] == list(bench.QUICK_ZEROS)
        assert all(row.split()[-1] in columns.split() for row in rows)
    assert len(flips.splitlines()) == 2


def test_the_flips():
    sweep = {
        0.0: {"dense": 1.0, "sparse": 3.0},
        0.5: {"dense": 1.0, "sparse": 1.5},
        0.9: {"dense": 1.0, "sparse": 0.5},
        0.99: {"dense": 1.0, "sparse": 0.1},
    }
    assert _flips(sweep) == "dense, sparse from 0.90"
    assert _flips({0.0: {"dense": 1.0, "sparse": 3.0}}) == "dense"


def test_no_images(cgdnn):
    code, _, err = cgdnn("bench", "convs", "--batch=0")
    assert code == 2
    assert "--batch: got 0, expected at least 1" in err
