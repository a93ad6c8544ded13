"""Random latents in a poisoned pool, and attention over what they stand for, in float64."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from paged_pool import POISON

from pallas_kernels.kv_reconstruct import Rotation, UpProjections
from pallas_kernels.page_layout import LatentLayout


@dataclass(frozen=True)
class Case:
    """Sequences whose last ``chunk`` tokens are queries; a length of 0 is an empty slot."""

    heads: int
    kv_heads: int
    head_dim: int
    ranks: tuple[int, int]
    lengths: tuple[int, ...]
    chunk: int = 1
    shared_dim: int = 0
    value_dim: int | None = None
    theta: float | None = 10_000.0
    bias: bool = False
    page_words: int = 1024
    dtype: str = "float32"
    up_dtype: str | None = None
    shared_blocks: int = 0
    spare_blocks: int = 2
    layout: LatentLayout = field(init=False)

    def __post_init__(self):
        layout = LatentLayout(*self.ranks, self.shared_dim, self.dtype, self.page_words)
        object.__setattr__(self, "layout", layout)

    @property
    def rotation(self) -> Rotation | None:
        if self.theta is None:
            return None
        exponent = np.arange(0, self.head_dim, 2) / self.head_dim
        return Rotation(tuple((self.theta**-exponent).tolist()))

    @property
    def options(self) -> dict:
        return {
            "layout": self.layout,
            "scale": (self.head_dim + self.shared_dim) ** -0.5,
            "rotation": self.rotation,
        }

    @property
    def blocks(self) -> int:
        return -(-max(self.lengths) // self.layout.tokens_per_page) + self.spare_blocks

    def used(self) -> np.ndarray:
        return -(-np.array(self.lengths) // self.layout.tokens_per_page)

    def positions(self) -> np.ndarray:
        positions = np.full((len(self.lengths), self.chunk), -1, np.int32)
        for row, length in zip(positions, self.lengths, strict=True):
            known = np.arange(max(0, length - self.chunk), length)
            row[: len(known)] = known
        return positions


@dataclass(frozen=True)
class Sequences:
    """Arrays of a case, ready for the operation, and the expected result in float64."""

    q: jax.Array
    pool: jax.Array
    pages: jax.Array
    positions: jax.Array
    up: UpProjections
    expected: np.ndarray


def rows_of(parts: list[np.ndarray], layout: LatentLayout) -> np.ndarray:
    """Rows of the layout, in numpy: uint32 ``[tokens, words]``."""
    rows = []
    for part in parts:
        if not part.shape[1]:
            continue
        words = layout.part_words(part.shape[1])
        halves = 2 if layout.dtype == "bfloat16" else 1
        padded = np.zeros((len(part), halves * words), part.dtype)
        padded[:, : part.shape[1]] = part
        if halves == 1:
            rows.append(padded.view("u4"))
        else:
            bits = padded.view("u2").astype("u4")
            rows.append(bits[:, :words] | (bits[:, words:] << 16))
    return np.concatenate(rows, axis=1)


def make_sequences(case: Case, seed: int) -> Sequences:
    """Draws a case; whatever no query may see is NaN. The first sequences share their prefix."""
    random, layout = np.random.default_rng(seed), case.layout
    dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32)
    up_dtype = np.dtype(ml_dtypes.bfloat16 if case.up_dtype == "bfloat16" else np.float32)
    up_dtype = dtype if case.up_dtype is None else up_dtype
    batch, tokens = len(case.lengths), layout.tokens_per_page
    pages = 1 + random.permutation(batch * case.blocks).reshape(batch, case.blocks)
    for row in range(1, batch):
        if case.lengths[row]:
            pages[row, : case.shared_blocks] = pages[0, : case.shared_blocks]
    pool = np.full((1 + batch * case.blocks, case.page_words), POISON, "u4")
    value_dim = case.value_dim or case.head_dim
    ranks = (case.ranks[0], case.ranks[1] or case.ranks[0])

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * random.normal(size=shape)).astype(up_dtype)

    up = UpProjections(
        draw(case.kv_heads, case.head_dim, ranks[0], scale=ranks[0] ** -0.5),
        draw(case.kv_heads, value_dim, ranks[1], scale=ranks[1] ** -0.5),
        draw(case.kv_heads, case.head_dim) if case.bias else None,
        draw(case.kv_heads, value_dim) if case.bias else None,
    )
    positions = case.positions()
    width = case.head_dim + case.shared_dim
    q = random.normal(size=(*positions.shape, case.heads, width)).astype(up_dtype)
    expected = np.zeros((*q.shape[:3], value_dim))
    first: list[np.ndarray] = []
    for row, length in enumerate(case.lengths):
        sizes = (case.ranks[0], case.ranks[1], case.shared_dim)
        parts = [random.normal(size=(length, size)).astype(dtype) for size in sizes]
        if row == 0:
            first = parts
        elif length:
            for part, other in zip(parts, first, strict=True):  # whole blocks, which it has
                part[: case.shared_blocks * tokens] = other[: case.shared_blocks * tokens]
        for start in range(0, length, tokens):
            rows = rows_of([part[start : start + tokens] for part in parts], layout)
            page = pool[pages[row, start // tokens], : tokens * layout.words_per_token]
            page.reshape(tokens, -1)[: len(rows)] = rows
        known = positions[row][positions[row] >= 0]
        latents = tuple(part.astype(np.float64) for part in parts)
        queries = q[row, : len(known)].astype(np.float64)
        expected[row, : len(known)] = _attention(queries, latents, up, known, case)
    arrays = (jnp.asarray(x) for x in (q, pool, pages.astype(np.int32), positions))
    up = UpProjections(*(None if part is None else jnp.asarray(part) for part in up))
    return Sequences(*arrays, up=up, expected=expected)


def _attention(q, latents, up: UpProjections, positions, case: Case) -> np.ndarray:
    """Attention over explicitly rebuilt keys and values, head by head."""
    k_latent, v_latent, shared = latents
    out = np.zeros((*q.shape[:2], up.v.shape[1]))
    group, half = case.heads // case.kv_heads, case.head_dim // 2
    if not len(positions):
        return out
    hidden = positions[:, None] < np.arange(len(k_latent))[None, :]
    v_latent = v_latent if case.ranks[1] else k_latent
    for head in range(case.heads):
        key, value = (part[head // group].astype(np.float64) for part in (up.k, up.v))
        k, v = k_latent @ key.T, v_latent @ value.T
        if case.bias:
            k, v = k + up.k_bias[head // group], v + up.v_bias[head // group]
        if case.rotation is not None:
            angle = np.arange(len(k))[:, None] * np.array(case.rotation.frequencies)
            pair = k[:, :half] + 1j * k[:, half:]
            pair = pair * np.exp(1j * angle)
            k = np.concatenate([pair.real, pair.imag], axis=1)
        k = np.concatenate([k, shared], axis=1)
        scores = np.where(hidden, -np.inf, q[:, head] @ k.T * case.options["scale"])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v
    return out
