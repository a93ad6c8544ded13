"""Times paged attention and the pool writes on a GPU: ``python -m`` this module.

A time is that of the device: each program holds several calls on different queries, many programs
are enqueued before one wait, and a call is the median over repeats. Keys and values are far larger
than the L2 cache, and lie in random pages of a pool above 4 GiB, as they do in use.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.page_write import write_kv, write_pages
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention as reference_attention

IMPLEMENTATIONS: tuple[Implementation, ...] = ("pallas", "xla")
PAGE_WORDS = 16384
POOL_PAGES = 80_000
ROUNDS = 8
ENQUEUED = 6
REPEATS = 5
COMPILERS = 12


@dataclass(frozen=True)
class Shape:
    """Attention of one model's layer."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    scale: float | None = None

    @property
    def layout(self) -> KvLayout:
        """Layout of 64 KiB bfloat16 pages."""
        return KvLayout(self.kv_heads, self.head_dim, "bfloat16", PAGE_WORDS)

    @property
    def options(self) -> dict:
        """Keyword arguments of the operation."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"layout": self.layout, "scale": scale, "window": self.window}


SHAPES = {
    "qwen1.5-moe": Shape(16, 16, 128),
    "mixtral-8x7b": Shape(32, 8, 128),
    "gemma-4 sliding": Shape(16, 8, 256, window=1024, scale=1.0),
    "gemma-4 full": Shape(16, 2, 512, scale=1.0),
    "llama-70b": Shape(64, 8, 128),
    "demo": Shape(9, 3, 64),
}
DECODE_CASES = ((16, 8192), (1, 8192), (64, 1024))
"""(sequences, tokens of context)."""
PREFILL_CASES = ((1, 512), (1, 8192), (8, 2048))
CHUNK = 512


@jax.jit
def random_pool(key: jax.Array) -> jax.Array:
    """A pool of bfloat16 normals, ``[POOL_PAGES, PAGE_WORDS]``."""

    def page(key):
        halves = jax.random.normal(key, (PAGE_WORDS, 2), jnp.bfloat16)
        return lax.bitcast_convert_type(halves, jnp.uint32)

    return lax.map(page, jax.random.split(key, POOL_PAGES), batch_size=1000)


@dataclass(frozen=True)
class Time:
    """Microseconds a call."""

    median: float
    spread: float


def measure(call: Callable[[], object], calls: int) -> Time:
    """Times a program that makes ``calls`` calls."""
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        results = [call() for _ in range(ENQUEUED)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / (ENQUEUED * calls) * 1e6)
    return Time(statistics.median(times), max(times) - min(times))


def copy_bandwidth(pool: jax.Array) -> float:
    """Bytes read and written a second when half the pool is copied, in TB/s."""
    half = pool[: POOL_PAGES // 2]
    copy = jax.jit(jnp.copy).lower(half).compile()
    return 2 * half.nbytes / measure(lambda: copy(half), 1).median / 1e6


def operands(shape: Shape, sequences: int, context: int, chunk: int) -> tuple:
    """Queries of all rounds, pages and positions of sequences that end at ``context``."""
    random = np.random.default_rng(0)
    blocks = context // shape.layout.tokens_per_page
    pages = 1 + random.permutation(POOL_PAGES - 1)[: sequences * blocks]
    positions = np.arange(context - chunk, context, dtype=np.int32)
    dims = (ROUNDS, sequences, chunk, shape.heads, shape.head_dim)
    q = jax.random.normal(jax.random.key(1), dims, jnp.bfloat16)
    return (
        q,
        jnp.asarray(pages.reshape(sequences, blocks), jnp.int32),
        jnp.asarray(np.tile(positions, (sequences, 1))),
    )


def compile_rounds(function: Callable, pool: jax.Array, args: tuple, rounds: int):
    """A program of ``rounds`` calls ``function(q, pool, pages, positions)``."""

    def program(q, pool, pages, positions):
        return [function(q[i], pool, pages, positions) for i in range(rounds)]

    return jax.jit(program).lower(args[0], pool, *args[1:]).compile()


def relative_error(shape: Shape, pool: jax.Array, args: tuple) -> float:
    """Error of the kernel on one sequence, against float32 products of full precision."""
    q, pages, positions = args
    q, pages, positions = q[0, :1], pages[:1], positions[:1]
    ours = paged_attention(q, pool, pages, positions, **shape.options)
    options = (shape.layout, shape.options["scale"], shape.window, None)
    with jax.default_matmul_precision("highest"):
        wide = q.astype(jnp.float32)
        exact = jax.jit(reference_attention, static_argnums=(4, 5, 6, 7))(
            wide, pool, pages, positions, *options
        )
    difference = ours.astype(jnp.float32) - exact
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact))


@dataclass(frozen=True)
class Case:
    """Sequences of one length, with one query each or a chunk of them."""

    model: str
    sequences: int
    context: int
    chunk: int


def compile_case(case: Case, pool: jax.Array) -> tuple[tuple, list]:
    """The operands of a case, and its programs: the kernel in rounds, and XLA once."""
    shape = SHAPES[case.model]
    args = operands(shape, case.sequences, case.context, case.chunk)
    programs = []
    for implementation, rounds in zip(IMPLEMENTATIONS, (ROUNDS, 1), strict=True):

        def call(q, pool, pages, positions, implementation: Implementation = implementation):
            return paged_attention(
                q, pool, pages, positions, implementation=implementation, **shape.options
            )

        programs.append(compile_rounds(call, pool, args, rounds))
    return args, programs


def attention_record(case: Case, pool: jax.Array, args: tuple, programs: list, copy: float) -> dict:
    """Times a case, with the kernel and with XLA."""
    shape, chunk, context = SHAPES[case.model], case.chunk, case.context
    ours, xla = (
        measure(lambda p=program: p(args[0], pool, *args[1:]), rounds)
        for program, rounds in zip(programs, (ROUNDS, 1), strict=True)
    )
    seen = min(context, shape.window + chunk - 1) if shape.window else context
    size = 4 * case.sequences * seen * shape.layout.words_per_token
    pairs = sum(min(i + 1, shape.window or context) for i in range(context - chunk, context))
    operations = 4 * case.sequences * pairs * shape.heads * shape.head_dim
    rate = size / ours.median / 1e6
    return {
        "op": "paged_attention decode" if chunk == 1 else "paged_attention prefill",
        "model": case.model,
        "sequences": case.sequences,
        "context": context,
        "queries": chunk,
        "ours_us": round(ours.median, 2),
        "ours_spread_us": round(ours.spread, 2),
        "xla_us": round(xla.median, 2),
        "ratio": round(xla.median / ours.median, 2),
        "tbytes_per_s": round(rate, 3),
        "fraction_of_copy": round(rate / copy, 3),
        "tflop_per_s": round(operations / ours.median / 1e6, 1),
        "rel_err": float(f"{relative_error(shape, pool, args):.2e}"),
    }


def write_records(pool: jax.Array) -> tuple[list[dict], jax.Array]:
    """Times the writes of both implementations, in place; returns the pool, rewritten."""
    random, records = np.random.default_rng(0), []
    ids = jnp.asarray(1 + random.permutation(POOL_PAGES - 1)[:512], jnp.int32)
    cases: list[tuple[str, str, int, Callable, tuple]] = []
    for name, shape in SHAPES.items():
        for rows in (16, CHUNK):
            k = jax.random.normal(
                jax.random.key(2), (rows, shape.kv_heads, shape.head_dim), jnp.bfloat16
            )
            offsets = jnp.asarray(random.integers(0, shape.layout.tokens_per_page, rows), jnp.int32)

            def kv(pool, k, ids, offsets, implementation, layout=shape.layout):
                return write_kv(
                    pool, k, k, ids, offsets, layout=layout, implementation=implementation
                )

            cases.append(("write_kv", name, rows, kv, (k, ids[:rows], offsets)))

    def pages(pool, ids, images, implementation):
        return write_pages(pool, ids, images, implementation=implementation)

    for count in (16, 256):
        cases.append(("write_pages", "", count, pages, (ids[:count], jnp.copy(pool[:count]))))
    for op, name, rows, write, arrays in cases:
        record = {"op": op, "model": name, "rows": rows}
        for implementation in IMPLEMENTATIONS:

            def program(
                pool, *arrays, write=write, implementation: Implementation = implementation
            ):
                for _ in range(ROUNDS):
                    pool = write(pool, *arrays, implementation)
                return pool

            compiled = jax.jit(program, donate_argnums=0).lower(pool, *arrays).compile()
            pool = jax.block_until_ready(compiled(pool, *arrays))
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                for _ in range(ENQUEUED):
                    pool = compiled(pool, *arrays)
                jax.block_until_ready(pool)
                times.append((time.perf_counter() - start) / (ENQUEUED * ROUNDS) * 1e6)
            memory = compiled.memory_analysis()
            record[f"{implementation}_us"] = round(statistics.median(times), 2)
            record[f"{implementation}_temp_bytes"] = memory.temp_size_in_bytes if memory else None
        records.append(record)
    return records, pool


def run(models: tuple[str, ...] = tuple(SHAPES)) -> dict:
    """All records, with the copy bandwidth of the same run."""
    pool = random_pool(jax.random.key(0))
    copy = copy_bandwidth(pool)
    cases = [
        Case(model, *size, chunk)
        for model in models
        for sizes, chunk in ((DECODE_CASES, 1), (PREFILL_CASES, CHUNK))
        for size in sizes
    ]
    with ThreadPoolExecutor(COMPILERS) as threads:
        compiled = list(threads.map(lambda case: compile_case(case, pool), cases))
    records = []
    for case, (args, programs) in zip(cases, compiled, strict=True):
        records.append(attention_record(case, pool, args, programs, copy))
        print(json.dumps(records[-1]), flush=True)
    writes, _ = write_records(pool)
    for record in writes:
        print(json.dumps(record), flush=True)
    return {
        "command": "python -m pallas_kernels.paged_attention.benchmark --json PATH",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "page_bytes": 4 * PAGE_WORDS,
        "pool_bytes": 4 * PAGE_WORDS * POOL_PAGES,
        "copy_tbytes_per_s": round(copy, 3),
        "records": records + writes,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    result = run()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
