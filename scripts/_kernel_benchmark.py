"""Device times of the expert products against bfloat16 ``einsum`` at the same shapes.

Compiling takes far longer than measuring, so processes compile side by side. Then they take turns:
each fills the GPU's memory, measures, and ends.
"""

import itertools
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_matmul import tuning
from pallas_kernels.device_time import call_times
from pallas_kernels.paged_expert_ffn.pages import Activation, ModulePages
from pallas_kernels.paged_expert_ffn.product import product
from pallas_kernels.paged_expert_ffn.reference import dequantize_expert
from pallas_kernels.paged_expert_ffn.routing import make_units, route, unit_places
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
CALLS = 7
LEAST_BYTES = 250_000_000
"""Weights read in turn, several times the 60 MB of second-level cache."""
PROCESSES = 15


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        op: What was measured.
        model: Whose shape.
        module: gate_up (with its SiLU) or down.
        bits: Width, or "mixed" for experts of all widths in turn.
        rows: Tokens of each expert; every expert has as many.
        ours_us: Device time of all kernels of the product, preparing activations included; sorting
            tokens by expert, which a layer does once, is not.
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


def bf16_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """What we compare with: [E, M, K] by [E, N, K]."""
    return jnp.einsum("emk,enk->emn", x, weights, preferred_element_type=jnp.float32)


class Case:
    """One matrix shape: a pool with experts of every width, enough to outgrow the cache."""

    def __init__(self, shape: Shape, module: str):
        self.shape, self.module = shape, module
        self.layout = shape.layout(module)
        self.gate: Activation | None = "silu" if module == "gate_up" else None
        self.widths = (*WIDTHS, "mixed")
        smallest = shape.experts * self.layout.rows * self.layout.columns * min(WIDTHS) // 8
        self.sets = -(-LEAST_BYTES // smallest)

    def bits(self, width: int | str) -> tuple[int, ...]:
        """Width of each expert."""
        if width == "mixed":
            return tuple(WIDTHS[i % len(WIDTHS)] for i in range(self.shape.experts))
        return (int(width),) * self.shape.experts

    @property
    def counts(self) -> list[int]:
        """Pages of one set of experts, width by width."""
        return [pages_needed(self.layout, self.bits(width)) for width in self.widths]

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ModulePages]:
        """Shapes of the pool and of pages, to compile for."""
        words = self.layout.page_words
        pages = 1 + self.sets * sum(self.counts)
        example = random_pages(self.layout, self.bits("mixed"), pages, 1, 0)
        return jax.ShapeDtypeStruct((pages, words), jnp.uint32), example

    @cached_property
    def weights(self) -> tuple[jax.Array, dict[int | str, list[ModulePages]]]:
        """The pool, and the pages of each width's experts."""
        pool = random_pool(1, 1 + self.sets * sum(self.counts), self.layout.page_words)
        modules: dict[int | str, list[ModulePages]] = {}
        first = 1
        for width, count in zip(self.widths, self.counts, strict=True):
            modules[width] = []
            for index in range(self.sets):
                module = random_pages(self.layout, self.bits(width), first + count, first, index)
                pool = set_scales(pool, module, index, self.layout)
                modules[width].append(module)
                first += count
        return pool, modules


