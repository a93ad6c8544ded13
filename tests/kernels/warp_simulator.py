"""Runs the emitted warp programs on numpy lanes: every address, mask and fragment is the kernel's.

Replaces the functions of ``pallas_kernels.bitplane_matmul.emit`` while it runs; what PTX does with
one instruction is written again here.
"""

from contextlib import contextmanager

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


class Warp:
    """The instructions, for one warp of a block and its memory."""

    def __init__(self, arrays: list[np.ndarray], shared: np.ndarray, block: int, warp: int):
        self.memory = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        self.shared, self.block_index, self.warp = shared, block, warp
        self.active = np.ones(LANES, bool)

    def word(self, value):
        return Lanes(np.full(LANES, int(value) % (1 << 32), np.uint32))

    def thread(self):
        return Lanes(np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * self.warp))

    def block(self):
        return self.word(self.block_index)

    def address(self, ref):
        return self.word(0) if ref is None else Lanes(np.uint64((ref + 1) << ARRAY_SHIFT))

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

    def load(self, at, words=1, *, offset=0, stream=False):
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

    def load_shared(self, at, offset, size):
        out = np.zeros(LANES, np.uint32)
        for lane in np.flatnonzero(self.active):
            byte = int(at.value[lane]) + offset
            assert byte % size == 0
            out[lane] = int.from_bytes(self.shared[byte : byte + size].tobytes(), "little")
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

    def assemble(self, text, outputs, inputs):
        """The two conversions to float16 of the dequantising kernel."""
        if "sub.rn.f16x2" in text:
            left, right = (np.ascontiguousarray(one.value).view(np.float16) for one in inputs)
            return [Lanes((left - right).view(np.uint32))]
        assert "cvt.rn.f16.s16" in text
        low = np.ascontiguousarray(inputs[0].value).view(np.int16)[::2].astype(np.float16)
        return [Lanes(np.repeat(low, 2).view(np.uint32))]

    @contextmanager
    def when(self, condition):
        before = self.active
        self.active = before & condition
        yield
        self.active = before

    def loop(self, start, stop, step, carry, body):
        bounds = []
        for bound in (start, stop, step):
            assert (bound.value == bound.value[0]).all(), "a loop must be the same in all lanes"
            bounds.append(int(bound.value[0]))
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


def simulate(body, form, arrays: list[np.ndarray], shared_bytes: int, monkeypatch) -> np.ndarray:
    """Runs a kernel's body for its whole grid; the last array is written and returned."""
    memory = [np.array(array) for array in arrays]
    for block in range(form.blocks):
        shared = np.zeros(max(shared_bytes, 1), np.uint8)
        for index in range(form.warps):
            warp = Warp(memory, shared, block, index)
            with monkeypatch.context() as patch:
                for name in dir(Warp):
                    if not name.startswith("_") and hasattr(emit, name):
                        patch.setattr(emit, name, getattr(warp, name))
                body(form, *range(len(memory)), None)
            memory = [
                data.view(array.dtype).reshape(array.shape)
                for data, array in zip(warp.memory, memory, strict=True)
            ]
    return memory[-1]
