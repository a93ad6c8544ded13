"""A checkpoint as an engine holds it at load time, to be scored: its widths, pages and bytes."""

import dataclasses
import gc
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from checkpoints.compare_planners import BASE, budget_pages
from checkpoints.engine import StoredExperts
from checkpoints.huggingface import MODULES, load_dense_model
from checkpoints.low_rank import is_low_rank, load_low_rank_model
from checkpoints.store import MANIFEST, Store, dequantized_model
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.memory_plan import MemoryPlan, plan_memory
from pw_jax.engine.precision import Precision
from pw_jax.errors import UserError
from pw_jax.evaluation.forward import ExpertPages, Forward
from pw_jax.models import registry
from pw_jax.models.latent import latent_layers
from pw_jax.models.registry import parameter_shapes
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.planner.config import PlannerConfig
from sharding.placement import device_memory, host_memory

PLANNERS: dict[str, PlannerConfig] = {
    "full": BASE,
    "no_routing": dataclasses.replace(BASE, routing=False),
    "no_sensitivity": dataclasses.replace(BASE, sensitivity=False),
    "uniform": dataclasses.replace(BASE, kind="uniform"),
    "random": dataclasses.replace(BASE, kind="random"),
    "frequency": dataclasses.replace(BASE, kind="frequency"),
    "static": dataclasses.replace(BASE, kind="static"),
    "per_layer": dataclasses.replace(BASE, kind="per_layer"),
}
"""Planners by what they hold before any prompt has run; all with one floor of 3 bits."""

