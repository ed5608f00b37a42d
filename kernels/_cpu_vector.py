# ruff: noqa: ARG001, ARG005 - Numba fixes the parameters of an intrinsic, used or not
"""Vectors of LANES 32-bit numbers and raw pointers as Numba types, and where compiled kernels are kept.

Kernels take addresses, not arrays: Numba counts references to every array it passes on, a pointer costs
nothing. Explicit loads are not checked against the end of anything.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils, codegen, config
from numba.core.compiler import Compiler
from numba.extending import intrinsic, models, register_model


def features() -> str:
    """Return the instruction sets Numba compiles for, as LLVM names them."""
    return str(config.CPU_FEATURES if config.CPU_FEATURES is not None else codegen.get_host_cpu_features())


WIDE, AVX2, X86 = "+avx512bw" in features(), "+avx2" in features(), "+sse2" in features()
LANES = 16 if WIDE else 8
NARROW = 8
"""Lanes where fewer numbers than LANES may stand in a row."""
FLUSH = 70.0
"""Weights below exp(-FLUSH) of the largest one count as zero.

Products of smaller ones would be subnormal, and those take some processors a hundred times as long.
"""


ROOM_BYTES = 2**24
"""Free space without which compiled kernels are not kept; they take about 6 MB."""


def _folder() -> Path | None:
    """Return a folder for compiled kernels that can be written to and has room, or None.

    Numba notices edits of the file of the outermost function only, so the name carries a digest of all
    kernels, and of this module's name, by which compiled code finds its module again.
    """
    sources = sorted(Path(__file__).parent.glob("*cpu*.py"))
    parts = [__name__.encode(), *(path.read_bytes() for path in sources)]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:12]
    home = Path(config.CACHE_DIR or Path(os.environ.get("RCQ_HOME") or "~/.cache/rcq").expanduser() / "numba")
    folder = home / f"rcq-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        roomy = any(folder.iterdir()) or disk_usage(folder).free >= ROOM_BYTES
    except OSError:
        return None
    return folder if roomy else None


def _kept(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles once and reads the result from disk later where that is possible."""

    def decorate(function: Any) -> Any:
        folder, before = _folder(), config.CACHE_DIR
        if folder is None:
            return compiler(*arguments, **options)(function)
        try:
            config.CACHE_DIR = str(folder)
            return compiler(*arguments, cache=True, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate


def entry(**options: Any) -> Callable[[Any], Any]:
    """Return the decorator of a function that Python calls."""
    return _kept(njit, nogil=True, error_model="numpy", **options)


def callback(function: Any) -> Any:
    """Compile a piece of work: four integers to one, called through its address."""
    return _kept(cfunc, types.int64(*(types.int64,) * 4), error_model="numpy")(function)


class _Part(codegen.JITCodeLibrary):  # type: ignore[misc]
    """Code that is only ever linked into other code.

    Numba would optimise it and make machine code of it at every level of calls.
    """

    def _optimize_final_module(self) -> None:
        """Leave that to the entry it becomes a part of."""

    def _finalize_final_module(self) -> None:
        """Close the module without handing it to the linker of machine code."""
        self._finalize_dynamic_globals()
        self._finalized = True


class _PartCompiler(Compiler):  # type: ignore[misc]
    """Compiles a part: no entry points for Python or C, no machine code."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        flags = self.state.flags
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        self.state.library = _Part(self.state.targetctx.codegen(), "part")

    def compile_extra(self, function: Any) -> Any:
        """Compile and make known to callers.

        Numba knows a function by an entry in C that callers never use; this one raises KeyError. From Python
        call `py_func`.
        """
        result = super().compile_extra(function)._replace(entry_point={}.popitem)
        self.state.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


_parts: set[str] = set()


def _inner(fast: set[str], **options: Any) -> Callable[[Any], Any]:
    """Return the decorator of a function that only kernels call.

    Numba would compile it again for every literal argument. And it tells functions apart by their name and by
    when a process came across them: code read from disk keeps the names of the process that made it, so that
    of two functions of one name, one could be linked where the other is meant.
    """

    def decorate(function: Any) -> Any:
        name = f"{function.__module__}.{function.__qualname__}"
        if name in _parts:
            raise ValueError(f"two parts of the kernels are called {name}; `variant` gives each its own name")
        _parts.add(name)
        compiler = njit(
            nogil=True, error_model="numpy", fastmath=fast, pipeline_class=_PartCompiler, **options
        )
        made = compiler(function)
        template = made.get_call_template
        made.get_call_template = lambda args, kws: template([types.unliteral(a) for a in args], kws)
        return made

    return decorate


plain = _inner(set())
# a call copies every number of every tuple it passes on: 60 and more, which a block of 32 tokens notices
merged = _inner(set(), forceinline=True)
# order-free sums are what the rounding analysis charges; NaN must survive, so `nnan` is left out
loose = _inner({"reassoc", "contract", "nsz"})
# for finite input only
finite = _inner({"reassoc", "contract", "nsz", "nnan"})


def variant(function: Any, name: str, kind: Callable[[Any], Any] = plain) -> Any:
    """Return `function` as a part of its own, one of several that the same lines make."""
    function.__qualname__ += f"-{name}"
    return kind(function)


class Vector(types.Type):  # type: ignore[misc]
    """`LANES` numbers in one register."""

    def __init__(self, name: str, element: ir.Type) -> None:
        super().__init__(name)
        self.element = element


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(kind.element, LANES))


_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_f16, _f32, _f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
FLOATS = Vector("rcq-floats", _f32)
FLOAT_LANES, INTS = ir.VectorType(_f32, LANES), ir.VectorType(_i32, LANES)
f32, i32, i64 = types.float32, types.int32, types.intp


def _op(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """Return an intrinsic of that signature; `emit(builder, *values)` writes its instructions."""
    signature = result(*arguments)

    def code(context: Any, builder: Any, found: Any, values: Any) -> Any:
        return emit(builder, *values)

    makers = {
        1: lambda typing, x: (signature, code),
        2: lambda typing, x, y: (signature, code),
        3: lambda typing, x, y, z: (signature, code),
        4: lambda typing, x, y, z, w: (signature, code),
    }
    return intrinsic(makers[len(arguments)])


def address(builder: Any, pointer: Any, index: Any, pointee: ir.Type) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), pointee.as_pointer())


def _read_as(stored: ir.Type, widen: Callable[..., Any]) -> Callable[..., Any]:
    """Return what writes the instructions that read LANES numbers of type `stored` as floats."""

    def read(builder: Any, pointer: Any, index: Any) -> Any:
        where = address(builder, pointer, index, ir.VectorType(stored, LANES))
        return widen(builder, builder.load(where, align=1))

    return read


def _reader(read: Callable[..., Any]) -> Any:
    """Return `load(pointer, index)`: LANES numbers from that element on, as floats."""

    def load(typing: Any, pointer: Any, index: Any) -> Any:

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return read(builder, *values)

        return FLOATS(pointer, i64), code

    return intrinsic(load)


def _writer(stored: ir.Type, narrow: Callable[..., Any]) -> Any:
    """Return `write(pointer, index, floats)`: LANES numbers of type `stored`, which `index` counts."""

    def write(typing: Any, pointer: Any, index: Any, value: Any) -> Any:

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            first = builder.gep(builder.bitcast(values[0], stored.as_pointer()), [values[1]])
            where = builder.bitcast(first, ir.VectorType(stored, LANES).as_pointer())
            builder.store(narrow(builder, values[2]), where, align=1)
            return context.get_dummy_value()

        return types.void(pointer, i64, FLOATS), code

    return intrinsic(write)


def call(builder: Any, name: str, result: ir.Type, *values: Any, fast: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [v.type for v in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values, fastmath=fast)


def _constant(number: float) -> Any:
    return ir.Constant(FLOAT_LANES, [number] * LANES)


def splat_of(builder: Any, x: Any, lanes: int = LANES) -> Any:
    first = builder.insert_element(ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined), x, _i32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_i32, lanes), [0] * lanes))


def fma_of(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


_SHIFTER = 1.5 * 2.0**23
"""Added to a number below 2^22, it leaves the nearest integer in the low bits: no conversion is needed."""


def shifted_of(builder: Any, x: Any, y: Any) -> Any:
    """Return x * y + _SHIFTER, whose bits end in those of the nearest integer to x * y."""
    return fma_of(builder, x, y, ir.Constant(x.type, [_SHIFTER] * x.type.count))


def bits_of(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, ir.VectorType(_i32, x.type.count))


def round_of(builder: Any, x: Any, y: Any) -> Any:
    """Return words whose low 16 bits are the integers nearest to x * y, which fit them."""
    return bits_of(builder, shifted_of(builder, x, y))


def pairs_of(builder: Any, low: tuple[Any, Any], high: tuple[Any, Any]) -> Any:
    """Return words of two non-negative 16-bit numbers, each a rounded product; `low` in the low half."""
    words = [round_of(builder, *factors) for factors in (low, high)]
    half, ones = (ir.Constant(words[0].type, [n] * words[0].type.count) for n in (16, 0xFFFF))
    return builder.or_(builder.and_(words[0], ones), builder.shl(words[1], half))


def sum_of(builder: Any, x: Any) -> Any:
    """Return the sum of the lanes."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    return call(builder, name, _f32, _f32(0.0), x, fast=("reassoc",))


def joined(builder: Any, vectors: list[Any]) -> Any:
    """Return one vector of one or two."""
    if len(vectors) == 1:
        return vectors[0]
    order = ir.Constant(ir.VectorType(_i32, 2 * LANES), list(range(2 * LANES)))
    return builder.shuffle_vector(*vectors, order)


def add_of(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y)


def larger_of(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def highest_of(builder: Any, x: Any) -> Any:
    """Return the largest lane."""
    return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _f32, x, fast=("nnan",))


def size_of(builder: Any, x: Any) -> Any:
    return call(builder, f"llvm.fabs.v{LANES}f32", FLOAT_LANES, x)


def _widen_bfloat(builder: Any, x: Any) -> Any:
    wide = builder.shl(builder.zext(x, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(wide, FLOAT_LANES)


def _exponential(builder: Any, x: Any) -> Any:
    """Return exp(x) for x <= 0, and 0 below -FLUSH.

    2^n times a polynomial of degree 6 on [-1/2, 1/2], whose relative error is 1.5e-7.
    """
    kept, log2e = builder.fcmp_ordered(">", x, _constant(-FLUSH)), _constant(1.4426950408889634)
    shifted = shifted_of(builder, x, log2e)
    part = fma_of(builder, x, log2e, builder.fsub(_constant(_SHIFTER), shifted))
    result = _constant(_POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        result = fma_of(builder, result, part, _constant(coefficient))
    exponent = builder.shl(bits_of(builder, shifted), ir.Constant(INTS, [23] * LANES))
    power = builder.add(bits_of(builder, result), exponent)
    return builder.select(kept, builder.bitcast(power, FLOAT_LANES), _constant(0.0))


_POWERS = [float(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(7)]


class Original(NamedTuple):
    """A kind of originals, at its place in ORIGINALS: `Shape.kind`."""

    name: str
    bytes: int
    """Of one number."""
    load: Any
    """The intrinsic that reads LANES of them as floats, at an index that counts numbers of its pointer."""
    read: Callable[..., Any]
    """What writes the same in instructions: `read(builder, pointer, index)`."""


def _original(name: str, width: int, read: Callable[..., Any]) -> Original:
    return Original(name, width, _reader(read), read)


ORIGINALS = (
    _original("float32", 4, _read_as(_f32, lambda b, x: x)),
    _original("bfloat16", 2, _read_as(_i16, _widen_bfloat)),
    _original("float16", 2, _read_as(_f16, lambda b, x: b.fpext(x, FLOAT_LANES))),
)
load, load_bfloat, load_half = (kind.load for kind in ORIGINALS)
load_int = _reader(_read_as(_i32, lambda b, x: b.sitofp(x, FLOAT_LANES)))
store = _writer(_f32, lambda b, x: x)
splat = _op(FLOATS, (f32,), splat_of)
add = _op(FLOATS, (FLOATS, FLOATS), add_of)
sub = _op(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fsub(x, y))
mul = _op(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fmul(x, y))
divide = _op(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fdiv(x, y))
root = _op(FLOATS, (FLOATS,), lambda b, x: call(b, f"llvm.sqrt.v{LANES}f32", FLOAT_LANES, x))
fma = _op(FLOATS, (FLOATS, FLOATS, FLOATS), fma_of)
pick_less = _op(FLOATS, (FLOATS,) * 4, lambda b, x, y, yes, no: b.select(b.fcmp_ordered("<", x, y), yes, no))
larger = _op(FLOATS, (FLOATS, FLOATS), larger_of)
smaller = _op(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
size = _op(FLOATS, (FLOATS,), size_of)
exponential = _op(FLOATS, (FLOATS,), _exponential)
total = _op(f32, (FLOATS,), sum_of)
highest = _op(f32, (FLOATS,), highest_of)
bits = _op(i32, (f32,), lambda b, x: b.bitcast(x, _i32))
half = _op(f32, (types.uint16,), lambda b, x: b.fpext(b.bitcast(x, _f16), _f32))
half_bits = _op(types.uint16, (f32,), lambda b, x: b.bitcast(b.fptrunc(x, _f16), _i16))
bfloat = _op(
    f32,
    (types.uint16,),
    lambda b, x: b.bitcast(b.shl(b.zext(x, _i32), _i32(16)), _f32),
)


def prefetch_at(builder: Any, where: Any) -> None:
    """Ask for the cache line at a byte pointer."""
    call(builder, "llvm.prefetch.p0", ir.VoidType(), where, _i32(0), _i32(2), _i32(1))


@intrinsic
def prefetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache line at that element; never faults, wherever it points."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        prefetch_at(builder, address(builder, *values, _i8))
        return context.get_dummy_value()

    return types.void(pointer, i64), code


@intrinsic
def add_to_doubles(typing: Any, pointer: Any, index: Any, floats: Any, offset: Any) -> Any:
    """Add LANES floats, and `offset` to each, to the doubles from `index` on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, index, floats, offset = values
        wide = ir.VectorType(_f64, LANES)
        where = address(builder, pointer, index, wide)
        found = builder.fadd(builder.fpext(floats, wide), splat_of(builder, offset))
        builder.store(builder.fadd(builder.load(where, align=8), found), where, align=8)
        return context.get_dummy_value()

    return types.void(pointer, i64, FLOATS, types.float64), code


@intrinsic
def add_three(typing: Any, table: Any, row: Any, first: Any, second: Any, third: Any, index: Any) -> Any:
    """Add number `index` of three rows of floats to the first three of the four doubles `table[4 * row:]`."""
    four = ir.VectorType(_f32, 4)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        table, row, *rows, index = values
        found = ir.Constant(four, None)
        for i, numbers in enumerate(rows):
            found = builder.insert_element(found, builder.load(builder.gep(numbers, [index])), _i32(i))
        wide = ir.VectorType(_f64, 4)
        where = address(builder, table, builder.mul(row, _i64(4)), wide)
        total = builder.fadd(builder.load(where, align=8), builder.fpext(found, wide))
        builder.store(total, where, align=8)
        return context.get_dummy_value()

    return types.void(table, i64, first, second, third, i64), code


@intrinsic
def least_split(typing: Any, first: Any, second: Any, third: Any, index: Any, inner: Any, outer: Any) -> Any:
    """Return the smallest x + sqrt(inner * y) + outer * z over LANES entries of three rows of doubles.

    NaN counts as infinite.
    """
    wide = ir.VectorType(_f64, LANES)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, y, z = (builder.load(address(builder, row, values[3], wide), align=8) for row in values[:3])
        inner_, outer_ = (splat_of(builder, value) for value in values[4:])
        root = call(builder, f"llvm.sqrt.v{LANES}f64", wide, builder.fmul(inner_, y))
        bound = builder.fadd(builder.fadd(x, root), builder.fmul(outer_, z))
        infinite = ir.Constant(wide, [float("inf")] * LANES)
        bound = builder.select(builder.fcmp_ordered("<", bound, infinite), bound, infinite)
        return call(builder, f"llvm.vector.reduce.fmin.v{LANES}f64", _f64, bound, fast=("nnan",))

    f64 = types.float64
    return f64(first, second, third, i64, f64, f64), code


def across(builder: Any, vectors: list[Any], combine: Callable[..., Any]) -> Any:
    """Return `<4 x float>`: the lanes of each of four vectors, combined two at a time."""

    def folded(x: Any, y: Any) -> Any:
        """Combine neighbours: those of `x` land in the first half of every four lanes."""
        lanes = [4 * (i // 4) + 2 * (i % 2) + LANES * (i % 4 // 2) for i in range(LANES)]
        masks = [ir.Constant(INTS, [lane + odd for lane in lanes]) for odd in (0, 1)]
        return combine(builder, *(builder.shuffle_vector(x, y, mask) for mask in masks))

    result, width = folded(folded(*vectors[:2]), folded(*vectors[2:])), LANES
    while width > 4:
        width //= 2
        halves = [
            builder.shuffle_vector(result, result, ir.Constant(ir.VectorType(_i32, width), list(part)))
            for part in (range(width), range(width, 2 * width))
        ]
        result = combine(builder, *halves)
    return result


def _store_across(combine: Callable[..., Any]) -> Any:
    """Return `write(pointer, index, stride, one, two, three, four)`: the lanes of each combined to a number.

    The four numbers are written `stride` apart.
    """

    def write(
        typing: Any, pointer: Any, index: Any, stride: Any, one: Any, two: Any, three: Any, four: Any
    ) -> Any:

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer, index, stride, *vectors = values
            numbers = across(builder, vectors, combine)
            for i in range(4):
                where = builder.gep(pointer, [builder.add(index, builder.mul(stride, _i64(i)))])
                builder.store(builder.extract_element(numbers, _i32(i)), where)
            return context.get_dummy_value()

        return types.void(pointer, i64, i64, *(FLOATS,) * 4), code

    return intrinsic(write)


store_sums, store_tops = _store_across(add_of), _store_across(larger_of)


@intrinsic
def word(typing: Any, pointer: Any, index: Any) -> Any:
    """Return the unsigned 32-bit word at byte `index` from a byte pointer on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(address(builder, *values, _i32), align=1)

    return types.uint32(pointer, i64), code


@intrinsic
def short(typing: Any, pointer: Any, index: Any) -> Any:
    """Return the unsigned 16-bit number at byte `index` from a byte pointer on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(address(builder, *values, _i16), align=1)

    return types.uint16(pointer, i64), code


@intrinsic
def put_short(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write an unsigned 16-bit number at byte `index` from a byte pointer on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where = address(builder, *values[:2], _i16)
        builder.store(values[2], where, align=1)
        return context.get_dummy_value()

    return types.void(pointer, i64, types.uint16), code


@intrinsic
def put_float(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write a float32 at byte `index` from a byte pointer on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where = address(builder, *values[:2], _f32)
        builder.store(values[2], where, align=1)
        return context.get_dummy_value()

    return types.void(pointer, i64, f32), code


@intrinsic
def put_word(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Write an unsigned 32-bit word at byte `index`."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], address(builder, *values[:2], _i32), align=1)
        return context.get_dummy_value()

    return types.void(pointer, i64, types.uint32), code


long_bits = _op(types.int64, (types.float64,), lambda b, x: b.bitcast(x, _i64))
as_float = _op(f32, (types.uint32,), lambda b, x: b.bitcast(x, _f32))


# -- pointers -----------------------------------------------------------------------------------------------


def _pointer(element: Any) -> Any:
    """Return an intrinsic that makes an address a pointer to `element`s, which can be indexed."""

    def at(typing: Any, address: Any) -> Any:
        kind = types.CPointer(element)

        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(i64), code

    return intrinsic(at)


bytes_at, shorts_at, ints_at, longs_at = (
    _pointer(kind) for kind in (types.uint8, types.uint16, types.int32, types.int64)
)
floats_at, doubles_at = _pointer(types.float32), _pointer(types.float64)


@intrinsic
def ahead(typing: Any, pointer: Any, count: Any) -> Any:
    """Return the pointer `count` elements further on."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.gep(values[0], [values[1]])

    return pointer(pointer, i64), code


@intrinsic
def invoke(typing: Any, function: Any, address: Any, phase: Any, index: Any, number: Any) -> Any:
    """Call a compiled piece through its address: the loop over threads is compiled apart from the work."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_i64, [_i64] * 4).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), values[1:])

    return types.int64(*(types.int64,) * 5), code
