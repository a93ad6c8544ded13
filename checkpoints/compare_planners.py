"""Planners against each other at equal bytes: held-out KL to the float32 source.

For each text the first half is the prompt, from which a planner may learn, and the second half is
measured. Every planner gets the same number of pages, those of all experts at one width, and
chooses the widths of the blocks. The bytes are what the weights then own in a page table; the KL is
that of `checkpoints.mixed_widths`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from checkpoints.engine import StoredExperts
from checkpoints.huggingface import MODULES, load_dense_model
from checkpoints.mixed_widths import (
    MixedWidths,
    expert_layout,
    host_pages,
    page_table,
    pages_held,
    second_half,
)
from checkpoints.store import Store
from pw_jax.activations import PromptDamages, prompt_damages
from pw_jax.engine.expert_source import CalibrationCounts
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.errors import UserError
from pw_jax.layered_gradients import LayeredGradients
from pw_jax.models.decoder import CausalLm
from pw_jax.planner.config import PlannerConfig
from pw_jax.planner.damage import conditional_damage
from pw_jax.planner.initial import initial_bits, total_pages
from pw_jax.planner.kinds import Weighing, weigh
from pw_jax.planner.residual import PromptSums, oracle_damage, prompt_factor
from pw_jax.planner.routing import RoutingMass
from pw_jax.planner.static import optimal_bits

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
    "no_page_movement": dataclasses.replace(BASE, page_movement=False),
    "uniform": dataclasses.replace(BASE, kind="uniform"),
    "random_0": dataclasses.replace(BASE, kind="random", random_seed=0),
    "random_1": dataclasses.replace(BASE, kind="random", random_seed=1),
    "random_2": dataclasses.replace(BASE, kind="random", random_seed=2),
    "frequency": dataclasses.replace(BASE, kind="frequency"),
    "static": dataclasses.replace(BASE, kind="static"),
    "per_layer": dataclasses.replace(BASE, kind="per_layer", prompt_residual="direct"),
    "oracle_prompt": dataclasses.replace(BASE, kind="oracle"),
    FISHER_ORACLE: BASE,
}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One planner at one budget; lists hold one number a text.

    Attributes:
        planner: Name in `PLANNERS`.
        budget_bits: The budget is what all experts at this width take, interpolated in between.
        budget_pages: The same in pages.
        pages: Pages that the weights own in the page table.
        mean_bits: Mean width of a weight.
        kl: Mean KL to the source over the measured positions, in nats.
    """

    planner: str
    budget_bits: float
    budget_pages: int
    pages: list[int] = field(default_factory=list)
    mean_bits: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Evidence:
    """What planners may look at.

    Attributes:
        damage: Conditional sensitivity.
        calibration: Routing that calibration saw.
        prompts: Column errors and heads.
        pages: Pages of a block of each module at each width.
        seed_bits: Bits of the first width.
        of_prompts: Routing mass and statistics of each text's first half.
        of_texts: Damage from the gradients of each whole text, for `FISHER_ORACLE`.
    """

    damage: Float[np.ndarray, "L E 2 W"]
    calibration: CalibrationCounts
    prompts: PromptCalibration
    pages: Int[np.ndarray, "2 W"]
    seed_bits: int
    of_prompts: list[tuple[np.ndarray, PromptSums]]
    of_texts: list[np.ndarray]

    def choose_all(self, name: str, budget: int) -> list[Int[np.ndarray, "L E 2"]]:
        """Widths for each text within a budget of pages."""
        if PLANNERS[name].moves_pages:
            return [self._choose(name, text, budget) for text in range(len(self.of_prompts))]
        return [self._choose(name, 0, budget)] * len(self.of_prompts)

    def start(self, config: PlannerConfig) -> RoutingMass:
        """The routing that a planner knows before any prompt."""
        return RoutingMass.start(self.calibration.routing_mass, self.calibration.tokens, config)

    def choose(
        self, config: PlannerConfig, routing: RoutingMass, sums: PromptSums, budget: int
    ) -> Int[np.ndarray, "L E 2"]:
        """Widths within a budget of pages, from the routing so far and the prompt's statistics."""
        return self._fit(config, self._weighing(config, routing, sums), budget)

    def _choose(self, name: str, text: int, budget: int) -> Int[np.ndarray, "L E 2"]:
        config, routing = PLANNERS[name], self.start(PLANNERS[name])
        mass, sums = self.of_prompts[text]
        if config.moves_pages:  # else widths were chosen before the prompt came
            routing = routing.update(mass, sums.tokens)
        weighing = self._weighing(config, routing, sums)
        if name == FISHER_ORACLE:
            ones = np.ones_like(weighing.multiplier)
            weighing = Weighing(self.of_texts[text], ones, weighing.floors)
        return self._fit(config, weighing, budget)

    def _weighing(self, config: PlannerConfig, routing: RoutingMass, sums: PromptSums) -> Weighing:
        factor = None
        if config.moves_pages:
            factor = prompt_factor({0: sums}, self.prompts.heads, config, self.damage.shape[1])
        oracle = oracle_damage({0: sums}, self.damage)
        return weigh(config, self.damage, self.pages, routing, factor, oracle)

    def _fit(
        self, config: PlannerConfig, weighing: Weighing, budget: int
    ) -> Int[np.ndarray, "L E 2"]:
        damage = np.array(weighing.damage)
        if weighing.prompt_factor is not None:
            damage = damage * weighing.prompt_factor[..., None]
        if config.kind == "static":
            return optimal_bits(damage, self.pages, weighing.floors, budget, self.seed_bits)
        multiplier, floors = weighing.multiplier, weighing.floors
        return initial_bits(damage, self.pages, multiplier, floors, budget, self.seed_bits)


