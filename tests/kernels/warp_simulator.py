"""Runs the emitted warp programs on numpy lanes: every address, mask and fragment is the kernel's.

Replaces the functions of ``pallas_kernels.bitplane_matmul.emit`` while it runs; what PTX does with
one instruction is written again here. The warps of a block are threads, so that barriers work.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition, local

import numpy as np

from pallas_kernels.bitplane_matmul import emit

LANES = 32
ARRAY_SHIFT = 40  # an address is (array + 1) << 40 | byte


class Lanes(emit.Word):
    """A register of a warp: one value a lane."""

    def __init__(self, value):
        object.__setattr__(self, "value", np.broadcast_to(np.asarray(value), (LANES,)))

    def _apply(self, function, other):
        kind = self.value.dtype
        if isinstance(other, Lanes):
            assert other.value.dtype == kind, "registers of different widths"
            right = other.value
        else:
            right = np.asarray(int(other) % (1 << (8 * kind.itemsize)), kind)
        return Lanes(function(self.value, right).astype(kind))

    def __and__(self, other):
        return self._apply(np.bitwise_and, other)

    def __or__(self, other):
        return self._apply(np.bitwise_or, other)

    def __xor__(self, other):
        return self._apply(np.bitwise_xor, other)

    def __lshift__(self, other):
        return self._apply(np.left_shift, other)

    def __rshift__(self, other):
        return self._apply(np.right_shift, other)

    def __add__(self, other):
        return self._apply(np.add, other)

    def __sub__(self, other):
        return self._apply(np.subtract, other)

    def __mul__(self, other):
        return self._apply(np.multiply, other)

    def __floordiv__(self, other):
        return self._apply(np.floor_divide, other)

    def __mod__(self, other):
        return self._apply(np.remainder, other)

    def minimum(self, other):
        return self._apply(np.minimum, other)

    def less(self, other):
        return self._apply(np.less, other).value.astype(bool)

    def equals(self, other):
        return self._apply(np.equal, other).value.astype(bool)

    def wide(self):
        return Lanes(self.value.astype(np.uint64))

    def wide_signed(self):
        return Lanes(self.value.astype(np.int32).astype(np.int64).astype(np.uint64))


class Floats(emit.Float):
    """A float32 register of a warp."""

    def __init__(self, value):
        object.__setattr__(self, "value", np.asarray(value, np.float32))

    def __add__(self, other):
        return Floats(self.value + _number(other))

    def __mul__(self, other):
        return Floats(self.value * _number(other))


def _number(other):
    return other.value if isinstance(other, Floats) else np.float32(other)


def _bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.uint8).reshape(LANES, 4)


class Block:
    """Shared memory of a block and its barriers: arrivals wanted and missing, bytes, phase."""

    def __init__(self, shared_bytes: int):
        self.shared = np.zeros(max(shared_bytes, 1), np.uint8)
        self.changed = Condition()
        self.barriers: dict[int, list[int]] = {}
        self.started = False
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends everyone's waiting: the first error is the one to see."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, condition) -> None:
        """Waits until a condition holds."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.error or condition(), 60), "a deadlock"
            if self.error:
                raise self.error

    def count(self, address: int) -> None:
        """Counts an arrival; the last one of a phase starts the next."""
        with self.changed:
            barrier = self.barriers[address]
            barrier[1] -= 1
            assert barrier[1] >= 0
            if barrier[1] == 0:
                barrier[1], barrier[2] = barrier[0], barrier[2] ^ 1
            self.changed.notify_all()


