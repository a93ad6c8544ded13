"""A few layers of a model over devices, on random weights and over real pages, to be measured."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered

from pw_jax.engine.cache_choice import latents_of
from pw_jax.engine.config import EngineConfig, KvCacheKind
from pw_jax.engine.memory_plan import plan_layout
from pw_jax.errors import UserError
from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.low_rank.ranks import uniform_ranks
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.memory import PagedMemory
from pw_jax.tensor_parallel.model import ParallelModel, parallelize
from sharding.mesh import abstract
from sharding.placement import Placement

DTYPE, KV_DTYPE = jnp.bfloat16, "bfloat16"
VOCABULARY = 1024  # small, since the head of a few layers would otherwise count for most of them


@dataclass(frozen=True)
class Workload:
    """A batch of prompts of one length that generates to one length.

    Attributes:
        name: What flags call it.
        batch: Sequences.
        prompt: Tokens of each prompt.
        new: Tokens to generate for each; with one, the step that makes it is all that is timed.
    """

    name: str
    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        """Tokens of a sequence at the end."""
        return self.prompt + self.new

    @property
    def middle(self) -> int:
        """The position half-way through the new tokens."""
        return self.prompt + self.new // 2


WORKLOADS = {
    one.name: one
    for one in (
        Workload("s1", 512, 32, 128),
        Workload("s2", 64, 64, 448),
        Workload("decode", 1, 511, 1),
    )
}
"""The two of the paper, and a step of one sequence alone."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        name: Of the model.
        config: Of the model.
        devices: Of the mesh.
        layout: How the layers lie.
        ratio: Share of the parameters that factors keep; 1 for ``dense``.
        kv: ``full`` keys and values, or the ``latent`` that they come from.
        layers: How many.
        workload: What they run.
    """

    name: str
    config: ModelConfig
    devices: int
    layout: str
    ratio: float
    kv: KvCacheKind
    layers: int
    workload: Workload

    @property
    def labels(self) -> dict[str, Any]:
        """For a record."""
        return {
            "model": self.name,
            "layout": self.layout,
            "devices": self.devices,
            "ratio": self.ratio,
            "kv": self.kv,
        }


def cases(
    ratios: list[float], layouts: list[str], kinds: list[KvCacheKind]
) -> list[tuple[str, float, KvCacheKind]]:
    """Layouts, ratios and caches that there are.

    ``dense`` does not depend on the ratio, and like ``naive`` has no latents to keep.
    """
    return [
        (layout, ratio, kv)
        for layout in layouts
        for ratio in ([1.0] if layout == "dense" else ratios)
        for kv in kinds
        if kv == "full" or layout not in ("dense", "naive")
    ]


def shrunk(config: ModelConfig, by: int) -> ModelConfig:
    """A likeness of a model: as many heads and layers, all widths divided.

    Raises:
        UserError: A width does not divide.
    """
    if by == 1:
        return config
    heads = (kv.head_dim for kv in config.kv_shapes)
    sizes = (config.hidden_size, config.intermediate_size, *heads)
    if config.model_type not in ("llama", "opt") or any(size % (2 * by) for size in sizes):
        raise UserError(f"--shrink {by}: not every width of this model divides by {2 * by}")
    return dataclasses.replace(
        config,
        hidden_size=config.hidden_size // by,
        intermediate_size=config.intermediate_size // by,
        kv_shapes=tuple(
            dataclasses.replace(kv, head_dim=kv.head_dim // by) for kv in config.kv_shapes
        ),
    )


def shapes_of(case: Case, mesh: Mesh | AbstractMesh) -> ParallelModel:
    """The layers, of shapes."""
    config, layers = case.config, case.layers
    few = dataclasses.replace(
        config,
        kv_shapes=config.kv_shapes[:layers],
        moe_layers=tuple(layer for layer in config.moe_layers if layer < layers),
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    ranks = {}
    if case.layout != "dense":
        ranks = uniform_ranks(factorable_shapes(registry.build_model(few)), case.ratio)
    model = registry.build_model(few, dtype=DTYPE, ranks=ranks)
    return parallelize(model, mesh, case.layout, abstract)


@functools.cache
def drawing(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], jax.Array]:
    """A function of a seed to a random array, made where it is to be."""

    def draw(seed: jax.Array) -> jax.Array:
        scale = jnp.asarray(0.02, dtype)
        return jax.random.normal(jax.random.key(seed), shape, dtype) * scale

    return jax.jit(draw, out_shardings=sharding)


def random_arrays(shapes: Any) -> Any:
    """Random arrays, made where they are to be."""
    leaves, tree = jax.tree.flatten(shapes)
    drawn = [
        drawing(leaf.shape, leaf.dtype, leaf.sharding)(np.uint32(seed))
        for seed, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)


def pages_of(case: Case, model: ParallelModel) -> PagingLayout:
    """Pages of the cache as a device has them: of its own heads, or of whole latents."""
    on_device = dataclasses.replace(model.config, kv_shapes=model.kv_shapes)
    settings = EngineConfig(kv_dtype=KV_DTYPE, kv_cache=case.kv)
    return plan_layout(on_device, settings, None, latents_of(model, settings))


def empty_pages(
    layout: PagingLayout, workload: Workload, placement: Placement
) -> tuple[jax.Array, tuple[np.ndarray, ...]]:
    """A pool, and tables that give every sequence pages of its own for all its tokens."""
    tables, first = [], 1
    for group in layout.kv_groups:
        shape = (len(group.layers), workload.batch, group.blocks(workload.tokens))
        count = int(np.prod(shape))
        tables.append(np.arange(first, first + count, dtype=np.int32).reshape(shape))
        first += count
    pages = placement.devices * first
    pool = jnp.zeros((pages, layout.page_words), jnp.uint32, device=placement.pool)
    return pool, tuple(jax.device_put(tables, placement.whole))


def lowered_steps(
    model: ParallelModel, pages: PagingLayout, workload: Workload, placement: Placement
) -> dict[str, tuple[Lowered, np.ndarray]]:
    """Prefill and decode step, lowered from shapes alone, and the positions that each is for."""

    def step(
        reach: int, model: Any, pool: Any, tables: Any, tokens: Any, positions: Any
    ) -> tuple[Any, Any]:
        memory = PagedMemory(pool, used(pages, tables, reach), positions, None, pages)
        out = model(tokens, positions, memory)
        best = jnp.argmax(model.logits(out.hidden[:, -1]), axis=-1)
        return out.memory.pool, best

    outputs = (placement.pool, placement.whole)
    pool, tables = jax.eval_shape(lambda: empty_pages(pages, workload, placement))
    pool = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=placement.pool)
    prompt = np.arange(workload.prompt, dtype=np.int32)
    steps = {}
    kinds = {"decode": np.full((workload.batch, 1), workload.middle, np.int32)}
    if workload.new > 1:
        kinds = {"prefill": np.tile(prompt, (workload.batch, 1))} | kinds
    for kind, positions in kinds.items():
        whole = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.whole),
            (tables, positions, positions),
        )
        of_kind = functools.partial(step, int(positions.max()) + 1)
        jitted = jax.jit(of_kind, donate_argnums=1, out_shardings=outputs)
        steps[kind] = jitted.lower(model, pool, *whole), positions
    return steps


def used(layout: PagingLayout, tables: Any, tokens: int) -> tuple[Any, ...]:
    """Page tables cut to the blocks of so many tokens, as a bucket of used pages is.

    Without it a cache of latents would rebuild what no query sees.
    """
    groups = zip(layout.kv_groups, tables, strict=True)
    return tuple(table[:, :, : group.blocks(tokens)] for group, table in groups)
