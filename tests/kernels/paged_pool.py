"""Random sequences in a poisoned pool, and their attention in float64."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.page_layout import KvLayout

POISON = 0x7FC07FC0
"""NaN as a float32 and as each half's bfloat16."""


def abstract_h200() -> AbstractMesh:
    """A device to lower for on a machine that has none."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return AbstractMesh((1,), ("x",), abstract_device=device)


def lowered_for_h200(function, *shapes) -> str:
    """The program of a function for an H200, as text."""
    with jax.sharding.use_abstract_mesh(abstract_h200()):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@dataclass(frozen=True)
class Case:
    """Sequences whose last ``chunk`` tokens are queries; a length of 0 is an empty slot."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    chunk: int = 1
    page_words: int = 1024
    dtype: str = "bfloat16"
    q_dtype: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    spare_blocks: int = 2
    layout: KvLayout = field(init=False)

    def __post_init__(self):
        layout = KvLayout(self.kv_heads, self.head_dim, self.dtype, self.page_words)
        object.__setattr__(self, "layout", layout)

    @property
    def options(self) -> dict:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {
            "layout": self.layout,
            "scale": scale,
            "window": self.window,
            "soft_cap": self.soft_cap,
        }

    @property
    def blocks(self) -> int:
        return -(-max(self.lengths) // self.layout.tokens_per_page) + self.spare_blocks

    def positions(self) -> np.ndarray:
        """int32 ``[B, T]``: the last tokens, then padding; a short sequence has fewer."""
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
    expected: np.ndarray


def words_of(x: np.ndarray, layout: KvLayout) -> np.ndarray:
    """Heads as words of the layout, in numpy."""
    if layout.dtype == "float32":
        return np.ascontiguousarray(x, np.float32).view("u4")
    low, high = np.split(np.ascontiguousarray(x).view("u2").astype("u4"), 2, axis=-1)
    return low | (high << 16)


def make_sequences(case: Case, seed: int) -> Sequences:
    """Draws a case's keys, values and queries; whatever no query may see is NaN."""
    random, layout = np.random.default_rng(seed), case.layout
    dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.float32)
    batch, tokens = len(case.lengths), layout.tokens_per_page
    pages = 1 + random.permutation(batch * case.blocks).reshape(batch, case.blocks)
    pool = np.full((1 + batch * case.blocks, case.page_words), POISON, "u4")
    shape = (2, layout.kv_heads, tokens, layout.words_per_head)
    positions = case.positions()
    q = random.normal(size=(*positions.shape, case.heads, case.head_dim))
    q = q.astype(case.q_dtype or dtype)
    expected = np.zeros(q.shape)
    for row, length in enumerate(case.lengths):
        kv = random.normal(size=(2, length, layout.kv_heads, case.head_dim)).astype(dtype)
        known = positions[row][positions[row] >= 0]
        unseen = max(0, known[0] - case.window + 1) if case.window and len(known) else 0
        for start in range(0, length, tokens):
            part = words_of(kv[:, start : start + tokens], layout).transpose(0, 2, 1, 3)
            part[:, :, : max(0, unseen - start)] = POISON
            page = pool[pages[row, start // tokens], : np.prod(shape)].reshape(shape)
            page[:, :, : part.shape[2]] = part
        args = (kv[0].astype(np.float64), kv[1].astype(np.float64), known, case)
        expected[row, : len(known)] = _attention(q[row, : len(known)].astype(np.float64), *args)
    arrays = (jnp.asarray(x) for x in (q, pool, pages.astype(np.int32), positions))
    return Sequences(*arrays, expected=expected)


def _attention(q, k, v, positions, case: Case) -> np.ndarray:
    """Attention of ``[T, N, H]`` queries over ``[S, K, H]`` keys, head by head."""
    out, group = np.zeros(q.shape), case.heads // case.kv_heads
    distance = positions[:, None] - np.arange(len(k))[None, :]
    hidden = distance < 0
    if case.window:
        hidden |= distance >= case.window
    for head in range(case.heads):
        scores = q[:, head] @ k[:, head // group].T * case.options["scale"]
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        scores = np.where(hidden, -np.inf, scores)
        if len(scores):
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, head // group]
    return out
