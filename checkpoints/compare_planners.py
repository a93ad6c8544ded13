"""Planners against each other at equal bytes: held-out KL to the float32 source.

For each text the first half is the prompt, from which a planner may learn, and the second half is
measured. Every planner gets the same number of pages, those of all experts at one width, and
chooses the widths of the blocks; the model then runs at these widths, its experts multiplied
densely, which is what paged experts at these widths equal.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from checkpoints.engine import StoredExperts
from checkpoints.huggingface import MODULES, load_dense_model
from checkpoints.store import Store, dequantized_model
from pw_jax.activations import PromptDamages, prompt_damages
from pw_jax.calibration import measure_function, moe_blocks
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.paging.layout import choose_page_words, paging_layout
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.damage import conditional_damage
from pw_jax.planner.initial import initial_bits, total_pages
from pw_jax.planner.kinds import Weighing, weigh
from pw_jax.planner.residual import PromptSums, oracle_damage, prompt_factor
from pw_jax.planner.routing import RoutingMass
from pw_jax.planner.static import optimal_bits
from pw_jax.quantizer.format import dequantize

FISHER_ORACLE = "oracle_fisher"
"""Not a kind of the planner: damage from the gradients of the very text that is measured."""

BASE = PlannerConfig(bucket_floors=(3, 3, 3))
"""One floor for all: else the floors of hot experts bar the tightest budgets."""

PLANNERS: dict[str, PlannerConfig] = {
    "full": BASE,
    "full_direct": dataclasses.replace(BASE, prompt_residual="direct"),
    "full_heads": dataclasses.replace(BASE, prompt_residual="heads"),
    "no_routing": dataclasses.replace(BASE, routing=False),
    "no_sensitivity": dataclasses.replace(BASE, sensitivity=False),
    "uniform": dataclasses.replace(BASE, kind="uniform"),
    "random": dataclasses.replace(BASE, kind="random"),
    "frequency": dataclasses.replace(BASE, kind="frequency"),
    "static": dataclasses.replace(BASE, kind="static"),
    "per_layer": dataclasses.replace(BASE, kind="per_layer", prompt_residual="direct"),
    "oracle_prompt": dataclasses.replace(BASE, kind="oracle"),
    FISHER_ORACLE: BASE,
}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One planner at one budget.

    Attributes:
        planner: Name in `PLANNERS`.
        budget_bits: The budget is what all experts at this width take, interpolated in between.
        budget_pages: The same in pages.
        pages: Pages held, one number a text.
        mean_bits: Mean width of a weight, likewise.
        kl: Mean KL to the source over the measured positions, in nats, likewise.
    """

    planner: str
    budget_bits: float
    budget_pages: int
    pages: list[int]
    mean_bits: list[float]
    kl: list[float]


class MixedWidths:
    """A converted model whose blocks may each have their own width, all widths held in float32."""

    def __init__(self, store: Store):
        _, self.model = dequantized_model(store, store.widths[-1], np.float32)
        self.widths = store.widths
        graph, state = nnx.split(self.model)
        self._leaves, treedef = jax.tree.flatten(state)
        self.stacks: list[tuple[Array, Array]] = []
        for layer in store.model_config.moe_layers:
            both = []
            for module in MODULES:
                arrays = store.load_experts(layer, module)
                matrices = [arrays.matrix(expert) for expert in range(arrays.experts)]
                both.append(
                    jnp.stack(
                        [jnp.stack([dequantize(m, b) for m in matrices]) for b in self.widths]
                    )
                )
            self.stacks.append((both[0], both[1]))

        def log_probabilities(leaves: Any, stacks: Any, width: Array, tokens: Array) -> Array:
            running = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            expert = jnp.arange(width.shape[1])
            for index, (_, experts) in enumerate(moe_blocks(running)):
                gate_up, down = stacks[index]
                experts.gate_up_proj.set_value(gate_up[width[index, :, 0], expert])
                experts.down_proj.set_value(down[width[index, :, 1], expert])
            return _second_half(running, tokens)

        self._run = jax.jit(log_probabilities)

    def log_probabilities(
        self, bits: Int[np.ndarray, "L E 2"], tokens: Int32[np.ndarray, " T"]
    ) -> Float32[Array, "half V"]:
        """Of the second half of a text, at these widths."""
        width = jnp.asarray(bits - self.widths[0], jnp.int32)
        return self._run(self._leaves, self.stacks, width, jnp.asarray(tokens))