ROOMY = 1 << 40


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes, predicted and measured.

    Attributes:
        predicted: Weights that are arrays, and the pool, by the memory plan.
        live: The same from the arrays that live on the device after loading.
        peak: The device's own record of the most it ever held, where loading has raised it: of
            several checkpoints in one process that is the first, and then a larger one. None
            otherwise, and where a device keeps no record.
        arrays: Of the predicted: weights that are arrays.
        expert_pages: Of the predicted: pages that hold expert weights. The rest of the pool is
            free for keys and values.
    """

    predicted: int
    live: int
    peak: int | None
    arrays: int
    expert_pages: int


@dataclass(frozen=True)
class Held:
    """A loaded checkpoint.

    Attributes:
        forward: Runs it.
        memory: What it takes.
        bits: Width of each block [L, E, 2]; None if nothing is quantised.
        mean_bits: Mean width of an expert weight, likewise.
        through: What is run: ``arrays``, or the experts out of ``pages``, or ``dequantised``.
    """

    forward: Forward
    memory: Memory
    bits: Int[np.ndarray, "L E 2"] | None
    mean_bits: float | None
    through: str


def load_arrays(directory: Path, dtype: DTypeLike) -> Held:
    """Loads a Hugging Face folder or a decomposed checkpoint."""
    before, peak = live_bytes(), peak_bytes()
    load = load_low_rank_model if is_low_rank(directory) else load_dense_model
    forward = Forward(load(directory, dtype)[1])
    size = forward.array_bytes
    memory = Memory(size, live_bytes() - before, raised(peak), size, 0)
    return Held(forward, memory, None, None, "arrays")


def load_held(
    store: Store,
    dtype: DTypeLike,
    planner: str,
    *,
    bits: float | None = None,
    budget_bytes: int | None = None,
    through_pages: bool = False,
) -> Held:
    """Loads a converted checkpoint at the widths that an engine would start with.

    Args:
        store: Made by scripts/convert.py or scripts/calibrate.py.
        dtype: Of what is not quantised, and of the arithmetic.
        planner: One of ``PLANNERS``.
        bits: The experts get the pages that all of them take at this width, interpolated between
            whole widths; the pool holds these and no more than an engine keeps free.
        budget_bytes: Instead of ``bits``: the memory budget of the engine, weights and pool.
        through_pages: Run the experts out of the pool, as an engine does. Otherwise they are
            dequantised and multiplied densely, which is quicker without GPU kernels and equal but
            for rounding; the pool is given back after it has been measured.

    Raises:
        UserError: No calibration, or a budget that is too small.
    """
    config = PLANNERS[planner]
    if store.calibration is None and config.kind not in ("uniform", "random"):
        raise UserError(f"{store.directory} is not calibrated; run scripts/calibrate.py first")
    if (bits is None) == (budget_bytes is None):
        raise ValueError("give either bits or budget_bytes")
    experts = StoredExperts(store)
    before, peak = live_bytes(), peak_bytes()
    model = registry.build_model(store.model_config, "paged", dtype)
    model = registry.set_weights(model, store.load_dense(dtype))
    arrays = Forward(model).array_bytes
    plan = _plan(store, config, arrays, bits, budget_bytes)
    allocator = PageAllocator(plan.pool_pages)
    pool = jnp.zeros((plan.pool_pages, plan.layout.page_words), jnp.uint32, device=device_memory())
    held_before = live_bytes()
    precision = Precision.create(plan.layout, allocator, experts, config, pool)
    # The host's copy of all planes is no device memory, but on a CPU the two are one.
    one_memory = host_memory().memory_kind == device_memory().memory_kind
    host = live_bytes() - held_before if one_memory else 0
    pool = precision.load(pool, plan.weight_pages)
    widths = precision.table.bits.astype(np.int64)
    memory = Memory(
        arrays + plan.pool_bytes,
        live_bytes() - before - host,
        raised(peak),
        arrays,
        allocator.owned(Owner.WEIGHT) * plan.layout.page_bytes,
    )
    if through_pages:
        pages = ExpertPages(pool, precision.table.snapshot(), plan.layout)
        return Held(Forward(model, pages), memory, widths, precision.mean_bits, "pages")
    mean_bits = precision.mean_bits
    del model, pool, precision
    _, dense = dequantized_model(store, widths, dtype)
    return Held(Forward(dense), memory, widths, mean_bits, "dequantised")


def _plan(
    store: Store, planner: PlannerConfig, arrays: int, bits: float | None, budget: int | None
) -> MemoryPlan:
    config = EngineConfig(memory_budget_bytes=budget, slots=1, planner=planner)
    if bits is not None:
        # Nothing moves while a model is scored: all planners set aside the same for the cache.
        fixed = dataclasses.replace(planner, page_movement=False)
        config = dataclasses.replace(config, planner=fixed)
        budget = arrays + _pool_bytes_at(store, config, bits, arrays)
        config = dataclasses.replace(config, memory_budget_bytes=budget)
    return _plan_memory(store, config, arrays)


def _plan_memory(store: Store, config: EngineConfig, arrays: int) -> MemoryPlan:
    """As an engine on one device would, latents in its cache included."""
    latents = latent_layers(registry.build_model(store.model_config, "paged"))
    return plan_memory(store.model_config, config, StoredExperts(store), arrays, latents)


def budget_at(store: Store, config: EngineConfig, bits: float, dtype: DTypeLike) -> int:
    """The memory budget at which all slots at full length leave the experts a mean width.

    Args:
        store: A converted checkpoint.
        config: Of the engine; its own budget is not read.
        bits: The width, interpolated between whole ones.
        dtype: Of the weights that are arrays.
    """
    model = registry.build_model(store.model_config, "paged", dtype)
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in parameter_shapes(model).values())
    planner = dataclasses.replace(config.planner, page_movement=False)
    fixed = dataclasses.replace(config, planner=planner)
    return arrays + _pool_bytes_at(store, fixed, bits, arrays)


def _pool_bytes_at(store: Store, config: EngineConfig, bits: float, arrays: int) -> int:
    """The pool whose experts have a width, with what the config sets aside for the cache."""
    if not store.widths[0] <= bits <= store.widths[-1]:
        low, high = store.widths[0], store.widths[-1]
        raise UserError(f"{store.directory} holds {low} to {high} bits, not {bits:g}")
    model = store.model_config
    assert model.expert_shape is not None
    roomy = dataclasses.replace(config, memory_budget_bytes=arrays + ROOMY)
    plan = _plan_memory(store, roomy, arrays)
    matrices = plan.layout.matrices
    assert matrices is not None
    pages = np.array([[matrix.pages(width) for width in store.widths] for matrix in matrices])
    blocks = (len(model.moe_layers), model.expert_shape.experts, len(MODULES))
    set_aside = plan.pool_pages - plan.weight_pages
    return (budget_pages(pages, blocks, bits) + set_aside) * plan.layout.page_bytes


def is_converted(directory: Path) -> bool:
    """Whether a folder's experts are in pages."""
    return (directory / MANIFEST).exists() and not is_low_rank(directory)


def live_bytes() -> int:
    """Bytes of the arrays that live in the device's own memory."""
    gc.collect()
    kind = device_memory().memory_kind
    return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == kind)


def peak_bytes() -> int | None:
    """The device's record of the most memory ever in use."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def raised(before: int | None) -> int | None:
    """The device's record, if it is above what it was before."""
    now = peak_bytes()
    return None if now == before else now
