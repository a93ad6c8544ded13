"""Times paged attention and the pool writes on a GPU: ``python -m`` this module.

Times are those of the device: the durations of all kernels of a call, out of the profiler, without
the gaps between them. Keys and values lie in random pages of a pool above 4 GiB, as they do in use,
and calls take turns with different pages, so that the L2 cache helps no one.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.device_time import Time, device_time
from pallas_kernels.implementation import Implementation
from pallas_kernels.page_layout import KvLayout
from pallas_kernels.page_write import write_kv, write_pages
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention as reference_attention

COMMAND = (
    "python -m pallas_kernels.paged_attention.benchmark --json docs/results/h200/attention.json"
)
IMPLEMENTATIONS: tuple[Implementation, ...] = ("pallas", "xla")
PAGE_WORDS = 16384
POOL_PAGES = 80_000
TURNS = 8
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
PREFILL_CASES = ((1, 8192), (1, 512), (8, 2048))
"""The first case of either list is compared with XLA and checked against float32."""
CHUNK = 512


@jax.jit
def random_pool(key: jax.Array) -> jax.Array:
    """A pool of bfloat16 normals, ``[POOL_PAGES, PAGE_WORDS]``."""

    def page(key):
        halves = jax.random.normal(key, (PAGE_WORDS, 2), jnp.bfloat16)
        return lax.bitcast_convert_type(halves, jnp.uint32)

    return lax.map(page, jax.random.split(key, POOL_PAGES), batch_size=1000)


def copy_bandwidth(pool: jax.Array) -> float:
    """Bytes read and written a second when half the pool is copied, in TB/s."""
    half = pool[: POOL_PAGES // 2]
    copy = jax.jit(jnp.copy).lower(half).compile()
    return 2 * half.nbytes / device_time(lambda _: copy(half), keep=False).median / 1e6


@dataclass(frozen=True)
class Case:
    """Sequences of one length, with one query each or a chunk of them."""

    model: str
    sequences: int
    context: int
    chunk: int
    compared: bool

    def operands(self) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        """Queries, the pages of every turn, and positions of sequences that end at the context."""
        random, shape = np.random.default_rng(0), SHAPES[self.model]
        blocks = self.context // shape.layout.tokens_per_page
        dims = (self.sequences, self.chunk, shape.heads, shape.head_dim)
        pages = [
            1 + random.permutation(POOL_PAGES - 1)[: self.sequences * blocks] for _ in range(TURNS)
        ]
        positions = np.arange(self.context - self.chunk, self.context, dtype=np.int32)
        return (
            jax.random.normal(jax.random.key(1), dims, jnp.bfloat16),
            [jnp.asarray(ids.reshape(self.sequences, blocks), jnp.int32) for ids in pages],
            jnp.asarray(np.tile(positions, (self.sequences, 1))),
        )

    def bytes_and_operations(self) -> tuple[int, int]:
        """Bytes of the keys and values that any query sees; multiplications and additions."""
        shape, context = SHAPES[self.model], self.context
        seen = min(context, shape.window + self.chunk - 1) if shape.window else context
        window, first = shape.window or context, context - self.chunk
        pairs = sum(min(position + 1, window) for position in range(first, context))
        size = 4 * self.sequences * seen * shape.layout.words_per_token
        return size, 4 * self.sequences * pairs * shape.heads * shape.head_dim


class Programs:
    """The compiled programs of a case, and the kernel's error where it is compared."""

    def __init__(self, case: Case, pool: jax.Array):
        """Compiles; safe to run in threads."""
        self.case, self.pool, self.args = case, pool, case.operands()
        options = SHAPES[case.model].options
        self.programs = [
            self.compile(partial(paged_attention, implementation=implementation, **options))
            for implementation in (IMPLEMENTATIONS if case.compared else ("pallas",))
        ]
        self.error = self.relative_error() if case.compared else None

    def compile(self, function):
        """Compiles ``function(q, pool, pages, positions)``."""
        q, pages, positions = self.args
        return jax.jit(function).lower(q, self.pool, pages[0], positions).compile()

    def time(self, program) -> Time:
        """Times one of the programs."""
        q, pages, positions = self.args
        return device_time(lambda turn: program(q, self.pool, pages[turn % TURNS], positions))

    def relative_error(self) -> float:
        """Error of the kernel on one sequence, against float32 products of full precision."""
        q, pages, positions = self.args
        shape, operands = SHAPES[self.case.model], (self.pool, pages[0][:1], positions[:1])
        ours = paged_attention(q[:1], *operands, **shape.options, implementation="pallas")
        options = (shape.layout, shape.options["scale"], shape.window, None)
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(reference_attention, static_argnums=(4, 5, 6, 7))(
                q[:1].astype(jnp.float32), *operands, *options
            )
        difference = ours.astype(jnp.float32) - exact
        return float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact))

    def record(self, copy: float) -> dict:
        """Times the case; ``copy`` is the copy bandwidth in TB/s."""
        ours, *xla = (self.time(program) for program in self.programs)
        size, operations = self.case.bytes_and_operations()
        rate = size / ours.median / 1e6
        record = {
            "op": "paged_attention decode" if self.case.chunk == 1 else "paged_attention prefill",
            "model": self.case.model,
            "sequences": self.case.sequences,
            "context": self.case.context,
            "queries": self.case.chunk,
            "ours_us": round(ours.median, 2),
            "ours_spread_us": round(ours.spread, 2),
            "tbytes_per_s": round(rate, 3),
            "fraction_of_copy": round(rate / copy, 3),
            "tflop_per_s": round(operations / ours.median / 1e6, 1),
        }
        if xla:
            record["xla_us"] = round(xla[0].median, 2)
            record["ratio"] = round(xla[0].median / ours.median, 2)
            record["rel_err"] = float(f"{self.error:.2e}")
        return record


