"""Registers of a GPU thread as Python values: a thin layer over the MLIR that Mosaic GPU compiles.

The any-precision kernels are warp programs on single registers (byte permutations, matrix
instructions on fragments), which neither Pallas backend can name. They are therefore emitted
instruction by instruction and launched by Mosaic GPU.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, gpu, llvm, scf
from jax.experimental.mosaic.gpu import as_gpu_kernel
from jax.experimental.mosaic.gpu import utils as mosaic_utils


def i32() -> Any:
    """The 32-bit integer type."""
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    """The 64-bit integer type."""
    return ir.IntegerType.get_signless(64)


def constant(value: int, kind: Any = None) -> Any:
    """An integer constant."""
    kind = kind or i32()
    value = operator.index(value)
    width = ir.IntegerType(kind).width
    return arith.constant(
        kind,
        ir.IntegerAttr.get(kind, (value + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))),
    )


@dataclass(frozen=True)
class Word:
    """One unsigned register, 32 or 64 bits wide; integers in its operators become constants."""

    value: Any

    def _other(self, other: "Word | int | np.integer") -> Any:
        return other.value if isinstance(other, Word) else constant(int(other), self.value.type)

    def _apply(self, operation: Callable[[Any, Any], Any], other: "Word | int | np.integer"):
        return Word(operation(self.value, self._other(other)))

    def __and__(self, other: Any) -> "Word":
        return self._apply(arith.andi, other)

    def __or__(self, other: Any) -> "Word":
        return self._apply(arith.ori, other)

    def __xor__(self, other: Any) -> "Word":
        return self._apply(arith.xori, other)

    def __lshift__(self, other: Any) -> "Word":
        return self._apply(arith.shli, other)

    def __rshift__(self, other: Any) -> "Word":
        return self._apply(arith.shrui, other)

    def __add__(self, other: Any) -> "Word":
        return self._apply(arith.addi, other)

    def __sub__(self, other: Any) -> "Word":
        return self._apply(arith.subi, other)

    def __mul__(self, other: Any) -> "Word":
        return self._apply(arith.muli, other)

    def __floordiv__(self, other: Any) -> "Word":
        return self._apply(arith.divui, other)

    def __mod__(self, other: Any) -> "Word":
        return self._apply(arith.remui, other)

    def minimum(self, other: Any) -> "Word":
        """The smaller of two unsigned values."""
        return self._apply(arith.minui, other)

    def less(self, other: Any) -> Any:
        """Whether self < other, unsigned, as a one-bit value."""
        return arith.cmpi(arith.CmpIPredicate.ult, self.value, self._other(other))

    def equals(self, other: Any) -> Any:
        """Whether self == other, as a one-bit value."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, self._other(other))

    def wide(self) -> "Word":
        """Extended to 64 bits with zeros."""
        return Word(arith.extui(i64(), self.value))

    def wide_signed(self) -> "Word":
        """Extended to 64 bits with its sign."""
        return Word(arith.extsi(i64(), self.value))


def flag(condition: Any) -> Word:
    """1 where a one-bit condition holds, else 0."""
    return Word(arith.extui(i32(), condition))


@dataclass(frozen=True)
class Float:
    """One float32 register; Python floats in its operators become constants."""

    value: Any

    def _other(self, other: "Float | float") -> Any:
        if isinstance(other, Float):
            return other.value
        kind = ir.F32Type.get()
        return arith.constant(kind, ir.FloatAttr.get(kind, other))

    def __add__(self, other: "Float | float") -> "Float":
        return Float(arith.addf(self.value, self._other(other)))

    def __mul__(self, other: "Float | float") -> "Float":
        return Float(arith.mulf(self.value, self._other(other)))


def word(value: int) -> Word:
    """A constant register of 32 bits."""
    return Word(constant(value))


def thread() -> Word:
    """Index of the thread in its block."""
    return Word(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))


def block() -> Word:
    """Index of the block in the grid."""
    return Word(arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)))


