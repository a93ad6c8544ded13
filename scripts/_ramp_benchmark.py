"""Decoding while keys and values ramp up and down: what turns cost in which pages change hands.

A few sequences decode throughout. Many more come at once, and experts lose pages to them; when they
have gone, experts get pages back. The model has random weights: time does not depend on them, and
the planner's work only on the number of blocks.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.dummy import RandomExperts, random_weights
from pallas_kernels.implementation import Implementation
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.memory_plan import plan_layout
from pw_jax.engine.sequence import Request
from pw_jax.engine.trace import StepRecord
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import latent_layers
from pw_jax.paging.allocator import Owner

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
}
"""A model that a CPU decodes in tens of milliseconds a step, and layers of Qwen1.5-MoE-A2.7B."""


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


def drive(engine: Engine, ramp: Ramp, seed: int = 0) -> list[StepRecord]:
    """Runs a ramp and gives the records of its turns."""
    first = len(engine.trace)
    for _ in _turns(engine, ramp, seed):
        engine.step()
    return engine.trace[first:]


def pages_handed_over(engine: Engine, ramp: Ramp, seed: int = 1) -> dict[str, int]:
    """Runs a ramp and follows page ids: pages of experts that hold keys one step boundary later.

    Every page is accounted for after every turn.
    """
    turns = pages = 0
    for _ in _turns(engine, ramp, seed):
        weights = engine.allocator.owned_ids(Owner.WEIGHT)
        engine.step()
        engine.check_pages()
        keys = engine.allocator.owned_ids(Owner.KV)
        moved = len(np.intersect1d(weights, keys, assume_unique=True))
        turns, pages = turns + (moved > 0), pages + moved
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


def summary(engine: Engine, records: list[StepRecord]) -> dict[str, Any]:
    """Decoding turns with and without plans or moves: times in milliseconds, and their ratio.

    A turn is judged by the median of the turns without a plan that decoded as many sequences.
    """
    assert engine.precision is not None
    planned = {event.step for event in engine.precision.events}
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
    config: ModelConfig, ramp: Ramp, dtype: str, implementation: Implementation
) -> Engine:
    """An engine whose pool holds experts at parent bits and the steady sequences, and no more.

    What the burst needs, experts must give.
    """
    experts = RandomExperts(config)
    settings = EngineConfig(
        slots=ramp.steady + ramp.burst,
        max_sequence_tokens=ramp.longest,
        prefill_chunk=ramp.prompt_tokens,
        implementation=implementation,
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


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names what XLA compiles inside."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if "compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def measure(engine: Engine, ramp: Ramp) -> dict[str, Any]:
    """A ramp to warm up and follow pages, then one that is timed."""
    handed_over = pages_handed_over(engine, ramp)
    with compilations() as compiled:
        records = drive(engine, ramp)
    return {
        "ramp": asdict(ramp),
        "handed_over_within_a_step": handed_over,
        "compilations": len(compiled),
        **summary(engine, records),
    }


def report(found: dict[str, Any]) -> str:
    """A few lines for the terminal."""
    lines = [
        f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in found[name].items())
        for name in (
            "turns_without_plan_ms",
            "turns_with_plan_ms",
            "plan_and_move_ms",
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