@jax.jit
def text_kl(reference: Float32[Array, "half V"], ours: Float32[Array, "half V"]) -> Array:
    """Mean KL(reference || ours) over positions, in nats."""
    return jnp.sum(jnp.exp(reference) * (reference - ours), axis=-1).mean()


def budget_pages(
    pages: Int[np.ndarray, "2 W"], shape: tuple[int, ...], bits: float, seed_bits: int = 3
) -> int:
    """Pages of all blocks at a width, linear between whole widths."""
    parent = seed_bits + pages.shape[1] - 1
    low = int(np.floor(bits))
    ends = [
        total_pages(np.full(shape, min(width, parent)), pages, seed_bits)
        for width in (low, low + 1)
    ]
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
    report("source")
    reference = source_log_probabilities(source, store, tokens)
    report("all widths")
    mixed, layout = MixedWidths(store), expert_layout(store)
    host = host_pages(store, layout)
    report("prompts")
    evidence = gather_evidence(
        mixed, experts, page_table(layout), tokens, FISHER_ORACLE in planners
    )
    run = jax.jit(
        lambda leaves, stacks, index, row: second_half(mixed.at(leaves, stacks, index), row)
    )
    known: dict[tuple[int, bytes], tuple[int, float]] = {}  # planners often agree
    for budget in budgets:
        limit = budget_pages(evidence.pages, evidence.damage.shape[:3], budget, store.widths[0])
        for name in planners:
            measured = Measured(name, budget, limit)
            chosen = evidence.choose_all(name, limit)
            for text, (row, bits) in enumerate(zip(tokens, chosen, strict=True)):
                report(f"{budget} bits, {name}, text {text + 1}/{len(tokens)}")
                key = text, bits.tobytes()
                if key not in known:
                    ours = run(mixed.leaves, mixed.stacks, mixed.index(bits), jnp.asarray(row))
                    kl = float(text_kl(jnp.asarray(reference[text]), ours))
                    known[key] = pages_held(layout, host, bits), kl
                held, kl = known[key]
                measured.kl.append(kl)
                measured.pages.append(held)
                measured.mean_bits.append(mixed.mean_bits(bits))
            yield measured


def source_log_probabilities(
    source: str | Path, store: Store, tokens: Int32[np.ndarray, "S T"]
) -> list[Float32[np.ndarray, "half V"]]:
    """What the unquantised model expects after each token of the second half of each text.

    Raises:
        UserError: The store is not calibrated, or was made from another model.
    """
    experts = StoredExperts(store)
    if experts.calibration is None or experts.prompt_calibration is None:
        raise UserError(f"{store.directory} is not calibrated; run scripts/calibrate.py first")
    config, model = load_dense_model(source, np.float32)
    if config != store.model_config:
        raise UserError(f"{store.directory} was not made from {source}: their config.json differ")
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, row: second_half(nnx.merge(graph, state), row))
    return [np.asarray(forward(state, jnp.asarray(row))) for row in tokens]


def gather_evidence(
    mixed: MixedWidths,
    experts: StoredExperts,
    pages: Int[np.ndarray, "2 W"],
    tokens: np.ndarray,
    with_gradients: bool = False,
) -> Evidence:
    """What planners may look at, from a calibrated store and the first halves of texts."""
    seen, prompts = experts.calibration, experts.prompt_calibration
    assert seen is not None
    assert prompts is not None
    stored = [
        np.stack([experts.load_experts(layer, module).damage for module in (0, 1)], axis=1)
        for layer in range(len(mixed.stacks))
    ]
    damage = conditional_damage(
        np.stack(stored), seen.routing_mass, seen.tokens_seen, BASE.shrink_tokens
    )
    halves = tokens[:, : tokens.shape[1] // 2]
    of_prompts = _sums(mixed.model, halves, prompts.column_weight())
    of_texts = []
    if with_gradients:
        gradients = LayeredGradients(mixed.model)
        of_texts = [_fisher_damage(mixed, gradients, row) for row in tokens]
    return Evidence(damage, seen, prompts, pages, mixed.widths[0], of_prompts, of_texts)


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
    mixed: MixedWidths, gradients: LayeredGradients, row: np.ndarray
) -> Float[np.ndarray, "L E 2 W"]:
    """Damage from the gradients of one text, rank-one as in calibration."""
    _, found = gradients.measure(jnp.asarray(row, jnp.int32), jnp.ones(row.shape, bool))
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