def address(ref: Any) -> Word:
    """Address of an array in global memory (64 bits) or in shared memory (32 bits)."""
    pointer = mosaic_utils.memref_ptr(ref)
    shared = "<3>" in str(pointer.type)
    return Word(llvm.ptrtoint(i32() if shared else i64(), pointer))


def assemble(text: str, outputs: int, inputs: Sequence[Word], *, effects: bool = False):
    """One PTX instruction on 32-bit outputs; 64-bit inputs are addresses."""
    codes = ["l" if str(item.value.type) == "i64" else "r" for item in inputs]
    constraints = ",".join(["=r"] * outputs + codes)
    if not outputs:
        llvm.inline_asm(None, [x.value for x in inputs], text, constraints, has_side_effects=True)
        return []
    kind = i32() if outputs == 1 else llvm.StructType.get_literal([i32()] * outputs)
    values = [item.value for item in inputs]
    result = llvm.inline_asm(kind, values, text, constraints, has_side_effects=effects)
    if outputs == 1:
        return [Word(result)]
    return [Word(llvm.extractvalue(i32(), result, [i])) for i in range(outputs)]


def permute(a: Word, b: Word, selector: Word | int | np.integer) -> Word:
    """``prmt.b32``."""
    if not isinstance(selector, Word):
        selector = word(int(selector))
    return assemble("prmt.b32 $0, $1, $2, $3;", 1, [a, b, selector])[0]


def select(mask: np.uint32, a: Word, b: Word) -> Word:
    """``(a & mask) | (b & ~mask)`` in one instruction."""
    return assemble("lop3.b32 $0, $1, $2, $3, 0xca;", 1, [word(int(mask)), a, b])[0]


def keep_or(a: Word, mask: np.uint32, c: np.uint32) -> Word:
    """``(a & mask) | c`` in one instruction."""
    return assemble("lop3.b32 $0, $1, $2, $3, 0xea;", 1, [a, word(int(mask)), word(int(c))])[0]


def byte_address(codes: Word, byte: int, stride: int, base: Word) -> Word:
    """``base + stride * byte``: a dot product that leaves the logic units alone."""
    weights = word(stride << (8 * byte))
    return assemble("dp4a.u32.u32 $0, $1, $2, $3;", 1, [codes, weights, base])[0]


def page_address(start: Word, page: Word, page_bytes: int) -> Word:
    """``start + page * page_bytes``, computed where it is used: addresses take two registers."""
    text, size = "mad.wide.u32 $0, $1, $2, $3;", word(page_bytes)
    return Word(llvm.inline_asm(i64(), [page.value, size.value, start.value], text, "=l,r,r,l"))


def load(at: Word, words: int = 1, *, offset: int = 0, fetch: int = 0) -> list[Word]:
    """Loads words of global memory that nobody writes during the kernel.

    Args:
        at: Address; it must be a multiple of the bytes loaded.
        words: 1, 2 or 4.
        offset: Bytes to add.
        fetch: If given, the words are read once: they are not kept in the first-level cache, and
            this many bytes, 64 or 128, come to the second-level cache.
    """
    vector = {1: "", 2: ".v2", 4: ".v4"}[words]
    hint = f".L1::no_allocate.L2::{fetch}B" if fetch else ""
    names = ",".join(f"${i}" for i in range(words))
    names = f"{{{names}}}" if words > 1 else names
    return assemble(f"ld.global.nc{hint}{vector}.b32 {names}, [${words}+{offset}];", words, [at])


def load_words(at: Word, words: int) -> list[Word]:
    """Loads any number of aligned words."""
    loaded: list[Word] = []
    while len(loaded) < words:
        size = max(s for s in (1, 2, 4) if s <= words - len(loaded))
        loaded += load(at, size, offset=4 * len(loaded))
    return loaded


