"""Time of decoder layers under tensor parallelism, layout by layout."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from _layer_shapes import DTYPE, block_shapes, make_work
from jax.sharding import Mesh, NamedSharding

from pw_jax.models.config import ModelConfig
from sharding import parallel
from sharding.collectives import read_collectives, total_wire_bytes
from sharding.layouts import LAYOUTS
from sharding.mesh import abstract, tensor_mesh

WARM_UP, CALLS, REPEATS = 3, 10, 5


@dataclass(frozen=True)
class TpRecord:
    """One measurement, attention itself not in it.

    Attributes:
        model: Whose shapes.
        layout: How it lay.
        devices: Of the mesh.
        ratio: Share of the parameters that factors keep.
        tokens: In one call.
        layers: In one call, each with weights of its own.
        us_per_layer: Median wall time, microseconds.
        spread_us: Longest less shortest.
        wire_bytes: Sent by a device, a token and layer, as compiled.
        tokens_per_s: Through one layer.
    """

    model: str
    layout: str
    devices: int
    ratio: float
    tokens: int
    layers: int
    us_per_layer: float
    spread_us: float
    wire_bytes: float
    tokens_per_s: float


def touch_heads(q: jax.Array, *rest: jax.Array) -> jax.Array:
    """In place of attention, whose time is the cache's: reads all heads once."""
    *keys, v = rest
    out = jnp.repeat(v, q.shape[-2] // v.shape[-2], axis=-2)
    total = q.sum(axis=-1, keepdims=True)
    for key in keys:
        total = total + key.sum(axis=(-1, -2), keepdims=True)
    return out + total


def random_params(mesh: Mesh, shapes: Any, seed: int) -> Any:
    """Random arrays, made where they are to be."""

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def draw(key: jax.Array) -> jax.Array:
            return jax.random.normal(key, leaf.shape, leaf.dtype) * jnp.asarray(0.02, leaf.dtype)

        return jax.jit(draw, out_shardings=leaf.sharding)(jax.random.key(seed))

    with jax.set_mesh(mesh):
        return jax.tree.map(make, shapes)


def measure(
    config: ModelConfig,
    name: str,
    layout: str,
    devices: int,
    ratio: float,
    tokens: int,
    layers: int,
) -> TpRecord:
    """Times some layers one after another, in one compiled call."""
    mesh = tensor_mesh(devices)
    works = [
        make_work(config, layout, devices, which, shape, touch_heads)
        for which, shape in block_shapes(config, ratio).items()
    ]
    shapes = [abstract(mesh, work.block.prepare, work.weights) for work in works]
    params = [
        [random_params(mesh, shape, index * len(works) + i) for i, shape in enumerate(shapes)]
        for index in range(layers)
    ]

    def step(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            for work, own in zip(works, layer, strict=True):
                x = x + work.call(mesh, work.block, own, x)
        return x

    block = works[0].block
    columns = -(-config.hidden_size // devices) * devices if block.layout.splits_residual else (
        config.hidden_size
    )  # fmt: skip
    sharding = NamedSharding(mesh, parallel.residual_spec(block, 2))
    x = jax.device_put(jnp.ones((tokens, columns), DTYPE), sharding)
    lowered = jax.jit(step).lower(params, x)
    wire = total_wire_bytes(read_collectives(lowered)) / tokens / layers
    times = _wall_times(lowered.compile(), params, x)
    median = statistics.median(times) / layers
    return TpRecord(
        model=name,
        layout=layout,
        devices=devices,
        ratio=ratio,
        tokens=tokens,
        layers=layers,
        us_per_layer=round(1e6 * median, 2),
        spread_us=round(1e6 * (max(times) - min(times)) / layers, 2),
        wire_bytes=round(wire, 1),
        tokens_per_s=round(tokens / median, 1),
    )


def _wall_times(compiled: Any, params: Any, x: jax.Array) -> list[float]:
    """Seconds of a call, of several series of calls."""
    for _ in range(WARM_UP):
        compiled(params, x).block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        out = x
        for _ in range(CALLS):
            out = compiled(params, x)
        out.block_until_ready()
        times.append((time.perf_counter() - start) / CALLS)
    return times


def run(
    config: ModelConfig,
    name: str,
    devices: int,
    ratios: list[float],
    tokens: list[int],
    layers: int,
    report: Callable[[TpRecord], None],
) -> None:
    """Measures all layouts; ``dense`` once, since it does not depend on the ratio."""
    for count in tokens:
        for layout in LAYOUTS:
            for ratio in ratios[:1] if layout == "dense" else ratios:
                report(measure(config, name, layout, devices, ratio, count, layers))
