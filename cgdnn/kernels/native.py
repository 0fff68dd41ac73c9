"""Primitives for compiled loops: memory by address, atomics, calls by address, sleep and time.

All of them take and give int64. Atomics are sequentially consistent. `sleep_while_equal` and
`wake_one` are a futex on Linux; elsewhere a sleeper polls ten thousand times a second.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1
_POLL_MICROSECONDS = 100


def _pointer(builder, address):  # type: ignore[no-untyped-def]
    return builder.inttoptr(address, _I64.as_pointer())


def _external(builder, name, result, arguments):  # type: ignore[no-untyped-def]
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def load(typingctx, address):  # type: ignore[no-untyped-def]
    """Return the int64 at `address`, atomically."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Set the int64 at `address`, atomically."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        builder.store_atomic(args[1], _pointer(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to the int64 at `address` atomically and return what it was."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def fetch_or(typingctx, address, bits):  # type: ignore[no-untyped-def]
    """Set bits of the int64 at `address` atomically and return what it was."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("or", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def fetch_and(typingctx, address, bits):  # type: ignore[no-untyped-def]
    """Keep only `bits` of the int64 at `address` atomically and return what it was."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("and", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_swap(typingctx, address, expected, value):  # type: ignore[no-untyped-def]
    """Set the int64 at `address` if it is `expected`; return 1 if it was."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = _pointer(builder, args[0])
        pair = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def trailing_zeros(typingctx, bits):  # type: ignore[no-untyped-def]
    """Return the number of the lowest bit that is set; 64 where none is."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), codegen


@intrinsic
def call_task(typingctx, entry, slots, worker):  # type: ignore[no-untyped-def]
    """Call the task entry at an address; return its status."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(_I64, [_I64.as_pointer(), _I64])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [_pointer(builder, args[1]), args[2]])

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the processor that this is a waiting loop (some 20 ns)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if platform.machine() in ("x86_64", "AMD64"):
            builder.call(_external(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif platform.machine() in ("aarch64", "arm64"):
            hint = _external(builder, "llvm.aarch64.hint", ir.VoidType(), [_I32])
            builder.call(hint, [ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sleep_while_equal(typingctx, address, expected):  # type: ignore[no-untyped-def]
    """Sleep while the low 32 bits at `address` are `expected`; may return early."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if _FUTEX is None:
            sleep = _external(builder, "usleep", _I32, [_I32])
            builder.call(sleep, [ir.Constant(_I32, _POLL_MICROSECONDS)])
        else:
            call = _external(builder, "syscall", _I64, [_I64] * 7)
            zero = ir.Constant(_I64, 0)
            number, wait = ir.Constant(_I64, _FUTEX), ir.Constant(_I64, _WAIT_PRIVATE)
            builder.call(call, [number, args[0], wait, args[1], zero, zero, zero])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def wake_one(typingctx, address):  # type: ignore[no-untyped-def]
    """Wake one sleeper on `address`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if _FUTEX is not None:
            call = _external(builder, "syscall", _I64, [_I64] * 7)
            zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
            number, wake = ir.Constant(_I64, _FUTEX), ir.Constant(_I64, _WAKE_PRIVATE)
            builder.call(call, [number, args[0], wake, one, zero, zero, zero])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def now(typingctx):  # type: ignore[no-untyped-def]
    """Return the monotonic clock in nanoseconds."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pair = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        read = _external(builder, "clock_gettime", _I32, [_I32, pair.type])
        builder.call(read, [ir.Constant(_I32, _CLOCK_MONOTONIC), pair])
        both = builder.load(pair)
        seconds = builder.extract_value(both, 0)
        whole = builder.mul(seconds, ir.Constant(_I64, 1_000_000_000))
        return builder.add(whole, builder.extract_value(both, 1))

    return types.int64(), codegen
