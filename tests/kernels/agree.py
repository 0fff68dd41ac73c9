"""Run a compiled kernel and its slow reference on the same arguments; compare what they write."""

import importlib

import numpy as np

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def assert_agrees(kernel, *arguments, dtype="float32", tolerance=None, reference=None):
    """Compare all arrays but scratch after the kernel and its reference have run.

    That is the function of `tests.reference` of the same name, or of the name `reference`. Float
    arrays among `arguments` are converted to `dtype`; both sides get copies.
    """
    module, name = kernel.name.split(".")
    slow = getattr(importlib.import_module(f"tests.reference.{module}"), reference or name)

    def converted():
        return [
            np.array(a, dtype if a.dtype.kind == "f" else a.dtype, order="C")
            if isinstance(a, np.ndarray)
            else a
            for a in arguments
        ]

    got, expected = converted(), converted()
    status = kernel(*got)
    slow(*expected)
    assert status == 0
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if isinstance(ours, np.ndarray) and kernel.arguments[index].kind != "scratch":
            scale = max(1.0, float(np.nanmax(np.abs(theirs), initial=0.0)))
            np.testing.assert_allclose(
                ours,
                theirs,
                rtol=0,
                atol=(tolerance or TOLERANCE[dtype]) * scale,
                err_msg=f"argument {index} of {kernel.name}",
            )