class Warp:
    """The instructions, for one warp of a block and its memory."""

    def __init__(self, memory: list[np.ndarray], owner: Block, block: int, warp: int):
        self.memory, self.owner = memory, owner
        self.shared, self.block_index, self.warp = owner.shared, block, warp
        self.active = np.ones(LANES, bool)

    def word(self, value):
        return Lanes(np.full(LANES, int(value) % (1 << 32), np.uint32))

    def flag(self, condition):
        return Lanes(condition.astype(np.uint32))

    def thread(self):
        return Lanes(np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * self.warp))

    def block(self):
        return self.word(self.block_index)

    def address(self, ref):
        return self.word(0) if ref is None else Lanes(np.uint64((ref + 1) << ARRAY_SHIFT))

    def page_address(self, start, page, page_bytes):
        return start + page.wide() * page_bytes

    def _global(self, at, offset, size):
        addresses = at.value + np.uint64(offset)
        places = []
        for lane in range(LANES):
            if not self.active[lane]:
                places.append(None)
                continue
            array, byte = divmod(int(addresses[lane]), 1 << ARRAY_SHIFT)
            memory = self.memory[array - 1]
            assert byte % size == 0, "misaligned"
            assert byte + size <= len(memory), "out of bounds"
            places.append((memory, byte))
        return places

    def load(self, at, words=1, *, offset=0, fetch=0):
        loaded = np.zeros((LANES, words), np.uint32)
        for lane, place in enumerate(self._global(at, offset, 4 * words)):
            if place:
                memory, byte = place
                loaded[lane] = memory[byte : byte + 4 * words].view(np.uint32)
        return [Lanes(loaded[:, i].copy()) for i in range(words)]

    def store(self, at, words, *, offset=0):
        for lane, place in enumerate(self._global(at, offset, 4 * len(words))):
            if place:
                memory, byte = place
                values = np.array([word.value[lane] for word in words], np.uint32)
                memory[byte : byte + 4 * len(words)] = values.view(np.uint8)

    def load_words(self, at, words):
        return [self.load(at, offset=4 * i)[0] for i in range(words)]

    def load_shared(self, at, offset):
        out = np.zeros(LANES, np.uint32)
        for lane in np.flatnonzero(self.active):
            byte = int(at.value[lane]) + offset
            assert byte % 2 == 0
            out[lane] = int.from_bytes(self.shared[byte : byte + 2].tobytes(), "little")
        return Lanes(out)

    def store_shared(self, at, words, offset):
        for lane in np.flatnonzero(self.active):
            byte = int(at.value[lane]) + offset
            assert byte % (4 * len(words)) == 0
            values = np.array([word.value[lane] for word in words], np.uint32)
            self.shared[byte : byte + 4 * len(words)] = values.view(np.uint8)

    def sync_warp(self):
        pass

    def permute(self, a, b, selector):
        selector = selector if isinstance(selector, Lanes) else self.word(selector)
        source = np.concatenate([_bytes(a.value), _bytes(b.value)], axis=1)
        out = np.zeros((LANES, 4), np.uint8)
        for place in range(4):
            pick = (selector.value >> np.uint32(4 * place)) & 15
            byte = np.take_along_axis(source, (pick & 7)[:, None].astype(int), 1)[:, 0]
            out[:, place] = np.where(pick & 8, np.where(byte & 128, 255, 0), byte)
        return Lanes(out.view(np.uint32)[:, 0])

    def select(self, mask, a, b):
        return (a & mask) | (b & (int(mask) ^ 0xFFFFFFFF))

    def keep_or(self, a, mask, c):
        return (a & mask) | c

    def byte_address(self, codes, byte, stride, base):
        return ((codes >> (8 * byte)) & 255) * stride + base

    def multiply_add(self, a, b, total, *, unsigned):
        lane = np.arange(LANES)
        group, pair = lane // 4, lane % 4
        left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
        sums = np.zeros((16, 8), np.int64)
        for index in range(4):
            kind = np.uint8 if unsigned else np.int8
            values = _bytes(a[index].value).view(kind)
            column = 16 * (index // 2) + 4 * pair
            for byte in range(4):
                left[group + 8 * (index % 2), column + byte] = values[:, byte]
            place = group + 8 * (index // 2), 2 * pair + index % 2
            sums[place] = total[index].value.astype(np.int32)
        for index in range(2):
            values = _bytes(b[index].value).view(np.int8)
            for byte in range(4):
                right[16 * index + 4 * pair + byte, group] = values[:, byte]
        sums += left @ right
        assert np.abs(sums).max() < 1 << 31
        return [
            Lanes(sums[group + 8 * (i // 2), 2 * pair + i % 2].astype(np.int32).view(np.uint32))
            for i in range(4)
        ]

    def sync_block(self):
        """Warp 0 makes the barriers; nobody else may come first."""
        with self.owner.changed:
            self.owner.started |= self.warp == 0
            self.owner.changed.notify_all()
        self.owner.wait(lambda: self.owner.started)

    def limit_registers(self, count, *, more):
        pass

    def start_barrier(self, at, arrivals):
        if self.active.any():
            self.owner.barriers[self._only(at)] = [arrivals, arrivals, 0]

    def publish_barriers(self):
        pass

    def _only(self, at) -> int:
        """The value of the lanes that run, which must be the same in all."""
        [value] = set(at.value[self.active].tolist())
        return value

    def arrive(self, at):
        if self.active.any():
            self.owner.count(self._only(at))

    def wait_for(self, at, parity):
        if not self.active.any():
            return
        barrier, old = self.owner.barriers[self._only(at)], self._only(parity)
        self.owner.wait(lambda: barrier[2] != old)

    def copy_to_shared(self, target, source, size, barrier):
        if not self.active.any():
            return
        array, byte = divmod(self._only(source), 1 << ARRAY_SHIFT)
        assert byte % 16 == 0
        assert byte + size <= len(self.memory[array - 1])
        start = self._only(target)
        self.shared[start : start + size] = self.memory[array - 1][byte : byte + size]
        self.owner.count(self._only(barrier))

    def settle(self, words):
        return list(words)

    def warpgroup_begin(self):
        pass

    warpgroup_commit = warpgroup_wait = warpgroup_begin

    def warpgroup_multiply(self, a, right, total):
        """One warp's sixteen rows; operands are read at once, results are there at once."""
        lane = np.arange(LANES)
        group, pair = lane // 4, lane % 4
        tokens = 2 * len(total)
        [descriptor] = set(right.value.tolist())
        start, columns, rows = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
        assert descriptor >> 46 == 0, "no swizzle"
        left = np.zeros((16, 16), np.float32)
        for index in range(4):
            values = np.ascontiguousarray(a[index].value).view(np.float16).reshape(LANES, 2)
            for place in range(2):
                column = 8 * (index // 2) + 2 * pair + place
                left[group + 8 * (index % 2), column] = values[:, place]
        blocks = [
            self.shared[start + columns * j + rows * i :][:128].view(np.float16).reshape(8, 8)
            for i in range(tokens // 8)
            for j in range(2)
        ]
        operand = np.stack(blocks).reshape(tokens // 8, 2, 8, 8).transpose(0, 2, 1, 3)
        product = left @ operand.reshape(tokens, 16).astype(np.float32).T
        out = []
        for index, value in enumerate(total):
            place = group + 8 * (index // 2 % 2), index // 4 * 8 + 2 * pair + index % 2
            added = np.ascontiguousarray(value.value).view(np.float32) + product[place]
            out.append(Lanes(added.astype(np.float32).view(np.uint32)))
        return out

    def tile_descriptor(self, at, row_stride, column_stride):
        return (at >> 4).wide() | ((column_stride >> 4) << 16 | (row_stride >> 4) << 32)

    def store_below(self, at, value, index, bound, *, offset=0):
        with self.when(index.less(bound)):
            self.store(at, [value], offset=offset)

    def assemble(self, text, outputs, inputs):
        """The two conversions to float16."""
        if "sub.rn.f16x2" in text:
            left, right = (np.ascontiguousarray(one.value).view(np.float16) for one in inputs)
            return [Lanes((left - right).view(np.uint32))]
        assert text.count("cvt.rn.f16.s16") == 2
        halves = np.ascontiguousarray(inputs[0].value).view(np.int16).astype(np.float16)
        return [Lanes(halves.view(np.uint32))]

    @contextmanager
    def when(self, condition):
        before = self.active
        self.active = before & condition
        yield
        self.active = before

    def loop(self, start, stop, step, carry, body):
        if not self.active.any():
            return list(carry)
        bounds = []
        for bound in (start, stop, step):
            bounds.append(self._only(bound))
        for index in range(*bounds):
            carry = body(self.word(index), carry)
        return list(carry)

    def as_float(self, signed):
        return Floats(signed.value.astype(np.int32))

    def bits_as_float(self, bits):
        return Floats(np.ascontiguousarray(bits.value).view(np.float32))

    def float_as_bits(self, number):
        return Lanes(np.ascontiguousarray(number.value).view(np.uint32))

    def sigmoid(self, number):
        return Floats(1 / (1 + np.exp(-number.value)))


def simulate(
    body, form, warps: int, arrays: list[np.ndarray], shared_bytes: int, monkeypatch
) -> np.ndarray:
    """Runs a kernel's body for its whole grid; the last array is written and returned."""
    copies = [np.array(array) for array in arrays]
    memory = [array.reshape(-1).view(np.uint8) for array in copies]
    current = local()

    def replace(name):
        return lambda *args, **options: getattr(current.warp, name)(*args, **options)

    def run(warp):
        current.warp = warp
        try:
            body(form, *range(len(memory)), None)
        except BaseException as error:
            warp.owner.fail(error)
            raise

    with monkeypatch.context() as patch, ThreadPoolExecutor(warps) as threads:
        for name in dir(Warp):
            if not name.startswith("_") and hasattr(emit, name):
                patch.setattr(emit, name, replace(name))
        for block in range(form.blocks):
            owner = Block(shared_bytes)
            list(threads.map(run, [Warp(memory, owner, block, warp) for warp in range(warps)]))
    return copies[-1]
