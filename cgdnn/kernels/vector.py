"""Emit LLVM vector code inside kernels: the same description for every element type and width.

A function declared with `emitted` is written in terms of an `Emitter` and becomes something that
kernels call like any function. It gets one IR value for each argument: a pointer to the first
element for an array, an int64 for a whole number, the element type for a real one. Vectors are as
wide as the registers of this machine (`cgdnn.machine.vector_bytes`); all offsets and strides are in
elements. One declared with `sums` also returns float64 numbers.

Vector loads and stores promise only the alignment of one element. Lanes that a mask turns off are
neither read nor written, so a tail may end at the last byte of an array.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import factorial, log
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cgdnn import machine

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class Emitter:
    """Emits operations on scalars and vectors of one element type.

    Attributes
    ----------
    builder : llvmlite.ir.IRBuilder
    lanes : int
        Elements in one vector.
    vector : llvmlite.ir.VectorType
    """

    def __init__(self, builder: Any, real: Any) -> None:
        self.builder = builder
        self._element = ir.FloatType() if real == types.float32 else ir.DoubleType()
        self._bytes = real.bitwidth // 8
        self.lanes: int = machine.vector_bytes() // self._bytes
        self.vector = self.vector_of(self.lanes)

    def vector_of(self, lanes: int) -> Any:
        """Return the type of a vector with this many lanes."""
        return ir.VectorType(self._element, lanes)

    def integer(self, value: int) -> Any:
        """Return an int64 constant."""
        return ir.Constant(_I64, value)

    def zero(self) -> Any:
        """Return a vector of zeros."""
        return ir.Constant(self.vector, None)

    def filled(self, value: float, lanes: int | None = None) -> Any:
        """Return a vector with the constant `value` in every lane."""
        kind = self.vector_of(lanes or self.lanes)
        return ir.Constant(kind, [value] * kind.count)

    def smaller(self, a: Any, b: Any) -> Any:
        """Return the smaller of two int64 values."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger of two int64 values."""
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """Return `pointer` moved by the sum of the offsets, in elements."""
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def loop(self, count: Any) -> Any:
        """Open a loop over [0, count); yields an object with `index`."""
        return cgutils.for_range(self.builder, count)

    @contextmanager
    def sweep(self, count: Any, *pointers: tuple[Any, Any]) -> Iterator[list[Any]]:
        """Open a loop of `count` rounds; yields pointers that advance by a step each round.

        Loops that must not waste instructions on addresses use this instead of `loop`.
        """
        build = self.builder
        before = build.block
        head = build.append_basic_block("sweep")
        body = build.append_basic_block("round")
        after = build.append_basic_block("swept")
        build.branch(head)
        build.position_at_end(head)
        left = build.phi(_I64)
        moving = [build.phi(start.type) for start, _ in pointers]
        left.add_incoming(count, before)
        for phi, (start, _) in zip(moving, pointers, strict=True):
            phi.add_incoming(start, before)
        build.cbranch(build.icmp_signed(">", left, self.integer(0)), body, after)
        build.position_at_end(body)
        # LLVM unrolls no loop with a call in it; unrolling would only make code large.
        build.asm(ir.FunctionType(ir.VoidType(), []), "", "", [], side_effect=True)
        yield moving
        for phi, (_, step) in zip(moving, pointers, strict=True):
            phi.add_incoming(build.gep(phi, [step]), build.block)
        left.add_incoming(build.sub(left, self.integer(1)), build.block)
        build.branch(head)
        build.position_at_end(after)

    def along(self, length: Any, *pointers: Any) -> Iterator[tuple[list[Any], Any]]:
        """Yield twice, for the body of a loop over a row: (pointers, mask) of a vector.

        First inside a loop over the whole vectors, with mask None; then for what is left, where
        there is any.
        """
        build, step = self.builder, self.integer(self.lanes)
        whole = build.sdiv(length, step)
        done = build.mul(whole, step)
        with self.sweep(whole, *((pointer, step) for pointer in pointers)) as moving:
            yield moving, None
        left = build.sub(length, done)
        with build.if_then(build.icmp_signed(">", left, self.integer(0))):
            yield [self.at(pointer, done) for pointer in pointers], self.first_lanes(left)

    def along_rows(
        self, rows: Any, row_step: Any, length: Any, *pointers: Any
    ) -> Iterator[tuple[list[Any], Any]]:
        """Like `along`, over `rows` rows that begin `row_step` elements apart."""
        with self.sweep(rows, *((pointer, row_step) for pointer in pointers)) as starts:
            yield from self.along(length, *starts)

    def halves(self, vector: Any) -> list[Any]:
        """Return the parts of a vector of which each, in float64, fills a register."""
        count = self.lanes * self._bytes // 8
        return [
            self.shuffle(vector, vector, range(first, first + count))
            for first in range(0, self.lanes, count)
        ]

    def wide(self, vector: Any) -> list[Any]:
        """Return the parts of a vector in float64."""
        if isinstance(self._element, ir.DoubleType):
            return [vector]
        parts = self.halves(vector)
        kind = ir.VectorType(ir.DoubleType(), parts[0].type.count)
        return [self.builder.fpext(part, kind) for part in parts]

    def total(self, vector: Any) -> Any:
        """Return the sum of the lanes, in a fixed order."""
        lanes = vector.type.count
        width = lanes
        while width > 1:
            width //= 2
            half = [i + width if i < width else i for i in range(lanes)]
            vector = self.builder.fadd(vector, self.shuffle(vector, vector, half))
        return self.builder.extract_element(vector, self.integer(0))

    def stepping(self, pointer: Any, step: Any, count: int) -> list[Any]:
        """Return `count` places that are `step` apart, each computed from the one before.

        LLVM does not see how they depend on the loop around them. Where it does, a loop with many
        addresses takes it very long to compile: it looks for the best registers to express them by.
        """
        kind = ir.FunctionType(pointer.type, [pointer.type])
        places: list[Any] = []
        for _ in range(count):
            place = self.at(places[-1], step) if places else pointer
            places.append(self.builder.asm(kind, "", "=r,0", [place], side_effect=False))
        return places

    def variable(self, value: Any) -> Any:
        """Return a stack slot that holds `value`; LLVM turns it into a register."""
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def vectors(self, count: int) -> Any:
        """Return room for `count` vectors on the stack, on whole cache lines, not yet set."""
        with self.builder.goto_entry_block():  # cgutils.alloca_once would fill it with zeros
            room = self.builder.alloca(ir.ArrayType(self.vector, count))
        room.align = self.lanes * self._bytes
        return self.builder.bitcast(room, self.vector.as_pointer())

    def splat(self, scalar: Any, lanes: int | None = None) -> Any:
        """Return a vector with `scalar` in every lane."""
        kind = ir.VectorType(scalar.type, lanes or self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.shuffle(first, undefined, [0] * kind.count)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Return the given lanes of `a` followed by `b`."""
        return self.builder.shuffle_vector(
            a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
        )

    def lane_numbers(self, first: Any, lanes: int | None = None) -> Any:
        """Return first + 0, first + 1, ... as a vector of int32."""
        kind = ir.VectorType(_I32, lanes or self.lanes)
        return self.shifted(ir.Constant(kind, list(range(kind.count))), first)

    def shifted(self, numbers: Any, distance: Any) -> Any:
        """Return numbers + distance, for a vector of int32."""
        step = self.splat(self.builder.trunc(distance, _I32), numbers.type.count)
        return self.builder.add(numbers, step)

    def within(self, numbers: Any, bound: Any) -> Any:
        """Return the mask of 0 <= numbers < bound, for a vector of int32 and bound >= 0."""
        limit = self.splat(self.builder.trunc(bound, _I32), numbers.type.count)
        return self.builder.icmp_unsigned("<", numbers, limit)

    def first_lanes(self, count: Any, lanes: int | None = None) -> Any:
        """Return the mask of the first `count` lanes: none where it is negative."""
        kind = ir.VectorType(_I32, lanes or self.lanes)
        numbers = ir.Constant(kind, list(range(kind.count)))
        limit = self.splat(self.builder.trunc(count, _I32), kind.count)
        return self.builder.icmp_signed("<", numbers, limit)

    def held(self, mask: Any) -> Any:
        """Return a mask that is in a register of its own where there are registers of masks.

        LLVM repeats a comparison in front of each use, in innermost loops, too, where its operands
        take the room of sums.
        """
        if machine.vector_bytes() < 64:
            return mask
        build, kind = self.builder, ir.IntType(mask.type.count)
        same = ir.FunctionType(kind, [kind])
        number = build.asm(same, "", "=r,0", [build.bitcast(mask, kind)], side_effect=False)
        return build.bitcast(number, mask.type)

    def reloaded(self, mask: Any) -> Callable[[], Any]:
        """Return a function that gives a mask: `held`, or else loaded anew at each call.

        An innermost loop that calls it keeps no register of vectors for the mask.
        """
        if machine.vector_bytes() == 64:
            held = self.held(mask)
            return lambda: held
        place = self.builder.bitcast(self.vectors(1), ir.IntType(8).as_pointer())
        self.store_mask(mask, place)
        same = ir.FunctionType(place.type, [place.type])
        return lambda: self.load_mask(
            self.builder.asm(same, "", "=r,0", [place], side_effect=True)  # else it is loaded once
        )

    def free_registers(self) -> None:
        """Let no vector that is needed later stay in a register from here on.

        Before a loop whose sums fill them: LLVM may keep constants of the code behind it in some.
        """
        kind, count = ("zmm", 32) if machine.vector_bytes() == 64 else ("xmm", 16)
        names = ",".join(f"~{{{kind}{i}}}" for i in range(count))  # xmm is the lower part of ymm
        nothing = ir.FunctionType(ir.VoidType(), [])
        self.builder.asm(nothing, "", names, [], side_effect=True)

    def settled(self, vector: Any) -> Any:
        """Return a vector that is computed before those settled later, where registers are few.

        LLVM puts sums off and holds what they are made of: more than 16 registers have room for.
        """
        if machine.vector_bytes() == 64:
            return vector
        same = ir.FunctionType(vector.type, [vector.type])
        return self.builder.asm(same, "", "=x,0", [vector], side_effect=True)

    def forget_loads(self) -> None:
        """Let what is loaded from here on be loaded anew.

        LLVM keeps a vector that it meets again, and loads early, even where registers run out.
        """
        nothing = ir.FunctionType(ir.VoidType(), [])
        self.builder.asm(nothing, "", "~{memory}", [], side_effect=True)

    def scalar(self, pointer: Any) -> Any:
        """Load one element."""
        return self.builder.load(pointer)

    def load_part(self, pointer: Any, lanes: int) -> Any:
        """Load a vector of so many lanes."""
        kind = self.vector_of(lanes)
        value = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        value.align = self._bytes
        return value

    def load(self, pointer: Any, mask: Any = None, otherwise: float = 0.0) -> Any:
        """Load a vector; lanes that `mask` turns off are `otherwise`."""
        if mask is None:
            return self.load_part(pointer, self.lanes)
        kind = self.vector_of(mask.type.count)
        place = self.builder.bitcast(pointer, kind.as_pointer())
        return self._call(
            f"llvm.masked.load.{self._suffix(kind)}.p0",
            kind,
            [place, ir.Constant(_I32, self._bytes), mask, self.filled(otherwise, kind.count)],
        )

    def load_integers(self, pointer: Any, mask: Any = None) -> Any:
        """Load a vector of as many int32 as it has lanes; those that `mask` turns off are 0."""
        kind = ir.VectorType(_I32, self.lanes)
        place = self.builder.bitcast(pointer, kind.as_pointer())
        if mask is None:
            value = self.builder.load(place)
            value.align = 4
            return value
        return self._call(
            f"llvm.masked.load.{self._suffix(kind)}.p0",
            kind,
            [place, ir.Constant(_I32, 4), mask, ir.Constant(kind, None)],
        )

    def store(self, value: Any, pointer: Any, mask: Any = None) -> None:
        """Store a vector (of elements or of integers), where `mask` is on."""
        place = self.builder.bitcast(pointer, value.type.as_pointer())
        size = _bits(value.type) // 8
        if mask is None:
            self.builder.store(value, place).align = size
            return
        self._call(
            f"llvm.masked.store.{self._suffix(value.type)}.p0",
            ir.VoidType(),
            [value, place, ir.Constant(_I32, size), mask],
        )

    @property
    def _stored_mask(self) -> Any:
        """The type of a mask in memory: bits where there are registers of masks, else lanes."""
        if machine.vector_bytes() == 64:
            return ir.IntType(self.lanes)
        return ir.VectorType(ir.IntType(8 * self._bytes), self.lanes)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask of all lanes in memory."""
        return self.lanes // 8 if machine.vector_bytes() == 64 else machine.vector_bytes()

    def load_mask(self, pointer: Any) -> Any:
        """Load a mask of all lanes that `store_mask` has written."""
        kind = self._stored_mask
        value = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        value.align = 1
        if isinstance(kind, ir.IntType):
            return self.builder.bitcast(value, ir.VectorType(ir.IntType(1), self.lanes))
        return self.builder.icmp_signed("<", value, ir.Constant(kind, None))

    def store_mask(self, mask: Any, pointer: Any) -> None:
        """Store a mask of all lanes as `mask_bytes` bytes."""
        build, kind = self.builder, self._stored_mask
        convert = build.bitcast if isinstance(kind, ir.IntType) else build.sext
        build.store(convert(mask, kind), build.bitcast(pointer, kind.as_pointer())).align = 1

    def on_lines(self, pointer: Any, row: Any, columns: Any) -> Any:
        """Tell whether vectors fill `columns`, and all fall on multiples of their size."""
        build, lanes = self.builder, self.integer(self.lanes)
        size = self.lanes * self._bytes
        address = build.urem(build.ptrtoint(pointer, _I64), self.integer(size))
        left = build.or_(build.urem(row, lanes), build.urem(columns, lanes))
        return build.icmp_signed("==", build.or_(address, left), self.integer(0))

    def store_past_caches(self, value: Any, pointer: Any) -> None:
        """Store a vector at a multiple of its size without reading its cache line (see `fence`)."""
        place = self.builder.bitcast(pointer, value.type.as_pointer())
        store = self.builder.store(value, place)
        store.align = _bits(value.type) // 8 * value.type.count
        one = ir.Constant(_I32, 1)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([one]))

    def prefetch(self, pointer: Any, nearest: bool = True) -> None:
        """Bring the cache line at `pointer`, which may lie anywhere, into the first cache.

        Into the second one only where it is not to be the `nearest`.
        """
        pointer = self.builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        to_read, keep, data = (ir.Constant(_I32, value) for value in (0, 2 + nearest, 1))
        self.builder.call(function, [pointer, to_read, keep, data])

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once where the processor can."""
        if not machine.has_fma():  # llvm.fma would become a library call
            return self.builder.fadd(self.builder.fmul(a, b), c)
        return self._call(f"llvm.fma.{self._suffix(a.type)}", a.type, [a, b, c])

    def square_root(self, x: Any) -> Any:
        """Return the square roots of a vector."""
        return self._call(f"llvm.sqrt.{self._suffix(x.type)}", x.type, [x])

    def _reduced(self, x: Any) -> tuple[Any, Any]:
        """Return (p, n) with e^x = (1 + p) 2^n, |p| < 0.42: p a vector, n one of integers.

        n is x / ln 2 rounded, by adding a number so large that the sum has no fraction; what is
        left, at most ln 2 / 2, goes through the Taylor series of e^r - 1, whose next term is below
        a tenth of the last bit. ln 2 is split so that its product with n is exact (Cephes, expf.c
        and exp.c).
        """
        build = self.builder
        single = self._bytes == 4
        high = 0.693359375 if single else 0.693145751953125
        low = -2.12194440e-4 if single else 1.42860682030941723212e-6
        degree = 7 if single else 13
        magic = self.filled(1.5 * 2.0 ** (23 if single else 52))
        shifted = self.multiply_add(x, self.filled(1 / log(2)), magic)
        integers = ir.VectorType(ir.IntType(8 * self._bytes), self.lanes)
        n = build.sub(build.bitcast(shifted, integers), build.bitcast(magic, integers))
        whole = build.fsub(shifted, magic)
        rest = self.multiply_add(whole, self.filled(-high), x)
        rest = self.multiply_add(whole, self.filled(-low), rest)
        series = self.filled(1 / factorial(degree))
        for power in range(degree - 1, 0, -1):
            series = self.multiply_add(series, rest, self.filled(1 / factorial(power)))
        return build.fmul(series, rest), n

    def _power_of_two(self, n: Any) -> Any:
        """Return 2^n for a vector of integers within the range of exponents."""
        build, bits = self.builder, (23 if self._bytes == 4 else 52)
        one = build.bitcast(self.filled(1.0), n.type)
        shift = ir.Constant(n.type, [bits] * n.type.count)
        return build.bitcast(build.add(build.shl(n, shift), one), self.vector)

    def clipped(self, x: Any, low: float, high: float) -> Any:
        """Return x within [low, high]; a NaN stays one."""
        build = self.builder
        x = build.select(build.fcmp_ordered("<", x, self.filled(low)), self.filled(low), x)
        return build.select(build.fcmp_ordered(">", x, self.filled(high)), self.filled(high), x)

    def exp(self, x: Any) -> Any:
        """Return e^x within 2 units in the last place: infinity and 0 where it is out of range."""
        build = self.builder
        p, n = self._reduced(self.clipped(x, *((-105, 90) if self._bytes == 4 else (-750, 711))))
        # In two steps, since 2^n alone may be out of range where e^x is not.
        first = build.ashr(n, ir.Constant(n.type, [1] * n.type.count))
        value = build.fadd(p, self.filled(1.0))
        value = build.fmul(value, self._power_of_two(first))
        return build.fmul(value, self._power_of_two(build.sub(n, first)))

    def tanh(self, x: Any) -> Any:
        """Return tanh x = d / (d + 2), d = e^2x - 1, within 4 units in the last place."""
        build = self.builder
        # Where |2x| is clipped the result is 1.
        size = self.clipped(self._call(f"llvm.fabs.{self._suffix(x.type)}", x.type, [x]), 0, 22)
        p, n = self._reduced(build.fadd(size, size))
        power = self._power_of_two(n)
        d = self.multiply_add(p, power, build.fsub(power, self.filled(1.0)))
        value = build.fdiv(d, build.fadd(d, self.filled(2.0)))
        return self._call(f"llvm.copysign.{self._suffix(x.type)}", x.type, [value, x])

    def lane_sums(self, vectors: Sequence[Any]) -> Any:
        """Return a vector whose lane i is the sum over all lanes of vector i, in a fixed order.

        As many vectors as lanes. Each step adds the halves of pairs of vectors, which halves
        their number and the width of what is still to be added.
        """
        vectors = list(vectors)
        width = self.lanes
        while width > 1:
            half, count = width // 2, len(vectors) // 2
            groups = range(0, self.lanes, width)
            low = [
                g + p for g in groups for p in [*range(half), *range(self.lanes, self.lanes + half)]
            ]
            high = [lane + half for lane in low]
            vectors = [
                self.builder.fadd(
                    self.shuffle(vectors[i], vectors[i + count], low),
                    self.shuffle(vectors[i], vectors[i + count], high),
                )
                for i in range(count)
            ]
            width = half
        return vectors[0]

    def interleaved(self, vectors: Sequence[Any]) -> list[Any]:
        """Return as many vectors, of the first lanes of all, then of the second ones, and so on."""
        count = len(vectors)
        places = [divmod(i, count) for i in range(count * self.lanes)]  # lane, number of the vector
        results = []
        for first in range(0, count * self.lanes, self.lanes):
            part = places[first : first + self.lanes]
            result = vectors[0]
            for number in range(1, count):
                below = [lane if number == 1 else i for i, (lane, _) in enumerate(part)]
                chosen = [
                    self.lanes + lane if source == number else other
                    for (lane, source), other in zip(part, below, strict=True)
                ]
                result = self.shuffle(result, vectors[number], chosen)
            results.append(result)
        return results

    def transposed(self, vectors: Sequence[Any], unit: int = 1) -> list[Any]:
        """Return the transposes of the squares that as many units of some vectors make up.

        A unit is so many neighbouring lanes.
        """
        vectors = list(vectors)
        width = 1
        while width < len(vectors):
            lanes, step = range(self.lanes), width * unit
            low = [i if not i & step else self.lanes + i - step for i in lanes]
            high = [i + step if not i & step else self.lanes + i for i in lanes]
            for i in range(len(vectors)):
                if not i & width:
                    a, b = vectors[i], vectors[i + width]
                    vectors[i] = self.shuffle(a, b, low)
                    vectors[i + width] = self.shuffle(a, b, high)
            width *= 2
        return vectors

    @contextmanager
    def cases(self, number: Any, count: int) -> Iterator[Iterator[int]]:
        """Emit one block for each value 0..count-1 of `number`; the body loops over them."""
        after = self.builder.append_basic_block("done")
        blocks = [self.builder.append_basic_block(f"case{i}") for i in range(count)]
        switch = self.builder.switch(number, after)
        for i, block in enumerate(blocks):
            switch.add_case(i, block)

        def each() -> Iterator[int]:
            for i, block in enumerate(blocks):
                self.builder.position_at_end(block)
                yield i
                self.builder.branch(after)

        yield each()
        self.builder.position_at_end(after)

    def _suffix(self, kind: Any) -> str:
        letter = "i" if isinstance(kind.element, ir.IntType) else "f"
        return f"v{kind.count}{letter}{_bits(kind)}"

    def _call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)


def _bits(vector: Any) -> int:
    """Return the bits of one lane of a vector type."""
    if isinstance(vector.element, ir.IntType):
        width: int = vector.element.width
        return width
    return 32 if isinstance(vector.element, ir.FloatType) else 64


def _intrinsic(typed: Any, body: Callable[..., Any]) -> Any:
    """Make the intrinsic `typed` with the name, the text and the argument names of `body`."""
    typed.__name__ = body.__name__
    typed.__doc__ = body.__doc__
    typed.__signature__ = inspect.signature(
        body
    )  # numba counts arguments by it; the emitter stands for the context
    return intrinsic(typed)


def _emit(body: Callable[..., Any], context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """Call `body` with an emitter and the values that it expects."""
    real = signature.args[0].dtype

    def ready(kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            return context.make_array(kind)(context, builder, value).data
        number = real if isinstance(kind, types.Float) else types.int64
        return context.cast(builder, value, kind, number)

    return body(Emitter(builder, real), *map(ready, signature.args, values))


def emitted(body: Callable[..., None]) -> Any:
    """Turn ``body(emitter, *values)`` into a function that kernels call.

    The first argument of the call must be an array of the run's type: it decides the element type
    of the emitter.
    """

    def typed(typingctx, *arguments):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            _emit(body, context, builder, signature, values)
            return context.get_dummy_value()

        return types.void(*arguments), codegen

    return _intrinsic(typed, body)


def sums(count: int) -> Callable[[Callable[..., Sequence[Any]]], Any]:
    """Turn ``body(emitter, *values)``, which yields `count` float64 values, likewise."""

    def declare(body: Callable[..., Sequence[Any]]) -> Any:
        def typed(typingctx, *arguments):  # type: ignore[no-untyped-def]
            result = types.UniTuple(types.float64, count)

            def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
                totals = _emit(body, context, builder, signature, values)
                return context.make_tuple(builder, result, totals)

            return result(*arguments), codegen

        return _intrinsic(typed, body)

    return declare


def constant(body: Callable[[Emitter, Any], int]) -> Any:
    """Turn ``body(emitter, x)`` into a function of an array that is a constant in kernels."""

    def typed(typingctx, x):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return ir.Constant(_I64, body(Emitter(builder, signature.args[0].dtype), x))

        return types.int64(x), codegen

    return _intrinsic(typed, body)


@constant
def lanes_of(e: Emitter, x: Any) -> int:
    """Return the number of elements of an array in one vector."""
    return e.lanes


@emitted
def fence(e, x):  # type: ignore[no-untyped-def]
    """Let other threads see what was stored past the caches before anything stored later."""
    e.builder.fence("seq_cst")


@emitted
def transpose_block(  # type: ignore[no-untyped-def]
    e, y, y_start, y_row, x, x_start, x_row, rows, columns, keep
):
    """Set, or with `keep` add to, y[j, i] = x[i, j] for i < rows, j < columns: at most a vector.

    Element [i, j] of x is ``x.flat[x_start + i * x_row + j]``, and of y likewise.
    """
    build = e.builder
    x, y = e.at(x, x_start), e.at(y, y_start)
    inside, last = e.first_lanes(columns), build.sub(rows, e.integer(1))
    numbers = [e.integer(i) for i in range(e.lanes)]
    sources = [e.at(x, build.mul(e.smaller(i, last), x_row)) for i in numbers]
    vectors = e.transposed([e.load(source, inside) for source in sources])
    mask = e.first_lanes(rows)
    keeps = build.icmp_signed("!=", keep, e.integer(0))
    for number, vector in zip(numbers, vectors, strict=True):
        with build.if_then(build.icmp_signed("<", number, columns)):
            place = e.at(y, build.mul(number, y_row))
            slot = e.variable(vector)
            with build.if_then(keeps):
                build.store(build.fadd(e.load(place, mask), vector), slot)
            e.store(build.load(slot), place, mask)


@emitted
def add_sum(e, y, y_index, x, x_start, length):  # type: ignore[no-untyped-def]
    """Add x[x_start : x_start + length] to y[y_index], summed in vectors."""
    build, lanes = e.builder, e.lanes
    x, place = e.at(x, x_start), e.at(y, y_index)
    partial = [e.variable(e.zero()) for _ in range(4)]

    def add(i, value):  # type: ignore[no-untyped-def]
        build.store(build.fadd(build.load(partial[i]), value), partial[i])

    blocks = build.sdiv(length, e.integer(4 * lanes))
    with e.loop(blocks) as block:
        for i in range(4):
            offset = build.mul(block.index, e.integer(4 * lanes))
            add(i, e.load(e.at(x, offset, e.integer(i * lanes))))
    done = build.mul(blocks, e.integer(4 * lanes))
    for i in range(4):
        start = build.add(done, e.integer(i * lanes))
        add(i, e.load(e.at(x, start), e.first_lanes(build.sub(length, start))))
    total = build.fadd(
        build.fadd(build.load(partial[0]), build.load(partial[1])),
        build.fadd(build.load(partial[2]), build.load(partial[3])),
    )
    build.store(build.fadd(e.scalar(place), e.total(total)), place)
