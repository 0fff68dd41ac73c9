"""Caffe's own values for single layers: forward, backward, and accumulation over two passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cgdnn.layers._phases import Phased
from cgdnn.layers._registry import layer_types
from cgdnn.layers._winograd import Winograd
from cgdnn.runtime.net import Net

GOLDEN = Path(__file__).parent
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "MANIFEST.json").read_text())

# Cases where Caffe is wrong and cgdnn differs on purpose (README.md); `mended` tests them.
MENDED_ACCUMULATION = {
    "scale_all",
    "scale_all_bias",
    "scale_axis0",
    "scale_axis0_num2",
    "scale_axis1_n1",
}
MENDED_FORWARD = {"pool_max_outside_window"}
# Formats that cgdnn does not read yet.
WAITING = {"data_leveldb", "data_leveldb_default_backend"}


def meta_of(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / "cases" / f"{name}.npz") as values:
        return dict(json.loads(str(values["meta"])))


def runnable(name: str) -> bool:
    return name not in WAITING and all(kind in layer_types() for _, kind in meta_of(name)["layers"])


CASES = [name for name in MANIFEST if runnable(name)]
EXACT = [name for name in CASES if MANIFEST[name]["compare"] == "exact"]


def assert_close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    tolerance = 1e-4 * max(1e-3, float(np.abs(want).max(initial=0)))
    worst = float(np.abs(got.astype(np.float64) - want).max(initial=0))
    assert worst <= tolerance, f"{what}: differs by {worst:.3g}, tolerance {tolerance:.3g}"


def types_of(name: str) -> set[str]:
    return {kind for _, kind in meta_of(name)["layers"]}


def make_net(name: str, meta: dict[str, Any], exact: bool) -> Net:
    return Net(
        f"cases/{name}.prototxt",
        meta["phase"],
        meta.get("level", 0),
        meta.get("stages", ()),
        threads=2,
        exact=exact,
    )


@pytest.mark.parametrize("name", EXACT)
def test_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    check_case(name, exact=True)


@pytest.mark.parametrize("name", [name for name in EXACT if "Convolution" in types_of(name)])
def test_case_by_winograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    for kind in (Winograd, Phased):
        monkeypatch.setattr(kind, "cost", lambda self, which: 1e-9)  # wherever it can serve
    check_case(name, exact=False)


def check_case(name: str, exact: bool) -> None:
    meta = meta_of(name)
    net = make_net(name, meta, exact)
    assert [[layer.name, layer.type] for layer in net.layers] == meta["layers"]
    assert net.outputs == meta["outputs"]
    with np.load(f"cases/{name}.npz") as values:
        stored = {key: values[key] for key in values.files}
    for key, value in stored.items():
        if key.startswith("params/"):
            _, layer, index = key.split("/")
            net.params[layer][int(index)].data[...] = value
    steps = meta["steps"]
    for step in range(steps):
        part = stored
        if steps > 1:
            prefix = f"step{step}/"
            part = {k[len(prefix) :]: v for k, v in stored.items() if k.startswith(prefix)}
        check_step(net, part, meta, name)
    net.close()


def check_step(net: Net, part: dict[str, np.ndarray], meta: dict[str, Any], name: str) -> None:
    def feed() -> None:
        inputs = section("inputs/")
        for blob, value in inputs.items():
            net.blobs[blob].reshape(*value.shape)
        net.reshape()
        net.forward(**inputs)

    def section(prefix: str) -> dict[str, np.ndarray]:
        return {k[len(prefix) :]: v for k, v in part.items() if k.startswith(prefix)}

    feed()
    for blob, want in section("blobs/").items():
        if name in MENDED_FORWARD:
            continue
        assert_close(net.blobs[blob].data, want, f"blob {blob}")
    if "loss" in part and name not in MENDED_FORWARD:
        assert_close(np.array(net.loss), np.array(float(part["loss"])), "loss")
    for key, want in section("params_after/").items():
        layer, index = key.split("/")
        assert_close(net.params[layer][int(index)].data, want, f"params_after {key}")
    if not meta["backward"]:
        return
    diffs = section("topdiff/")
    net.clear_param_diffs()
    net.backward(**diffs)
    for blob, want in section("diffs/").items():
        if name not in MENDED_FORWARD:
            assert_close(net.blobs[blob].diff, want, f"diff of {blob}")
    for key, want in section("param_diffs/").items():
        layer, index = key.split("/")
        assert_close(net.params[layer][int(index)].diff, want, f"param diff {key}")
    accumulated = section("param_diffs_accum2/")
    if accumulated:
        feed()
        net.backward(**diffs)
        for key, want in accumulated.items():
            layer, index = key.split("/")
            if name in MENDED_ACCUMULATION:  # Caffe overwrites here; twice is right
                want = 2 * section("param_diffs/")[key]
            assert_close(net.params[layer][int(index)].diff, want, f"accumulated {key}")