def _second_half(model: CausalLm, tokens: Array) -> Array:
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    memory = SequenceMemory(jnp.ones((1, tokens.shape[0]), bool))
    hidden = model(tokens[None], positions, memory).hidden[0, tokens.shape[0] // 2 :]
    return jax.nn.log_softmax(model.logits(hidden))


@jax.jit
def _kl(reference: Float32[Array, "half V"], ours: Float32[Array, "half V"]) -> Array:
    return jnp.sum(jnp.exp(reference) * (reference - ours), axis=-1).mean()


def page_table(store: Store) -> tuple[Int[np.ndarray, "2 W"], int]:
    """Pages of a block of each module at each width, and the bytes of a page, as in an engine."""
    config = store.model_config
    words = choose_page_words(
        config.kv_shapes, kv_dtype="bfloat16", expert_shape=config.expert_shape
    )
    layout = paging_layout(
        config.kv_shapes,
        kv_dtype="bfloat16",
        page_words=words,
        expert_shape=config.expert_shape,
        expert_format=StoredExperts(store).expert_format,
        moe_layers=len(config.moe_layers),
    )
    assert layout.matrices is not None
    pages = [[matrix.pages(bits) for bits in store.widths] for matrix in layout.matrices]
    return np.array(pages), layout.page_bytes


def budget_pages(pages: Int[np.ndarray, "2 W"], shape: tuple[int, ...], bits: float) -> int:
    """Pages of all blocks at a width, linear between whole widths."""
    low = int(np.floor(bits))
    ends = [total_pages(np.full(shape, width), pages) for width in (low, min(low + 1, 8))]
    return int(ends[0] + (bits - low) * (ends[1] - ends[0]))


def compare_planners(
    source: str | Path,
    store: Store,
    tokens: Int32[np.ndarray, "S T"],
    budgets: list[float],
    planners: list[str],
    report: Report = lambda stage: None,
) -> Iterator[Measured]:
    """Measures every planner at every budget.

    Args:
        source: The Hugging Face folder that the store was made from.
        store: A converted checkpoint with a calibration by scripts/calibrate.py.
        tokens: Texts of equal length.
        budgets: In bits a weight.
        planners: Names in `PLANNERS`.
        report: Called with what is being done.

    Raises:
        UserError: No such calibration, or the wrong source.
    """
    experts = StoredExperts(store)
    seen, prompts = experts.calibration, experts.prompt_calibration
    if seen is None or prompts is None:
        raise UserError(f"{store.directory} is not calibrated; run scripts/calibrate.py first")
    report("source")
    config, model = load_dense_model(source, np.float32)
    if config != store.model_config:
        raise UserError(f"{store.directory} was not made from {source}: their config.json differ")
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, row: _second_half(nnx.merge(graph, state), row))
    reference = [np.asarray(forward(state, jnp.asarray(row))) for row in tokens]
    del model, state
    report("all widths")
    mixed = MixedWidths(store)
    layers = range(len(config.moe_layers))
    stored = np.stack(
        [np.stack([experts.load_experts(layer, m).damage for m in (0, 1)], 1) for layer in layers]
    )
    damage = conditional_damage(stored, seen.routing_mass, seen.tokens_seen, BASE.shrink_tokens)
    report("prompts")
    of_prompts = _sums(mixed.model, tokens[:, : tokens.shape[1] // 2], prompts.column_weight())
    fisher = None
    if FISHER_ORACLE in planners:
        measure = measure_function(mixed.model)
        fisher = []
        for number, row in enumerate(tokens):
            report(f"gradients {number + 1}/{len(tokens)}")
            fisher.append(_fisher_damage(mixed, measure, row))
    pages, _ = page_table(store)
    sizes = np.array([stack.shape[-2] * stack.shape[-1] for stack in mixed.stacks[0]])
    for budget in budgets:
        limit = budget_pages(pages, damage.shape[:3], budget)
        for name in planners:
            measured = Measured(name, budget, limit, [], [], [])
            for number, row in enumerate(tokens):
                report(f"{budget} bits, {name}, text {number + 1}/{len(tokens)}")
                mass, sums = of_prompts[number]
                routing = RoutingMass.start(seen.routing_mass, seen.tokens, PLANNERS[name])
                routing = routing.update(mass, sums.tokens)
                heads = prompts.heads
                factor = prompt_factor({0: sums}, heads, PLANNERS[name], damage.shape[1])
                oracle = oracle_damage({0: sums}, damage)
                weighing = weigh(PLANNERS[name], damage, pages, routing, factor, oracle)
                if name == FISHER_ORACLE and fisher is not None:
                    ones = np.ones_like(weighing.multiplier)
                    weighing = Weighing(fisher[number], ones, weighing.floors)
                bits = _choose(PLANNERS[name], weighing, pages, limit, store.widths[0])
                ours = mixed.log_probabilities(bits, row)
                measured.kl.append(float(_kl(jnp.asarray(reference[number]), ours)))
                measured.pages.append(total_pages(bits, pages))
                measured.mean_bits.append(float((bits.mean((0, 1)) * sizes).sum() / sizes.sum()))
            yield measured


def _choose(
    config: PlannerConfig, weighing: Weighing, pages: np.ndarray, limit: int, seed_bits: int
) -> Int[np.ndarray, "L E 2"]:
    damage = np.array(weighing.damage)
    if weighing.prompt_factor is not None:
        damage = damage * weighing.prompt_factor[..., None]
    if config.kind == "static":
        return optimal_bits(damage, pages, weighing.floors, limit, seed_bits)
    return initial_bits(damage, pages, weighing.multiplier, weighing.floors, limit, seed_bits)


def _sums(
    model: CausalLm, prompts: np.ndarray, column_weight: Float32[np.ndarray, "L E D"]
) -> list[tuple[np.ndarray, PromptSums]]:
    """Routing mass and statistics of each prompt, as prefill collects them."""
    experts = column_weight.shape[:2]
    shape = model.config.expert_shape
    assert shape is not None
    unused = np.zeros((*experts, shape.ffn), np.float32)
    seen: PromptDamages = prompt_damages(model, prompts, (column_weight, unused))
    return [
        (
            seen.mass[i].astype(np.float64),
            PromptSums(
                prompts.shape[1],
                seen.norms[i].astype(np.float64),
                seen.routed[i].astype(np.float64),
                seen.damage[i, :, :, 0].astype(np.float64),
            ),
        )
        for i in range(len(prompts))
    ]


def _fisher_damage(
    mixed: MixedWidths, measure: Callable[..., Any], row: np.ndarray
) -> Float[np.ndarray, "L E 2 W"]:
    """Damage from the gradients of one text, rank-one as in calibration."""
    _, found = measure(jnp.asarray(row, jnp.int32), jnp.ones(row.shape, bool))
    layers = []
    for index, stacks in enumerate(mixed.stacks):
        modules = []
        for module, stack in zip(MODULES, stacks, strict=True):
            rows, columns = found[f"{module}_row"][index], found[f"{module}_column"][index]
            modules.append(_weighted_error(stack, rows, columns))
        layers.append(np.stack(modules, axis=1))
    return np.stack(layers).astype(np.float64)


@jax.jit
def _weighted_error(
    stack: Float32[Array, "W E N K"], rows: Float32[Array, "E N"], columns: Float32[Array, "E K"]
) -> Float32[Array, "E W"]:
    share = columns / jnp.maximum(columns.sum(axis=1, keepdims=True), 1e-30)
    error = jnp.square(stack - stack[-1:])
    return jnp.einsum("wenk,en,ek->ew", error, rows, share)
