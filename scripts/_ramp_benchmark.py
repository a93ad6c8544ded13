"""Decoding while keys and values ramp up and down: what turns cost in which pages change hands.

A few sequences decode throughout. Many more come at once, and experts lose pages to them; when they
have gone, experts get pages back. The model has random weights: time does not depend on them, and
the planner's work only on the number of blocks.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.dummy import RandomExperts, random_weights
from pallas_kernels.implementation import Implementation
from pw_jax.engine.compilations import compilations
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.memory_plan import plan_layout
from pw_jax.engine.sequence import Request
from pw_jax.engine.trace import StepRecord
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import latent_layers
from pw_jax.paging.allocator import Owner
from pw_jax.planner.config import PlannerConfig

SLOW = 1.5
"""A turn is slow beyond this many medians."""

LEAST = 8
"""Turns without a plan that a median needs."""

PERCENTILES = (50, 90, 99, 100)


SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen1.5-moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    # As many blocks, pages a plane and tokens a page as Qwen1.5-MoE-A2.7B with pages of 64 KiB, but
    # pages of 512 bytes: the host has the same to do.
    "qwen-pages": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 60,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 352,
        "shared_expert_intermediate_size": 64,
    },
}
"""Models: one that a CPU decodes in tens of milliseconds a step, layers of Qwen1.5-MoE-A2.7B, and
what is left of these where a device is idle."""


def model_config(shape: str, layers: int) -> ModelConfig:
    """One of `SHAPES` with a number of layers."""
    return registry.read_config(
        {"model_type": "qwen2_moe", "num_hidden_layers": layers, **SHAPES[shape]}
    )


@dataclass(frozen=True)
class Ramp:
    """Who comes when.

    Attributes:
        steady: Sequences that run throughout.
        burst: Sequences that come together and go together.
        quiet_turns: Turns before the burst, and least turns after it.
        burst_tokens: Tokens that each sequence of the burst generates.
        prompt_tokens: Of every sequence; one prefill chunk.
    """

    steady: int
    burst: int
    quiet_turns: int
    burst_tokens: int
    prompt_tokens: int

    @property
    def turns(self) -> int:
        """Turns in all: every prompt takes one."""
        return self.steady + 3 * self.quiet_turns + self.burst + self.burst_tokens

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self.prompt_tokens + self.turns + 1


def drive(engine: Engine, ramp: Ramp, seed: int = 0) -> list[tuple[StepRecord, float]]:
    """Runs a ramp: the record of each turn, and the processor's time of this thread in it."""
    turns = []
    for _ in _turns(engine, ramp, seed):
        began = time.thread_time()
        engine.step()
        turns.append((engine.trace[-1], time.thread_time() - began))
    return turns


def pages_handed_over(engine: Engine, ramp: Ramp, seed: int = 1) -> dict[str, int]:
    """Runs a ramp and follows page ids: pages of experts that hold keys one step boundary later.

    An expert's page that is freed before a step is dispatched may hold keys in that step; one that
    is freed after it, ahead of need, in the next. Every page is accounted for after every turn.
    """
    turns = pages = 0
    ahead = np.zeros(0, np.int32)  # freed by the turn before, after its step
    for _ in _turns(engine, ramp, seed):
        weights, keys = (engine.allocator.owned_ids(owner) for owner in (Owner.WEIGHT, Owner.KV))
        engine.step()
        engine.check_pages()
        new_keys = np.setdiff1d(engine.allocator.owned_ids(Owner.KV), keys)
        moved = len(np.intersect1d(new_keys, np.concatenate([weights, ahead])))
        turns, pages = turns + (moved > 0), pages + moved
        ahead = np.intersect1d(weights, engine.allocator.owned_ids(Owner.FREE))
    return {"turns": turns, "pages": pages}


def _turns(engine: Engine, ramp: Ramp, seed: int) -> Iterator[int]:
    """Submits the sequences of a ramp in time; at each turn the caller steps the engine."""
    generator = np.random.default_rng(seed)

    def submit(count: int, tokens: int) -> None:
        for _ in range(count):
            prompt = generator.integers(0, engine.model_config.vocab_size, ramp.prompt_tokens)
            engine.submit(Request(tuple(prompt.tolist()), tokens))

    submit(ramp.steady, ramp.turns)
    for turn in itertools.count():
        if turn == ramp.steady + ramp.quiet_turns:
            submit(ramp.burst, ramp.burst_tokens)
        yield turn
        if engine.idle:
            return


