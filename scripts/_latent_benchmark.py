"""Device times of attention over latents, mode by mode, beside full keys and values."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.kv_reconstruct import Rotation, UpProjections, latent_attention
from pallas_kernels.kv_reconstruct.api import decode_shape
from pallas_kernels.kv_reconstruct.counts import COSTS, cheapest, full_cost, possible_modes
from pallas_kernels.page_layout import PAGE_WORD_MULTIPLE, KvLayout, LatentLayout
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.device_time import device_time

BATCH, DEVICES = 64, (1, 8)
PAGE_WORDS = 16384
COMPILERS = 8
SPREAD_BYTES = 512 << 20
"""Calls take turns with pages of at least so many bytes, so that the L2 cache helps no one."""
DISPATCH_LAYERS, DISPATCH_CALLS = 16, 20


@dataclass(frozen=True)
class Model:
    """Attention of one layer, factored with 60% of its parameters kept."""

    heads: int
    kv_heads: int
    head_dim: int
    rank: int
    theta: float

    @property
    def rotation(self) -> Rotation:
        """Of its keys."""
        exponent = np.arange(0, self.head_dim, 2) / self.head_dim
        return Rotation(tuple((self.theta**-exponent).tolist()))


MODELS = {
    "llama-3-70b": Model(64, 8, 128, 546, 5e5),
    "llama-65b": Model(64, 64, 128, 2457, 1e4),
}


@dataclass(frozen=True)
class Record:
    """One measurement of one layer's decode attention.

    Attributes:
        model: Whose shapes.
        tp: Devices; the shape is one device's.
        batch: Sequences.
        context: Tokens of each.
        mode: What was run; ``full`` is paged attention over bfloat16 keys and values.
        chosen: It is what ``auto`` takes.
        us: Device time of a call, median.
        spread_us: 90th less 10th percentile.
        counted_us: What the counts expect.
        cache_bytes: Of all sequences in this layer, on one device.
        temporary_bytes: That XLA needs besides.
        difference: Relative difference of the result from that of ``rebuild``; 0 for ``full``.
    """

    model: str
    tp: int
    batch: int
    context: int
    mode: str
    chosen: bool
    us: float
    spread_us: float
    counted_us: float
    cache_bytes: int
    temporary_bytes: int
    difference: float


@partial(jax.jit, static_argnums=(1, 2))
def random_pool(key: jax.Array, pages: int, words: int) -> jax.Array:
    """A pool of bfloat16 normals."""

    def page(key):
        halves = jax.random.normal(key, (words, 2), jnp.bfloat16)
        return lax.bitcast_convert_type(halves, jnp.uint32)

    return lax.map(page, jax.random.split(key, pages), batch_size=256)


@dataclass(frozen=True)
class Case:
    """One device's share of a model's layer."""

    name: str
    devices: int
    context: int

    @property
    def model(self) -> Model:
        """The whole layer."""
        return MODELS[self.name]

    @property
    def heads(self) -> int:
        """Query heads of a device."""
        return self.model.heads // self.devices

    @property
    def kv_heads(self) -> int:
        """Key and value heads of a device; latents are on every device whole."""
        return max(1, self.model.kv_heads // self.devices)

    @cached_property
    def latent_layout(self) -> LatentLayout:
        """In pages that a power of two of tokens fills."""
        rank = self.model.rank
        token = LatentLayout(rank, rank, 0, "bfloat16", PAGE_WORDS)
        words = token.tokens_per_page * token.words_per_token
        words = -(-words // PAGE_WORD_MULTIPLE) * PAGE_WORD_MULTIPLE
        return LatentLayout(rank, rank, 0, "bfloat16", words)

    @cached_property
    def full_layout(self) -> KvLayout:
        """In pages of 64 KiB."""
        return KvLayout(self.kv_heads, self.model.head_dim, "bfloat16", PAGE_WORDS)

    def projections(self) -> UpProjections:
        """Random, of a scale that keeps scores alive."""
        shape = (self.kv_heads, self.model.head_dim, self.model.rank)
        keys = jax.random.split(jax.random.key(1), 2)
        scale = jnp.bfloat16(self.model.rank**-0.5)
        return UpProjections(*(jax.random.normal(key, shape, jnp.bfloat16) * scale for key in keys))

    def queries(self) -> jax.Array:
        """One a sequence."""
        shape = (BATCH, 1, self.heads, self.model.head_dim)
        return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)

    def operands(self, layout: LatentLayout | KvLayout) -> tuple[jax.Array, list[jax.Array]]:
        """The pool, and the page tables of every turn, all pages apart and in random order."""
        blocks = -(-self.context // layout.tokens_per_page)
        need = 4 * layout.page_words * BATCH * blocks
        turns = max(1, min(4, -(-SPREAD_BYTES // need)))
        random = np.random.default_rng(0)
        ids = 1 + random.permutation(turns * BATCH * blocks).reshape(turns, BATCH, blocks)
        pool = random_pool(jax.random.key(0), 1 + turns * BATCH * blocks, layout.page_words)
        return pool, [jnp.asarray(table, jnp.int32) for table in ids]


def measure(case: Case) -> Iterator[Record]:
    """Times all modes of a case."""
    model, q, up = case.model, case.queries(), case.projections()
    positions = jnp.full((BATCH, 1), case.context - 1, jnp.int32)
    scale = model.head_dim**-0.5
    layout, full = case.latent_layout, case.full_layout
    pool, tables = case.operands(layout)
    blocks = tables[0].shape[1]
    shape = decode_shape(up, layout, model.rotation, case.heads, BATCH, blocks)
    chosen, modes = cheapest(shape), possible_modes(shape)

    def attend(mode: Any) -> Callable:
        options = {"layout": layout, "scale": scale, "rotation": model.rotation, "mode": mode}
        return lambda q, pool, pages, up: latent_attention(q, pool, pages, positions, up, **options)

    def build(mode: str) -> Any:
        return jax.jit(attend(mode)).lower(q, pool, tables[0], up).compile()

    def record(mode: str, program: Any, run: Callable, counted: float, bytes_: int, error: float):
        calls = 24 if case.context < 4096 else 6
        found, memory = device_time(run, calls=calls, keep=False), program.memory_analysis()
        return Record(
            case.name,
            case.devices,
            BATCH,
            case.context,
            mode,
            mode == chosen,
            round(found.median, 1),
            round(found.spread, 1),
            round(counted, 1),
            bytes_,
            memory.temp_size_in_bytes if memory else 0,
            error,
        )

    with ThreadPoolExecutor(COMPILERS) as threads:
        programs = dict(zip(modes, threads.map(build, modes), strict=True))
    first = None
    for mode, program in programs.items():
        out = program(q, pool, tables[0], up).astype(jnp.float32)
        first = out if first is None else first
        error = float(jnp.linalg.norm(out - first) / jnp.linalg.norm(first))

        def run(turn: int, program: Any = program) -> jax.Array:
            return program(q, pool, tables[turn % len(tables)], up)

        counted = COSTS[mode](shape).microseconds
        yield record(mode, program, run, counted, shape.latent_bytes, float(f"{error:.2e}"))
    del pool, tables, first
    pool, tables = case.operands(full)

    def attend_full(q: jax.Array, pool: jax.Array, pages: jax.Array) -> jax.Array:
        return paged_attention(q, pool, pages, positions, layout=full, scale=scale)

    program = jax.jit(attend_full).lower(q, pool, tables[0]).compile()

    def run_full(turn: int) -> jax.Array:
        return program(q, pool, tables[turn % len(tables)])

    counted = full_cost(shape).microseconds
    yield record("full", program, run_full, counted, shape.full_bytes, 0.0)


def dispatch_times() -> dict[str, float]:
    """Wall microseconds a layer of a fixed-shape step, with XLA's flags as they are.

    ``fixed`` is one compiled program of many layers, ``op_by_op`` the same without jit, and
    ``recompile_ms`` what a step whose shape is new costs first.
    """
    case = Case("llama-3-70b", 8, 512)
    layout, model, up, q = case.latent_layout, case.model, case.projections(), case.queries()
    pool, tables = case.operands(layout)
    positions = jnp.full((BATCH, 1), case.context - 1, jnp.int32)

    def step(q: jax.Array, pool: jax.Array, pages: jax.Array, up: UpProjections) -> jax.Array:
        for _ in range(DISPATCH_LAYERS):
            q = q + latent_attention(
                q,
                pool,
                pages,
                positions,
                up,
                layout=layout,
                scale=model.head_dim**-0.5,
                rotation=model.rotation,
            )
        return q

    began = time.perf_counter()
    program = jax.jit(step).lower(q, pool, tables[0], up).compile()
    times = {"recompile_ms": 1e3 * (time.perf_counter() - began)}
    for name, call in {"fixed": program, "op_by_op": step}.items():
        for _ in range(3):
            call(q, pool, tables[0], up).block_until_ready()
        walls = []
        for turn in range(DISPATCH_CALLS):
            began = time.perf_counter()
            call(q, pool, tables[turn % len(tables)], up).block_until_ready()
            walls.append(time.perf_counter() - began)
        walls = np.array(walls) * 1e6 / DISPATCH_LAYERS
        times[name] = round(float(np.median(walls)), 2)
        times[f"{name}_spread"] = round(float(np.ptp(np.percentile(walls, [10, 90]))), 2)
    return times


def dispatch_record() -> dict[str, dict[str, float]]:
    """:func:`dispatch_times` with XLA command buffers on and off, each in a process of its own."""
    found = {}
    for name, flag in {"default": "", "off": "--xla_gpu_enable_command_buffer="}.items():
        flags = " ".join([os.environ.get("XLA_FLAGS", ""), flag]).strip()
        environment = os.environ | {"XLA_FLAGS": flags}
        code = "import json, _latent_benchmark as b; print(json.dumps(b.dispatch_times()))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=os.path.dirname(__file__),
            env=environment | {"PYTHONPATH": os.pathsep.join([p or os.getcwd() for p in sys.path])},
            capture_output=True,
            text=True,
            check=True,
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(contexts: list[int], report: Callable[[dict], None]) -> None:
    """Measures everything; reports each record as it is made."""
    for context in contexts:
        for name in MODELS:
            for devices in DEVICES:
                for record in measure(Case(name, devices, context)):
                    report(asdict(record))