class Task:
    """A case with one number of rows an expert, compiled."""

    def __init__(self, case: Case, rows: int):
        self.case, self.rows = case, rows
        shape, layout = case.shape, case.layout
        size = (shape.experts * rows, layout.columns)
        x = jax.random.normal(jax.random.key(rows), size, jnp.float32)
        self.x = x.at[:, 7].multiply(50).astype(jnp.bfloat16)  # an outlier channel
        ids = jnp.repeat(jnp.arange(shape.experts, dtype=jnp.int32), rows)
        capacity = tuning.unit_capacity(rows, [layout.words_per_row])
        # the work list is made once for both modules of a layer, so it is not timed
        routing = route(ids[:, None], shape.experts)
        self.work = {}
        for width in case.widths:
            units = make_units(routing, capacity, jnp.asarray(case.bits(width), jnp.int32))
            self.work[width] = unit_places(units, capacity, size[0]), units

        def ours(x, index, units, pool, module):
            return product(x, index, units, size[0], pool, module, layout, case.gate).sum(axis=0)

        arguments = (self.x, *self.work["mixed"], *case.shapes())
        self.compiled = jax.jit(ours).lower(*arguments).compile()
        weights = jax.ShapeDtypeStruct((shape.experts, layout.rows, layout.columns), jnp.bfloat16)
        self.bf16 = jax.jit(bf16_product).lower(self.bf16_x(), weights).compile()

    def ours(self, width: int | str, pool: jax.Array, module: ModulePages) -> jax.Array:
        """Our product, [E * M, N]."""
        return self.compiled(self.x, *self.work[width], pool, module)

    def bf16_x(self) -> jax.Array:
        """Activations by expert."""
        return self.x.reshape(self.case.shape.experts, self.rows, -1)

    def error(self, width: int | str) -> float:
        """Largest relative error of three experts' outputs in 256 columns, against float64."""
        case, rows = self.case, self.rows
        pool, modules = case.weights
        out = self.ours(width, pool, modules[width][0])
        columns = np.sort(np.random.default_rng(rows).permutation(out.shape[1])[:256])
        dequantize = jax.jit(dequantize_expert, static_argnums=3)
        errors = []
        for expert in (0, case.shape.experts // 2, case.shape.experts - 1):
            weight = dequantize(pool, modules[width][0], jnp.int32(expert), case.layout)
            own = np.asarray(self.x[expert * rows : (expert + 1) * rows], np.float64)
            expected = own @ np.asarray(weight[columns], np.float64).T
            if case.gate is not None:
                up = np.asarray(weight[columns + out.shape[1]], np.float64)
                expected = expected / (1 + np.exp(-expected)) * (own @ up.T)
            found = np.asarray(out[expert * rows : (expert + 1) * rows, columns], np.float64)
            errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        return float(f"{max(errors):.3g}")

    def measure_bf16(self) -> float:
        """Median device time of the bfloat16 product."""
        sizes = (self.case.shape.experts, self.case.layout.rows, self.case.layout.columns)
        weights = jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16)
        x = self.bf16_x()
        times = call_times(lambda _: self.bf16(x, weights), calls=CALLS)
        return statistics.median(sum(time for _, time in one) for one in times)

    def records(self) -> Iterator[Record]:
        """Measures all widths, in turn."""
        case = self.case
        pool, modules = case.weights
        bf16_us = self.measure_bf16()
        turns = [(width, turn) for turn in range(CALLS) for width in case.widths]

        def call(turn: int) -> jax.Array:
            width, index = turns[turn]
            return self.ours(width, pool, modules[width][index % case.sets])

        times = call_times(call, calls=len(turns), keep=False)
        for width in case.widths:
            own = [one for (used, _), one in zip(turns, times, strict=True) if used == width]
            totals = [sum(time for _, time in one) for one in own]
            kernels = [sum(time for name, time in one if "matmul" in name) for one in own]
            ours, kernel = statistics.median(totals), statistics.median(kernels)
            plane_bytes = sum(case.bits(width)) * case.layout.rows * case.layout.columns / 8
            yield Record(
                op="paged_expert_product",
                model=case.shape.model,
                module=case.module,
                bits=width,
                rows=self.rows,
                ours_us=round(ours, 2),
                kernel_us=round(kernel, 2),
                spread_us=round(max(totals) - min(totals), 2),
                bf16_us=round(bf16_us, 2),
                ratio=round(bf16_us / ours, 3),
                tbytes_per_s=round(plane_bytes / kernel / 1e6, 3),
                max_rel_err=self.error(width),
            )


def _work(share: list[tuple[Shape, str, int]], ready: Any, turn: Any, results: Any) -> None:
    """A process: compiles its share, waits for the others, measures when it has its turn, ends."""
    try:
        cases = {key: Case(*key) for key in {(shape, module) for shape, module, _ in share}}
        tasks = [Task(cases[shape, module], rows) for shape, module, rows in share]
        ready.wait()
        with turn:
            for task in tasks:
                for record in task.records():
                    results.put(record)
        results.put(None)
    except BaseException:
        ready.abort()
        results.put(traceback.format_exc())


def run(models: list[str], report: Callable[[Record], None]) -> None:
    """Measures the named models' shapes.

    Raises:
        RuntimeError: A process failed.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the memory
    work = [
        (shape, module, rows)
        for shape in SHAPES
        if not models or shape.model in models
        for module in MODULES
        for rows in (ROWS if shape.model.startswith("Mixtral") else FEWER_ROWS)
    ]
    size = -(-len(work) // PROCESSES)
    shares = list(itertools.batched(work, size))
    context = multiprocessing.get_context("spawn")
    ready, turn, results = context.Barrier(len(shares)), context.Lock(), context.Queue()
    processes = [
        context.Process(target=_work, args=(list(share), ready, turn, results)) for share in shares
    ]
    for process in processes:
        process.start()
    try:
        unfinished = len(processes)
        while unfinished:
            result = results.get()
            if isinstance(result, str):
                raise RuntimeError(f"a measuring process failed:\n{result}")
            if result is None:
                unfinished -= 1
            else:
                report(result)
    finally:
        for process in processes:
            process.terminate()