def store(at: Word, words: Sequence[Word], *, offset: int = 0) -> None:
    """Stores 1, 2 or 4 words to global memory."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    names = ",".join(f"${i + 1}" for i in range(len(words)))
    names = f"{{{names}}}" if len(words) > 1 else names
    assemble(f"st.global{vector}.b32 [$0+{offset}], {names};", 0, [at, *words])


def load_shared(at: Word, offset: int) -> Word:
    """Loads 2 bytes of shared memory, extended with zeros."""
    text = f"{{ .reg .b16 h; ld.shared.u16 h, [$1+{offset}]; cvt.u32.u16 $0, h; }}"
    return assemble(text, 1, [at], effects=True)[0]


def store_shared(at: Word, words: Sequence[Word], offset: int) -> None:
    """Stores 1, 2 or 4 words to shared memory."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    names = ",".join(f"${i + 1}" for i in range(len(words)))
    names = f"{{{names}}}" if len(words) > 1 else names
    assemble(f"st.shared{vector}.b32 [$0+{offset}], {names};", 0, [at, *words])


def sync_warp() -> None:
    """Orders the shared memory of a warp's lanes."""
    assemble("bar.warp.sync 0xffffffff;", 0, [])


def multiply_add(
    a: Sequence[Word], b: Sequence[Word], total: Sequence[Word], *, unsigned: bool
) -> list[Word]:
    """A warp's 16x32 by 32x8 product of bytes added to int32 sums."""
    kind = "u8" if unsigned else "s8"
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    return assemble(text, 4, [*a, *b, *total])


def sync_block() -> None:
    """Waits for all threads of the block."""
    assemble("bar.sync 0;", 0, [])


def start_barrier(at: Word, arrivals: int) -> None:
    """Makes a barrier of shared memory, for arrivals and for bulk copies; one thread calls."""
    assemble(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", 0, [at])


def publish_barriers() -> None:
    """Shows barriers to the copy engine; called by the thread that made them."""
    assemble("fence.mbarrier_init.release.cluster;", 0, [])


def arrive(at: Word) -> None:
    """Counts this thread at a barrier."""
    assemble("mbarrier.arrive.shared::cta.b64 _, [$0];", 0, [at])


def wait_for(at: Word, parity: Word) -> None:
    """Waits until a barrier's phase of this parity is over."""
    text = (
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
        "@done bra OVER; bra AGAIN; OVER: }"
    )
    assemble(text, 0, [at, parity])


def copy_to_shared(target: Word, source: Word, size: int, barrier: Word) -> None:
    """Starts a copy of ``size`` bytes and arrives; the barrier's phase ends when all are there."""
    assemble(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", 0, [barrier])
    text = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1], {size}, [$2];"
    )
    assemble(text, 0, [target, source, barrier])


def settle(words: Sequence[Word]) -> list[Word]:
    """The same values, computed before any later effect: nothing may move past it."""
    kind = llvm.StructType.get_literal([i32()] * len(words))
    constraints = ",".join(["=r"] * len(words) + [str(i) for i in range(len(words))])
    values = [item.value for item in words]
    result = llvm.inline_asm(kind, values, "", constraints, has_side_effects=True)
    return [Word(llvm.extractvalue(i32(), result, [i])) for i in range(len(words))]


def tile_descriptor(at: Word, row_stride: int, column_stride: int) -> Word:
    """Describes a right operand in shared memory to the tensor cores.

    It lies in blocks of 8 rows (tokens) of 16 bytes (8 columns of the product), each contiguous.

    Args:
        at: Address of the first block.
        row_stride: Bytes to the block of the next 8 rows.
        column_stride: Bytes to the block of the next 8 columns.
    """
    fixed = (column_stride >> 4) << 16 | (row_stride >> 4) << 32
    return (at >> 4).wide() | fixed


def limit_registers(count: int, *, more: bool) -> None:
    """Gives the warp group more registers a thread, or takes some from it."""
    assemble(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};", 0, [])


def warpgroup_begin() -> None:
    """Orders registers before the products that follow."""
    assemble("wgmma.fence.sync.aligned;", 0, [])


def warpgroup_commit() -> None:
    """Closes a group of products."""
    assemble("wgmma.commit_group.sync.aligned;", 0, [])


def warpgroup_wait() -> None:
    """Waits for all groups of products."""
    assemble("wgmma.wait_group.sync.aligned 0;", 0, [])


