"""Planners while the subject changes: one stream of texts, in phases.

Every planner goes through the same texts in the same order. Its routing mass decays and is carried
from text to text, as in an engine; for each text it learns from the first half, chooses widths, and
is measured on the second half, like in `checkpoints.compare_planners`. So a planner that follows
the routing has seen the texts before, and one that does not has not.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from checkpoints.compare_planners import (
    BASE,
    Evidence,
    budget_pages,
    gather_evidence,
    source_log_probabilities,
    text_kl,
)
from checkpoints.engine import StoredExperts
from checkpoints.mixed_widths import MixedWidths, expert_layout, page_table, second_half
from checkpoints.store import Store
from pw_jax.planner.config import PlannerConfig

EDGES = (0.6, 0.75, 0.9, 1.1, 1.3, 1.6)
FINE = dataclasses.replace(
    BASE,
    bucket_edges=EDGES,
    bucket_multipliers=(0.5, 0.65, 0.8, 1.0, 1.2, 1.45, 1.8),
    bucket_floors=(3,) * (len(EDGES) + 1),
    bucket_hysteresis=0.05,
)
"""Buckets for models whose experts are used nearly alike: the default ones take in all of them."""

PLANNERS: Mapping[str, PlannerConfig] = {
    "full": BASE,
    "full_fine_buckets": FINE,
    "full_direct": dataclasses.replace(BASE, prompt_residual="direct"),
    "no_routing": dataclasses.replace(BASE, routing=False),
    "no_page_movement": dataclasses.replace(BASE, page_movement=False),
    "uniform": dataclasses.replace(BASE, kind="uniform"),
}


@dataclass(frozen=True)
class Streamed:
    """One planner over the whole stream; lists hold one number a text.

    Attributes:
        planner: Name in `PLANNERS`.
        kl: Mean KL to the source over the measured positions, in nats.
        mean_bits: Mean width of a weight.
        changed: Share of blocks whose width is not that of the text before.
        moved_buckets: Share of experts in another bucket than calibration put them.
    """

    planner: str
    kl: list[float]
    mean_bits: list[float]
    changed: list[float]
    moved_buckets: list[float]


def stream_planners(
    source: str | Path,
    store: Store,
    phases: Mapping[str, Int32[np.ndarray, "S T"]],
    budget_bits: float,
    report: Callable[[str], None] = lambda stage: None,
) -> Iterator[Streamed]:
    """Runs every planner of `PLANNERS` through the phases, one after another.

    Args:
        source: The Hugging Face folder that the store was made from.
        store: A converted checkpoint with a calibration by scripts/calibrate.py.
        phases: Texts of equal length by the name of their phase, in order.
        budget_bits: Pages that all experts take at this width.
        report: Called with what is being done.

    Raises:
        UserError: No such calibration, or the wrong source.
    """
    tokens = np.concatenate(list(phases.values()))
    report("source")
    reference = source_log_probabilities(source, store, tokens)
    report("all widths")
    mixed, layout = MixedWidths(store), expert_layout(store)
    report("prompts")
    evidence = gather_evidence(mixed, StoredExperts(store), page_table(layout), tokens)
    limit = budget_pages(evidence.pages, evidence.damage.shape[:3], budget_bits, store.widths[0])
    run = jax.jit(
        lambda leaves, stacks, index, row: second_half(mixed.at(leaves, stacks, index), row)
    )
    known: dict[tuple[int, bytes], float] = {}  # planners often agree
    for name, config in PLANNERS.items():
        report(name)
        streamed = Streamed(name, [], [], [], [])
        before: np.ndarray | None = None
        for text, (bits, moved) in enumerate(_stream(evidence, config, limit)):
            key = text, bits.tobytes()
            if key not in known:
                row = jnp.asarray(tokens[text])
                ours = run(mixed.leaves, mixed.stacks, mixed.index(bits), row)
                known[key] = float(text_kl(jnp.asarray(reference[text]), ours))
            streamed.kl.append(known[key])
            streamed.mean_bits.append(mixed.mean_bits(bits))
            streamed.changed.append(0.0 if before is None else float((bits != before).mean()))
            streamed.moved_buckets.append(moved)
            before = bits
        yield streamed


def _stream(
    evidence: Evidence, config: PlannerConfig, limit: int
) -> Iterator[tuple[np.ndarray, float]]:
    """Widths for each text, and how many experts have left their bucket."""
    routing = first = evidence.start(config)
    for mass, sums in evidence.of_prompts:
        if config.moves_pages:
            routing = routing.update(mass, sums.tokens)
        moved = float((routing.buckets != first.buckets).mean())
        yield evidence.choose(config, routing, sums, limit), moved