@dataclass(frozen=True)
class Write:
    """A pool write: keys and values of ``rows`` tokens of a model, or ``rows`` pages."""

    model: str | None
    rows: int

    def function(self, implementation: Implementation):
        """``function(pool, *operands)``."""
        if self.model is None:
            return partial(write_pages, implementation=implementation)
        layout = SHAPES[self.model].layout
        return partial(write_kv, layout=layout, implementation=implementation)

    def operands(self, pool: jax.Array) -> tuple[jax.Array, ...]:
        """Random operands; the ids are all different."""
        random = np.random.default_rng(0)
        ids = jnp.asarray(1 + random.permutation(POOL_PAGES - 1)[: self.rows], jnp.int32)
        if self.model is None:
            return ids, jnp.copy(pool[: self.rows])
        shape = SHAPES[self.model]
        dims = (self.rows, shape.kv_heads, shape.head_dim)
        k = jax.random.normal(jax.random.key(2), dims, jnp.bfloat16)
        offsets = random.integers(0, shape.layout.tokens_per_page, self.rows)
        return k, -k, ids, jnp.asarray(offsets, jnp.int32)


def write_records(pool: jax.Array) -> list[dict]:
    """Times the writes of both implementations, in place; uses the pool up."""
    writes = [Write(model, rows) for model in SHAPES for rows in (16, CHUNK)]
    writes += [Write(None, rows) for rows in (16, 256)]
    operands = [write.operands(pool) for write in writes]
    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)

    def build(job):
        (write, arrays), implementation = job
        function = jax.jit(write.function(implementation), donate_argnums=0)
        return function.lower(shape, *arrays).compile()

    jobs = [(job, i) for job in zip(writes, operands, strict=True) for i in IMPLEMENTATIONS]
    with ThreadPoolExecutor(COMPILERS) as threads:
        programs = list(threads.map(build, jobs))
    state, records = [pool], []
    del pool
    for ((write, arrays), implementation), program in zip(jobs, programs, strict=True):

        def call(_, program=program, arrays=arrays):
            state[0] = program(state[0], *arrays)
            return state[0]

        if implementation == IMPLEMENTATIONS[0]:
            op = "write_kv" if write.model else "write_pages"
            records.append({"op": op, "model": write.model, "rows": write.rows})
        time, memory = device_time(call, keep=False), program.memory_analysis()
        records[-1][f"{implementation}_us"] = round(time.median, 2)
        records[-1][f"{implementation}_spread_us"] = round(time.spread, 2)
        records[-1][f"{implementation}_temp_bytes"] = memory.temp_size_in_bytes if memory else None
    return records


def run(models: tuple[str, ...] = tuple(SHAPES)) -> dict:
    """All records, with the copy bandwidth of the same run."""
    pool = random_pool(jax.random.key(0))
    copy = copy_bandwidth(pool)
    cases = [
        Case(model, *size, chunk, compared=size == sizes[0])
        for model in models
        for sizes, chunk in ((DECODE_CASES, 1), (PREFILL_CASES, CHUNK))
        for size in sizes
    ]
    with ThreadPoolExecutor(COMPILERS) as threads:
        programs = list(threads.map(lambda case: Programs(case, pool), cases))
    records = [program.record(copy) for program in programs]
    del programs
    return {
        "command": COMMAND,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "page_bytes": 4 * PAGE_WORDS,
        "pool_bytes": pool.nbytes,
        "copy_tbytes_per_s": round(copy, 3),
        "records": records + write_records(pool),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    result = run()
    lines = [json.dumps(record) for record in result.pop("records")]
    head = json.dumps(result, indent=1)[:-2]
    text = head + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


if __name__ == "__main__":
    main()
