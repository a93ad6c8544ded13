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

from pallas_kernels.device_time import device_time
from pallas_kernels.kv_reconstruct import Rotation, UpProjections, latent_attention
from pallas_kernels.kv_reconstruct.api import decode_shape
from pallas_kernels.kv_reconstruct.counts import (
    COSTS,
    Shape,
    cheapest,
    full_cost,
    possible_modes,
)
from pallas_kernels.page_layout import PAGE_WORD_MULTIPLE, KvLayout, LatentLayout
from pallas_kernels.paged_attention import paged_attention

BATCH, DEVICES = 64, (1, 8)
PAGE_WORDS = 16384
COMPILERS = 14
SPREAD_BYTES = 512 << 20
"""Calls take turns with pages of at least so many bytes, so that the L2 cache helps no one."""
DISPATCH_CALLS, NEW_LENGTHS = 20, 3


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
    batch: int = BATCH

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

    @property
    def up_shape(self) -> tuple[int, int, int]:
        """Of the projections of keys and of values."""
        return self.kv_heads, self.model.head_dim, self.model.rank

    def projections(self) -> UpProjections:
        """Random, of a scale that keeps scores alive."""
        shape = self.up_shape
        keys = jax.random.split(jax.random.key(1), 2)
        scale = jnp.bfloat16(self.model.rank**-0.5)
        return UpProjections(*(jax.random.normal(key, shape, jnp.bfloat16) * scale for key in keys))

    def queries(self) -> jax.Array:
        """One a sequence."""
        shape = (self.batch, 1, self.heads, self.model.head_dim)
        return jax.random.normal(jax.random.key(2), shape, jnp.bfloat16)

    def blocks(self, layout: LatentLayout | KvLayout) -> int:
        """Pages of a sequence."""
        return -(-self.context // layout.tokens_per_page)

    def turns(self, layout: LatentLayout | KvLayout) -> int:
        """Sets of pages that calls take turns with."""
        need = 4 * layout.page_words * self.batch * self.blocks(layout)
        return max(1, min(4, -(-SPREAD_BYTES // need)))

    def shapes(self, layout: LatentLayout | KvLayout) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the pool and of the page tables of a turn."""
        blocks = self.blocks(layout)
        pages = 1 + self.turns(layout) * self.batch * blocks
        return (
            jax.ShapeDtypeStruct((pages, layout.page_words), jnp.uint32),
            jax.ShapeDtypeStruct((self.batch, blocks), jnp.int32),
        )

    def operands(self, layout: LatentLayout | KvLayout) -> tuple[jax.Array, list[jax.Array]]:
        """The pool, and the page tables of every turn, all pages apart and in random order."""
        blocks, turns = self.blocks(layout), self.turns(layout)
        random = np.random.default_rng(0)
        count = turns * self.batch * blocks
        ids = 1 + random.permutation(count).reshape(turns, self.batch, blocks)
        pool = random_pool(jax.random.key(0), 1 + count, layout.page_words)
        return pool, [jnp.asarray(table, jnp.int32) for table in ids]


def projection_shapes(case: Case) -> UpProjections:
    """The projections as shapes."""
    shape = jax.ShapeDtypeStruct(case.up_shape, jnp.bfloat16)
    return UpProjections(shape, shape)


@dataclass(frozen=True)
class Programs:
    """The compiled programs of a case, by mode; ``full`` last."""

    case: Case
    shape: Shape
    compiled: dict[str, Any]

    @classmethod
    def compile(cls, case: Case, threads: ThreadPoolExecutor) -> "Programs":
        """Starts compiling: the programs are futures."""
        layout, model, full = case.latent_layout, case.model, case.full_layout
        positions = jnp.full((BATCH, 1), case.context - 1, jnp.int32)
        options = {"scale": model.head_dim**-0.5}
        q, up = case.queries(), case.projections()
        blocks = case.blocks(layout)
        shape = decode_shape(up, layout, model.rotation, case.heads, BATCH, blocks)

        def latent(mode: Any) -> Any:
            def attend(q: Any, pool: Any, pages: Any, up: Any) -> Any:
                chosen = {"layout": layout, "rotation": model.rotation, "mode": mode} | options
                return latent_attention(q, pool, pages, positions, up, **chosen)

            return jax.jit(attend).lower(q, *case.shapes(layout), up).compile()

        def whole() -> Any:
            def attend(q: Any, pool: Any, pages: Any, up: Any) -> Any:
                del up
                return paged_attention(q, pool, pages, positions, layout=full, **options)

            return jax.jit(attend).lower(q, *case.shapes(full), up).compile()

        compiled = {mode: threads.submit(latent, mode) for mode in possible_modes(shape)}
        return cls(case, shape, compiled | {"full": threads.submit(whole)})

    def measure(self) -> Iterator[Record]:
        """Times every program."""
        case, shape = self.case, self.shape
        q, up, chosen, first = case.queries(), case.projections(), cheapest(shape), None
        for mode, future in self.compiled.items():
            program = future.result()
            if mode in ("rebuild", "full"):
                pool = tables = None  # the last one goes first
                pool, tables = case.operands(
                    case.full_layout if mode == "full" else case.latent_layout
                )
            difference = 0.0
            if mode != "full":
                out = program(q, pool, tables[0], up).astype(jnp.float32)
                first = out if first is None else first
                difference = float(jnp.linalg.norm(out - first) / jnp.linalg.norm(first))

            def call(turn: int, program=program, pool=pool, tables=tables) -> jax.Array:
                return program(q, pool, tables[turn % len(tables)], up)

            calls = 24 if case.context < 4096 else 6
            time, memory = device_time(call, calls=calls, keep=False), program.memory_analysis()
            cost = full_cost(shape) if mode == "full" else COSTS[mode](shape)
            yield Record(
                model=case.name,
                tp=case.devices,
                batch=BATCH,
                context=case.context,
                mode=mode,
                chosen=mode == chosen,
                us=round(time.median, 1),
                spread_us=round(time.spread, 1),
                counted_us=round(cost.microseconds, 1),
                cache_bytes=shape.full_bytes if mode == "full" else shape.latent_bytes,
                temporary_bytes=memory.temp_size_in_bytes if memory else 0,
                difference=float(f"{difference:.2e}"),
            )
            del call


def dispatch_times(batch: int, context: int, layers: int) -> dict[str, Any]:
    """Wall microseconds a layer of a step at one device's share of eight of LLaMA-3-70B's layers.

    ``fixed`` is one compiled program of many layers, and ``op_by_op`` the same without jit.
    ``new_length`` is a step that is as long as its longest text and compiled for that length, met
    for the first time; ``first_compile`` is what ``fixed`` costs once.
    """
    case = Case("llama-3-70b", 8, context, batch)
    layout, model, up, q = case.latent_layout, case.model, case.projections(), case.queries()
    pool, tables = case.operands(layout)
    positions = jnp.full((batch, 1), context - 1, jnp.int32)
    options = {"layout": layout, "scale": model.head_dim**-0.5, "rotation": model.rotation}

    def step(
        q: jax.Array, pool: jax.Array, pages: jax.Array, positions: jax.Array, up: UpProjections
    ) -> jax.Array:
        for _ in range(layers):
            q = q + latent_attention(q, pool, pages, positions, up, **options)
        return q

    def timed(call: Callable[..., jax.Array], pages: jax.Array, positions: jax.Array) -> float:
        began = time.perf_counter()
        call(q, pool, pages, positions, up).block_until_ready()
        return (time.perf_counter() - began) * 1e6 / layers

    shape = decode_shape(up, layout, model.rotation, case.heads, batch, case.blocks(layout))
    found: dict[str, Any] = {"batch": batch, "context": context, "layers": layers}
    found["mode"] = cheapest(shape)
    fixed = jax.jit(step)
    series = {"first_compile": [timed(fixed, tables[0], positions)]}
    for name, call in {"fixed": fixed, "op_by_op": step}.items():
        for _ in range(3):
            timed(call, tables[0], positions)
        turns = [tables[turn % len(tables)] for turn in range(DISPATCH_CALLS)]
        series[name] = [timed(call, pages, positions) for pages in turns]
    series["new_length"] = []
    for blocks in range(case.blocks(layout) - NEW_LENGTHS, case.blocks(layout)):
        last = jnp.full_like(positions, blocks * layout.tokens_per_page - 1)
        series["new_length"].append(timed(fixed, tables[0][:, :blocks], last))
    for name, times in series.items():
        found[f"{name}_us"] = round(float(np.median(times)), 1)
        found[f"{name}_spread_us"] = round(float(np.ptp(np.percentile(times, [10, 90]))), 1)
    return found


def dispatch_record(batch: int, context: int, layers: int) -> dict[str, dict[str, Any]]:
    """:func:`dispatch_times` in a process of its own: on a GPU with command buffers and without."""
    found = {}
    kinds = {"default": ""}
    if jax.default_backend() == "gpu":
        kinds["no_command_buffers"] = "--xla_gpu_enable_command_buffer="
    for name, flag in kinds.items():
        flags = " ".join([os.environ.get("XLA_FLAGS", ""), flag]).strip()
        environment = os.environ | {"XLA_FLAGS": flags}
        call = f"b.dispatch_times({batch}, {context}, {layers})"
        code = f"import json, _latent_benchmark as b; print(json.dumps({call}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=os.path.dirname(__file__),
            env=environment | {"PYTHONPATH": os.pathsep.join([p or os.getcwd() for p in sys.path])},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(contexts: list[int], report: Callable[[dict], None]) -> None:
    """Measures everything, once all is compiled; reports each record as it is made."""
    cases = [Case(name, tp, tokens) for tokens in contexts for name in MODELS for tp in DEVICES]
    with ThreadPoolExecutor(COMPILERS) as threads:
        programs = [Programs.compile(case, threads) for case in cases]
    for program in programs:
        for record in program.measure():
            report(asdict(record))
