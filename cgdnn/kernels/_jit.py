"""The only place that sets Numba options: kernels, their task entries and the on-disk cache.

A kernel is an ordinary Python function of arrays and numbers, declared with `kernel`::

    @kernel(array(2), array(2), REAL, INT, INT)
    def relu_forward(x, y, negative_slope, begin, end):
        ...

It is compiled on first use for float32 or float64 behind the one task ABI::

    int64 entry(int64 *slots, int64 worker)

which unpacks a flat slot array and calls the kernel, inlined. Slots of one argument:

==============  =========================================================================
``array(n)``    data pointer, then n dimensions (C-contiguous)
``scratch(n)``  base pointer, bytes from one worker's block to the next, then n dimensions
``INT``         the value
``REAL``        the bits of a float64, converted to the run's type
==============  =========================================================================

The entry returns the kernel's status: 0 (or None) is success, anything else is for the layer to
explain. Kernels never raise, never allocate and never see a thread.

The cache directory is keyed by a hash of the kernel sources, since Numba notices edits only in
the file that holds the cached function. A cache that cannot be read or written costs time, never
correctness.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, sigutils
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Flags, compile_internal
from numba.core.registry import cpu_target
from numba.extending import intrinsic, lower_builtin, type_callable
from numba.np.arrayobj import populate_array

from cgdnn import machine
from cgdnn.errors import InternalError

_OPTIONS = {"error_model": "numpy", "nopython": True}
_lock = threading.RLock()
_REALS = {"float32": types.float32, "float64": types.float64}


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that is only linked into other code: neither optimised nor emitted on its own.

    Numba would do both for every function that a kernel is made of, and again for the whole, which
    takes 1.7 times as long.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def _compiled_part(
    function: Callable[..., Any], arguments: Sequence[Any], result: Any, *, inline: bool
) -> Any:
    """Compile a function for these types of arguments as a `_Part`.

    `result` is its return type, None to infer it.
    """
    flags = Flags()  # those of the caller are not inherited
    flags.error_model = _OPTIONS["error_model"]  # else every divisor is tested for zero
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.forceinline = inline
    typing, context = cpu_target.typing_context, cpu_target.target_context
    part = _Part(context.codegen(), function.__name__)
    return compile_internal(typing, context, part, function, tuple(arguments), result, flags, {})


def _call_part(context: Any, builder: Any, compiled: Any, values: Sequence[Any]) -> Any:
    """Emit a call of what `_compiled_part` returned."""
    context.active_code_library.add_linking_library(compiled.library)
    return context.call_internal(builder, compiled.fndesc, compiled.signature, values)


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let kernels call a function: ordinary Python outside, inlined inside.

    They give all arguments by position.
    """

    @cache
    def compiled(*arguments: Any) -> Any:
        return _compiled_part(function, arguments, None, inline=True)

    def result_type(*arguments: Any) -> Any:
        return compiled(*map(types.unliteral, arguments)).signature.return_type

    result_type.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    type_callable(function)(lambda context: result_type)

    @lower_builtin(function, types.VarArg(types.Any))
    def call(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return _call_part(context, builder, compiled(*signature.args), values)

    return function


def generated_device(function: Callable[..., Any], name: str) -> Any:
    """Return a generated function as a `device`, under a name of its own: code is linked by it."""
    function.__name__ = function.__qualname__ = name
    return device(function)


@dataclass(frozen=True)
class Argument:
    """The declared type of one kernel argument; `dtype` "real" means the run's type."""

    kind: str
    ndim: int = 0
    dtype: str = "real"

    @property
    def slots(self) -> int:
        """Number of 8-byte slots that the argument takes."""
        return {"array": 1 + self.ndim, "scratch": 2 + self.ndim, "int": 1, "real": 1}[self.kind]


INT = Argument("int")
REAL = Argument("real")


def array(ndim: int, dtype: str = "real") -> Argument:
    """Declare a C-contiguous array argument of `ndim` axes."""
    return Argument("array", ndim, dtype)


def scratch(ndim: int, dtype: str = "real") -> Argument:
    """Declare an array argument that is private to the worker; its content is not kept."""
    return Argument("scratch", ndim, dtype)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A declared kernel: a plain function with the types of its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    status: bool = False

    def entry(self, dtype: str) -> int:
        """Return the address of the compiled task entry for float32 or float64."""
        return _compiled(self.name, dtype)

    def __call__(self, *values: Any, dtype: str | None = None) -> int:
        """Run the kernel once through its task entry, as a task would, and return its status.

        Arrays must be C-contiguous and of the declared types; a scratch argument is given as a
        plain array. `dtype` is taken from the first real array when not given.
        """
        if dtype is None:
            dtype = next(
                str(v.dtype)
                for a, v in zip(self.arguments, values, strict=True)
                if a.dtype == "real" and a.kind in ("array", "scratch")
            )
        slots = np.array(pack_slots(self.arguments, values, dtype), np.int64)
        return call_entry(self.entry(dtype), slots.ctypes.data, 0)


KERNELS: dict[str, Kernel] = {}


def kernel(*arguments: Argument, status: bool = False) -> Callable[[Callable[..., Any]], Kernel]:
    """Declare a function as a kernel with these argument types.

    A kernel with `status` returns an integer on every path: 0, or what its layer can explain.
    """

    def declare(function: Callable[..., Any]) -> Kernel:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        if name in KERNELS and KERNELS[name].function.__code__ != function.__code__:
            raise InternalError(f"two kernels are named {name}")
        # Compiled code from the cache is linked by qualified name: those of generated kernels, one
        # for each tile, must differ.
        function.__qualname__ = function.__name__
        KERNELS[name] = Kernel(name, function, arguments, status)
        return KERNELS[name]

    return declare


def real_bits(value: float) -> int:
    """Return the slot content of a REAL argument."""
    return int(np.float64(value).view(np.int64))


def pack_slots(arguments: Sequence[Argument], values: Sequence[Any], dtype: str) -> list[int]:
    """Return the slots for these values; arrays must match their declared types."""
    slots: list[int] = []
    for argument, value in zip(arguments, values, strict=True):
        if argument.kind == "int":
            slots.append(int(value))
        elif argument.kind == "real":
            slots.append(real_bits(value))
        else:
            want = dtype if argument.dtype == "real" else argument.dtype
            if value.ndim != argument.ndim or value.dtype != want or not value.flags.c_contiguous:
                raise InternalError(
                    f"kernel argument is {value.dtype} of {value.ndim} axes, "
                    f"expected contiguous {want} of {argument.ndim}"
                )
            stride = [0] if argument.kind == "scratch" else []
            slots += [value.ctypes.data, *stride, *value.shape]
    return slots


@intrinsic(prefer_literal=True)
def _call_kernel(typingctx, name, dtype, slots, worker):  # type: ignore[no-untyped-def]
    """Unpack the slots and call the kernel `name`; yields its status as int64."""
    declared = KERNELS[name.literal_value]
    real = _REALS[dtype.literal_value]
    signature = types.int64(name, dtype, slots, worker)

    def element(argument: Argument) -> Any:
        return real if argument.dtype == "real" else getattr(types, argument.dtype)

    def codegen(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        i64 = ir.IntType(64)
        _, _, base, worker_index = args
        position = 0

        def slot() -> Any:
            nonlocal position
            value = builder.load(builder.gep(base, [ir.Constant(i64, position)]))
            position += 1
            return value

        argument_types, values = [], []
        for argument in declared.arguments:
            if argument.kind == "int":
                argument_types.append(types.int64)
                values.append(slot())
            elif argument.kind == "real":
                wide = builder.bitcast(slot(), ir.DoubleType())
                narrow = real is types.float32
                values.append(builder.fptrunc(wide, ir.FloatType()) if narrow else wide)
                argument_types.append(real)
            else:
                address = slot()
                if argument.kind == "scratch":
                    address = builder.add(address, builder.mul(worker_index, slot()))
                shape = [slot() for _ in range(argument.ndim)]
                ty = types.Array(element(argument), argument.ndim, "C", aligned=False)
                made = context.make_array(ty)(context, builder)
                llvm_type = context.get_data_type(ty.dtype)
                itemsize = ir.Constant(i64, context.get_abi_sizeof(llvm_type))
                strides: list[Any] = []
                run = itemsize
                for dimension in reversed(shape):
                    strides.insert(0, run)
                    run = builder.mul(run, dimension)
                populate_array(
                    made,
                    builder.inttoptr(address, llvm_type.as_pointer()),
                    cgutils.pack_array(builder, shape, ty=i64),
                    cgutils.pack_array(builder, strides, ty=i64),
                    itemsize,
                    ir.Constant(cgutils.voidptr_t, None),
                )
                argument_types.append(ty)
                values.append(made._getvalue())
        result_type = types.int64 if declared.status else types.none
        compiled = _compiled_part(declared.function, argument_types, result_type, inline=False)
        result = _call_part(context, builder, compiled, values)
        return result if declared.status else ir.Constant(i64, 0)

    return signature, codegen


@lru_cache(maxsize=1)
def cache_directory() -> Path | None:
    """Return the folder that holds compiled kernels, or None where none can be written.

    ``$CGDNN_CACHE_DIR``, else ``$XDG_CACHE_HOME/cgdnn``, else ``~/.cache/cgdnn``; below it one
    folder for each state of the kernel sources.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(f"{numba.__version__} {machine.vector_bytes()}".encode())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(os.environ.get("CGDNN_CACHE_DIR") or os.path.join(home, "cgdnn"))
    folder = root / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


def compile_native(function: Callable[..., Any], signature: Any, *, cached: bool = True) -> int:
    """Compile `function` to native code of this C signature; return its address.

    Calling the address through ctypes releases the GIL. The compiled code is kept on disk when
    `cached` is set and the cache directory can be used.
    """

    def compiled(cache: bool) -> int:
        made = CFunc(function, sigutils.normalize_signature(signature), {}, dict(_OPTIONS))
        if cache:
            made.enable_caching()
        made.compile()
        _alive.append(made)
        address = made.address
        assert address is not None, "compiled code has an address"
        return int(address)

    with _lock:
        folder = cache_directory() if cached else None
        if folder is not None:
            previous = numba.config.CACHE_DIR
            numba.config.CACHE_DIR = str(folder)
            try:
                return compiled(cache=True)
            except _CACHE_ERRORS:
                pass  # read-only, full or corrupt: compile again without it
            finally:
                numba.config.CACHE_DIR = previous
        return compiled(cache=False)


_alive: list[CFunc] = []  # compiled code lives as long as its CFunc

# What a cache that is full, read-only, torn or written by something else raises while loading.
_CACHE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ImportError,
    RuntimeError,
    pickle.PickleError,
)
_ENTRY = types.int64(types.CPointer(types.int64), types.int64)


@cache
def _compiled(name: str, dtype: str) -> int:
    def entry(slots, worker):  # type: ignore[no-untyped-def]
        return _call_kernel(name, dtype, slots, worker)

    own = KERNELS[name].function.__module__.startswith("cgdnn.kernels.")
    return compile_native(entry, _ENTRY, cached=own)


ENTRY_TYPE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)


def call_entry(address: int, slots: int, worker: int) -> int:
    """Call a task entry at `address` with the slot array at address `slots`."""
    return int(ENTRY_TYPE(address)(slots, worker))
