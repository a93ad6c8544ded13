"""Device times of the expert products against bfloat16 ``einsum`` at the same shapes."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.bitplane_matmul import activations, tuning
from pallas_kernels.bitplane_matmul.warp_matmul import Units
from pallas_kernels.page_layout import MatrixLayout
from pallas_kernels.paged_expert_ffn.grouped_matmul import UNIT_ROWS
from pallas_kernels.paged_expert_ffn.large import large_product
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import small_product
from pallas_kernels.paged_expert_ffn.reference import dequantize_expert
from pallas_kernels.paged_expert_ffn.routing import Routing, make_units, route, unit_places
from pallas_kernels.random_experts import (
    SHAPES,
    Shape,
    pages_needed,
    random_pages,
    random_pool,
    set_scales,
)

ROWS = (1, 2, 4, 8, 16, 64, 512)
FEWER_ROWS = (1, 4, 16, 512)
WIDTHS = (3, 4, 5, 6, 7, 8)
MODULES = ("gate_up", "down")
LEAST_BYTES = 250_000_000
"""Weights read in turn, several times the 60 MB of second-level cache."""


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        op: What was measured.
        model: Whose shape.
        module: gate_up (with its SiLU) or down.
        bits: Width, or "mixed" for experts of all widths in turn.
        rows: Tokens of each expert; every expert has as many.
        ours_us: Device time of all kernels of the product, preparing activations included.
        kernel_us: Of these, the kernels that read weights.
        spread_us: Largest less smallest of the timed calls.
        bf16_us: Device time of the bfloat16 product, without an activation.
        ratio: bf16_us / ours_us.
        tbytes_per_s: Plane bytes over kernel_us.
        max_rel_err: Relative error against float64 of one expert's outputs in 256 columns.
    """

    op: str
    model: str
    module: str
    bits: int | str
    rows: int
    ours_us: float
    kernel_us: float
    spread_us: float
    bf16_us: float
    ratio: float
    tbytes_per_s: float
    max_rel_err: float


class Work(NamedTuple):
    """Sorted choices and their work lists, which both modules of a layer share."""

    routing: Routing
    units: Units
    used: Units


def make_work(ids: jax.Array, experts: int) -> Work:
    """Work of tokens that choose one expert each."""
    routing = route(ids[:, None], experts)
    tokens = ids.shape[0] / experts
    capacity = UNIT_ROWS
    if not tuning.is_large(tokens):
        capacity = activations.TOKENS_PER_BLOCK * tuning.token_blocks(tokens)
    return Work(routing, make_units(routing, capacity), make_units(routing, ids.shape[0]))


def product(
    x: jax.Array,
    work: Work,
    pool: jax.Array,
    module: ModulePages,
    *,
    layout: MatrixLayout,
    gate: Activation | None,
) -> jax.Array:
    """One module's product of x [A, K] with its experts, in the order of places."""
    places = x.shape[0]
    tokens = places / module.bits.shape[0]
    token = work.routing.token
    if tuning.is_large(tokens):
        gathered = x[token[unit_places(work.units, UNIT_ROWS, places)]]
        return large_product(gathered, work.units, work.used, pool, module, layout, gate)
    blocks = tuning.token_blocks(tokens)
    return small_product(x, token, work.units, blocks, pool, module, layout, gate).sum(axis=0)


def bf16_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """What we compare with: [E, M, K] by [E, N, K]."""
    return jnp.einsum("emk,enk->emn", x, weights, preferred_element_type=jnp.float32)


def device_times(call: Callable[[], Any], count: int) -> list[list[tuple[str, float]]]:
    """Name and microseconds of each kernel in each of ``count`` calls."""
    _, timings = profiler.measure(call, aggregate=False, iterations=count)()
    if timings is None:
        raise RuntimeError("the profiler saw no kernel")
    return [[(name, 1000 * time) for name, time in one] for one in timings]


def reads_weights(name: str) -> bool:
    """Whether a kernel's name is one of those that read weights."""
    return "bitplane" in name or "anonymous_mosaic" in name or "grouped" in name


LOWERING = Lock()
"""Mosaic GPU builds programs with global state; only compiling them may run in parallel."""