def summary(engine: Engine, turns: list[tuple[StepRecord, float]]) -> dict[str, Any]:
    """Decoding turns with and without plans or moves: times in milliseconds, and their ratio.

    A turn is judged by the median of the turns without a plan that decoded as many sequences.

    Args:
        engine: After the run.
        turns: From `drive`.
    """
    assert engine.precision is not None
    records, host = [record for record, _ in turns], {record.step: cpu for record, cpu in turns}
    planned = {event.step for event in engine.precision.moves.events}
    decoding = [r for r in records if r.prefilled_tokens == 0 and r.decoded_tokens > 0]
    plain: dict[int, list[float]] = {}
    for record in decoding:
        if record.step not in planned:
            plain.setdefault(record.decoded_tokens, []).append(record.step_seconds)
    medians = {n: float(np.median(found)) for n, found in plain.items() if len(found) >= LEAST}
    judged = [r for r in decoding if r.decoded_tokens in medians]
    ratios = {r.step: r.step_seconds / medians[r.decoded_tokens] for r in judged}
    without, own = (
        [r for r in judged if (r.step in planned) == has_plan] for has_plan in (False, True)
    )
    # Without its plan such a turn would not have been slow.
    because = [
        r
        for r in own
        if r.step_seconds > SLOW * medians[r.decoded_tokens] >= r.step_seconds - r.plan_seconds
    ]
    bits = [record.mean_bits for record in records if record.mean_bits is not None]
    return {
        "medians_by_sequences": {n: round(1e3 * m, 4) for n, m in sorted(medians.items())},
        "turns_without_plan_ms": _percentiles(1e3 * r.step_seconds for r in without),
        "turns_with_plan_ms": _percentiles(1e3 * r.step_seconds for r in own),
        "plan_and_move_ms": _percentiles(1e3 * r.plan_seconds for r in own),
        "host_without_plan_ms": _percentiles(1e3 * host[r.step] for r in without),
        "host_with_plan_ms": _percentiles(1e3 * host[r.step] for r in own),
        "ratio_without_plan": _percentiles(ratios[r.step] for r in without),
        "ratio_with_plan": _percentiles(ratios[r.step] for r in own),
        "slow_without_plan": sum(ratios[r.step] > SLOW for r in without),
        "slow_with_plan": sum(ratios[r.step] > SLOW for r in own),
        "slow_because_of_plan": len(because),
        "not_judged": len(decoding) - len(judged),
        "lowered": records[-1].lowered - records[0].lowered,
        "raised": records[-1].raised - records[0].raised,
        "preemptions": records[-1].preemptions - records[0].preemptions,
        "mean_bits": [bits[0], min(bits), bits[-1]],
        "kv_pages_most": max(record.kv_pages for record in records),
    }


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    found = np.array(list(values))
    if not len(found):
        return {"count": 0}
    edges = np.percentile(found, PERCENTILES)
    return {"count": len(found)} | {
        f"p{name}": round(float(value), 4) for name, value in zip(PERCENTILES, edges, strict=True)
    }


def make_engine(
    config: ModelConfig,
    ramp: Ramp,
    dtype: str,
    implementation: Implementation,
    planner: PlannerConfig,
) -> Engine:
    """An engine whose pool holds experts at parent bits and the steady sequences, and no more.

    What the burst needs, experts must give.
    """
    experts = RandomExperts(config)
    settings = EngineConfig(
        slots=ramp.steady + ramp.burst,
        max_sequence_tokens=ramp.longest,
        prefill_chunk=ramp.prompt_tokens,
        prefix_sharing=False,  # the same ramp again, and all of it computed
        implementation=implementation,
        planner=planner,
    )
    model = random_weights(registry.build_model(config, "paged", jnp.dtype(dtype)))
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    layout = plan_layout(config, settings, experts.expert_format, latent_layers(model))
    assert layout.matrices is not None
    pages = ramp.steady * layout.kv_pages(ramp.longest)
    pages += (
        sum(m.pages(m.parent_bits) for m in layout.matrices) * layout.moe_layers * layout.experts
    )
    marks = settings.planner.restore_watermark_blocks + 1
    pages += 1 + marks * sum(len(group.layers) for group in layout.kv_groups)
    budget = arrays + pages * layout.page_bytes
    return Engine(model, replace(settings, memory_budget_bytes=budget), experts)


def measure(engine: Engine, ramp: Ramp) -> dict[str, Any]:
    """A ramp to warm up and follow pages, then one that is timed."""
    handed_over = pages_handed_over(engine, ramp)
    with compilations() as compiled:
        turns = drive(engine, ramp)
    return {
        "ramp": asdict(ramp),
        "handed_over_within_a_step": handed_over,
        "compilations": len(compiled),
        **summary(engine, turns),
    }


def report(found: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = [
        f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in found[name].items())
        for name in (
            "turns_without_plan_ms",
            "turns_with_plan_ms",
            "plan_and_move_ms",
            "host_without_plan_ms",
            "host_with_plan_ms",
            "ratio_without_plan",
            "ratio_with_plan",
        )
    ]
    handed = found["handed_over_within_a_step"]
    lines += [
        f"slow turns (more than {SLOW} medians): {found['slow_without_plan']} without a plan, "
        f"{found['slow_with_plan']} with one, {found['slow_because_of_plan']} because of it; "
        f"{found['not_judged']} not judged",
        f"bits {' -> '.join(f'{bits:.2f}' for bits in found['mean_bits'])}, "
        f"{found['lowered']} lowered, {found['raised']} raised, "
        f"{found['preemptions']} preemptions, {found['compilations']} compilations",
        f"{handed['pages']} pages of experts held keys one boundary later, in "
        f"{handed['turns']} turns",
    ]
    return "\n".join(lines)