def warpgroup_multiply(a: Sequence[Word], right: Word, total: Sequence[Word]) -> list[Word]:
    """Starts a warp group's 64x16 by 16xN product of float16 added to float32 sums.

    Args:
        a: The warp's 16 rows as fragments.
        right: Descriptor of the right operand.
        total: N / 2 sums of the two rows of a lane, float32 bits.
    """
    size = len(total)
    names = [f"${i}" for i in range(2 * size + 5)]
    text = (
        f"wgmma.mma_async.sync.aligned.m64n{2 * size}k16.f32.f16.f16 "
        f"{{{','.join(names[:size])}}}, {{{','.join(names[2 * size : 2 * size + 4])}}}, "
        f"{names[-1]}, 1, 1, 1, 0;"
    )
    constraints = ",".join(["=r"] * size + [str(i) for i in range(size)] + ["r"] * 4 + ["l"])
    kind = llvm.StructType.get_literal([i32()] * size)
    values = [item.value for item in (*total, *a, right)]
    result = llvm.inline_asm(kind, values, text, constraints, has_side_effects=True)
    return [Word(llvm.extractvalue(i32(), result, [i])) for i in range(size)]


def store_below(at: Word, value: Word, index: Word, bound: Word, *, offset: int = 0) -> None:
    """Stores a word to global memory if ``index < bound``."""
    text = f"{{ .reg .pred p; setp.lt.u32 p, $2, $3; @p st.global.b32 [$0+{offset}], $1; }}"
    assemble(text, 0, [at, value, index, bound])


@contextmanager
def when(condition: Any):
    """Runs the body only if a one-bit condition holds."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def loop(start: Word, stop: Word, step: Word, carry: Sequence[Word], body: Callable) -> list[Word]:
    """``for i in range(start, stop, step): carry = body(i, carry)``."""
    values = [item.value for item in carry]
    operation = scf.ForOp(start.value, stop.value, step.value, values)
    with ir.InsertionPoint(operation.body):
        inner = [Word(value) for value in operation.inner_iter_args]
        result = body(Word(operation.induction_variable), inner)
        scf.yield_([item.value for item in result])
    return [Word(value) for value in operation.results]


def as_float(signed: Word) -> Float:
    """A signed integer register as float32."""
    return Float(arith.sitofp(ir.F32Type.get(), signed.value))


def bits_as_float(bits: Word) -> Float:
    """A register's bits read as float32."""
    return Float(arith.bitcast(ir.F32Type.get(), bits.value))


def float_as_bits(number: Float) -> Word:
    """The bits of a float32."""
    return Word(arith.bitcast(i32(), number.value))


def _approximate(operation: str, number: Float) -> Float:
    text = f"{{ .reg .f32 a, b; mov.b32 a, $1; {operation}.approx.f32 b, a; mov.b32 $0, b; }}"
    return bits_as_float(assemble(text, 1, [float_as_bits(number)])[0])


def sigmoid(number: Float) -> Float:
    """1 / (1 + exp(-number)), good to about 1e-6."""
    return _approximate("rcp", _approximate("ex2", number * -1.4426950408889634) + 1.0)


def compile_kernel(
    body: Callable,
    *,
    name: str,
    blocks: int,
    warps: int,
    inputs: Sequence[tuple[tuple[int, ...], str]],
    in_place: tuple[tuple[int, ...], str],
    shared_bytes: int,
) -> Callable:
    """Builds a callable of arrays.

    Args:
        body: Gets the input arrays, the array that is written in place, and shared memory.
        name: Name of the kernel in profiles.
        blocks: Blocks of the grid.
        warps: Warps a block.
        inputs: Shape and dtype of each input.
        in_place: Shape and dtype of the output, the callable's last argument.
        shared_bytes: Shared memory of a block.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        return as_gpu_kernel(
            lambda context, *refs: body(*refs),
            grid=(blocks, 1, 1),
            block=(32 * warps, 1, 1),
            in_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs),
            out_shape=(),
            inout_shape=(jax.ShapeDtypeStruct(*in_place),),
            smem_scratch_shape=jax.ShapeDtypeStruct((max(shared_bytes // 4, 4),), jnp.uint32),
            kernel_name=name,
            module_name=name,
        )