class Case:
    """One matrix shape with its pool, compiled for every number of rows."""

    def __init__(self, shape: Shape, module: str):
        self.shape, self.module = shape, module
        self.layout = shape.layout(module)
        self.gate: Activation | None = "silu" if module == "gate_up" else None
        self.rows = ROWS if shape.model.startswith("Mixtral") else FEWER_ROWS
        widest = (max(WIDTHS),) * shape.experts
        smallest = shape.experts * self.layout.rows * self.layout.columns * min(WIDTHS) // 8
        self.sets = -(-LEAST_BYTES // smallest)
        self.pool_pages = 1 + self.sets * pages_needed(self.layout, widest)
        self.compiled: dict[int, Any] = {}

    def x(self, rows: int) -> jax.Array:
        """Activations with an outlier channel, [E * rows, K]."""
        count = (self.shape.experts * rows, self.layout.columns)
        x = jax.random.normal(jax.random.key(rows), count, jnp.float32)
        return x.at[:, 7].multiply(50).astype(jnp.bfloat16)

    def work(self, rows: int) -> Work:
        """Every expert has the same number of rows, in turn."""
        ids = jnp.tile(jnp.arange(self.shape.experts, dtype=jnp.int32), rows)
        return jax.jit(make_work, static_argnums=1)(ids, self.shape.experts)

    def compile(self, rows: int) -> None:
        """Compiles the product for one number of rows."""
        sizes = (
            (self.shape.experts,),
            (self.shape.experts, self.layout.parent_bits, self.layout.plane_pages),
            (self.shape.experts, self.layout.most_table_pages),
        )
        arrays: list[Any] = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
        pages = ModulePages(*arrays)
        pool = jax.ShapeDtypeStruct((self.pool_pages, self.layout.page_words), jnp.uint32)
        function = jax.jit(partial(product, layout=self.layout, gate=self.gate))
        with LOWERING:
            lowered = function.lower(self.x(rows), self.work(rows), pool, pages)
        self.compiled[rows] = lowered.compile()

    def bits(self, width: int | str) -> tuple[int, ...]:
        """Width of each expert."""
        if width == "mixed":
            return tuple(WIDTHS[i % len(WIDTHS)] for i in range(self.shape.experts))
        return (int(width),) * self.shape.experts

    def records(self) -> Iterator[Record]:
        """Measures everything."""
        references = dict(zip(self.rows, map(self.measure_bf16, self.rows), strict=True))
        pool = random_pool(1, self.pool_pages, self.layout.page_words)
        for width in (*WIDTHS, "mixed"):
            bits = self.bits(width)
            share = (self.pool_pages - 1) // self.sets
            modules = []
            for index in range(self.sets):
                first = 1 + index * share
                module = random_pages(self.layout, bits, first + share, first, index)
                pool = set_scales(pool, module, index, self.layout)
                modules.append(module)
            for rows in self.rows:
                yield self.measure(width, rows, pool, modules, references[rows])

    def measure_bf16(self, rows: int) -> float:
        """Median device time of the bfloat16 product."""
        sizes = (self.shape.experts, self.layout.rows, self.layout.columns)
        weights = jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16)
        x = self.x(rows).reshape(self.shape.experts, rows, self.layout.columns)
        call = partial(jax.jit(bf16_product), x, weights)
        times = [sum(time for _, time in one) for one in device_times(call, 7)]
        return statistics.median(times)

    def measure(
        self,
        width: int | str,
        rows: int,
        pool: jax.Array,
        modules: list[ModulePages],
        bf16_us: float,
    ) -> Record:
        """Times one product and compares one expert's share with float64."""
        x, work = self.x(rows), self.work(rows)
        turn = itertools.cycle(modules)
        times = device_times(lambda: self.compiled[rows](x, work, pool, next(turn)), 9)
        totals = [sum(time for _, time in one) for one in times]
        kernels = [sum(time for name, time in one if reads_weights(name)) for one in times]
        ours, kernel = statistics.median(totals), statistics.median(kernels)
        weights = self.layout.rows * self.layout.columns
        plane_bytes = sum(self.bits(width)) * weights / 8
        return Record(
            op="paged_expert_product",
            model=self.shape.model,
            module=self.module,
            bits=width,
            rows=rows,
            ours_us=round(ours, 2),
            kernel_us=round(kernel, 2),
            spread_us=round(max(totals) - min(totals), 2),
            bf16_us=round(bf16_us, 2),
            ratio=round(bf16_us / ours, 3),
            tbytes_per_s=round(plane_bytes / kernel / 1e6, 3),
            max_rel_err=self.error(rows, x, pool, modules[0]),
        )

    def error(self, rows: int, x: jax.Array, pool: jax.Array, module: ModulePages) -> float:
        """Largest relative error of three experts' outputs in 256 columns."""
        out = self.compiled[rows](x, self.work(rows), pool, module)
        out = out.reshape(-1, out.shape[-1])
        columns = np.sort(np.random.default_rng(rows).permutation(out.shape[1])[:256])
        dequantize = jax.jit(dequantize_expert, static_argnums=3)
        errors = []
        for expert in (0, self.shape.experts // 2, self.shape.experts - 1):
            weight = dequantize(pool, module, jnp.int32(expert), self.layout)
            own = np.asarray(x[expert :: self.shape.experts], np.float64)
            expected = own @ np.asarray(weight[columns], np.float64).T
            if self.gate is not None:
                up = np.asarray(weight[columns + out.shape[1]], np.float64)
                expected = expected / (1 + np.exp(-expected)) * (own @ up.T)
            found = np.asarray(out[expert * rows : (expert + 1) * rows, columns], np.float64)
            errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        return float(f"{max(errors):.3g}")


def run(models: list[str], report: Callable[[Record], None]) -> None:
    """Measures the named models' shapes; compiles in threads ahead."""
    shapes = [shape for shape in SHAPES if not models or shape.model in models]
    cases = [Case(shape, module) for shape in shapes for module in MODULES]
    with ThreadPoolExecutor(12) as threads:
        jobs = {case: [threads.submit(case.compile, rows) for rows in case.rows] for case in cases}
    for case in cases:
        for job in jobs[case]:
            job.result()
        for record in case.records():
            report(record)
        case.compiled.clear()
