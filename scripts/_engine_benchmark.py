"""Whole generations with random weights: time, memory, moves, and the bytes that a step needs."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _step_profile import profile_steps

from checkpoints.dummy import RandomExperts, dummy_engine, read_model_config
from pallas_kernels.implementation import Implementation
from pw_jax.engine.compilations import compilations
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.memory_plan import plan_layout
from pw_jax.engine.sequence import Request, Sequence
from pw_jax.engine.trace import StepRecord
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import latent_layers
from pw_jax.models.moe import ExpertStore
from pw_jax.paging.layout import PagingLayout
from pw_jax.planner.config import PlannerConfig, PlannerKind

MEASURED_BYTES_PER_SECOND = 4.0e12
"""What reads of an H200's memory reach (docs/speed.md)."""

SHARED = "; all layers share one layer's planes in host memory"
PROFILED_STEPS = 8
RAMP_TOKENS = 4
"""Tokens of a ramp's first sequence for each one of the others."""


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        config: A config.json.
        batch: Sequences at once.
        input_len: Tokens of a prompt.
        output_len: Tokens to generate.
        experts: Pages, or plain bfloat16 arrays.
        bits: One fixed width for all experts; None leaves it to the planner.
        planner: Which planner that is.
        budget_gib: For weights and pages; None takes just what is needed.
        kv_ramp: The first sequence goes on alone, so that precision comes back.
        prefill_chunk: Tokens of a prefill step.
        dtype: Of weights and activations.
        implementation: Which kernels run.
    """

    config: Path
    batch: int
    input_len: int
    output_len: int
    experts: ExpertStore = "paged"
    bits: int | None = None
    planner: PlannerKind = "full"
    budget_gib: float | None = None
    kv_ramp: bool = False
    prefill_chunk: int = 256
    dtype: str = "bfloat16"
    implementation: Implementation = "auto"


@dataclass(frozen=True)
class EngineRecord:
    """What came out. Times of a token are those of turns that ran no prompt, in milliseconds.

    Attributes:
        ready_seconds: Making the engine: weights, host pages, compilation, loading the pool.
        tokens_per_second: Generated tokens over the whole time, prompts included.
        decode_tokens_per_second: Of the turns that ran no prompt.
        first_token_ms: From the start to each sequence's first token: median and largest.
        token_ms: Median and 99th percentile.
        host_ms: Of these turns, the time that the host did not wait for the device: median and
            99th percentile.
        moving_token_ms: Median and 99th percentile of turns that planned or moved; None without.
        needed_gb: Bytes that a median step must read, in 10^9; see `step_bytes`.
        roofline_ms: The same over `MEASURED_BYTES_PER_SECOND`.
        over_roofline: Median token time over it.
        budget_bytes: For weights and pages.
        temporary_bytes: What XLA adds during a step.
        peak_bytes: The device's own count at most, loading included; None where it keeps none.
        bits_first_least_last: Mean bits a weight; None without pages.
        lowered: Blocks lowered.
        raised: Blocks raised.
        preemptions: Sequences preempted.
        failed: Copies failed.
        bytes_moved: Into the pool after loading.
        compilations: After warm-up.
        turns: In all.
    """

    ready_seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    first_token_ms: tuple[float, float]
    token_ms: tuple[float, float]
    host_ms: tuple[float, float]
    moving_token_ms: tuple[float, float] | None
    needed_gb: float
    roofline_ms: float
    over_roofline: float
    budget_bytes: int
    temporary_bytes: int
    peak_bytes: int | None
    bits_first_least_last: tuple[float, float, float] | None
    lowered: int
    raised: int
    preemptions: int
    failed: int
    bytes_moved: int
    compilations: int
    turns: int


def run(job: Job, *, profile: bool = False, wait_for: Path | None = None) -> dict[str, Any]:
    """Runs a job, after a short one to warm up.

    Args:
        job: What to run.
        profile: Also show where the device spends the time of a decode step.
        wait_for: Once all is ready, PATH.ready is made and PATH waited for, so that several runs
            can be made ready at once and timed one by one.

    Returns:
        The job and the record, ready for JSON.
    """
    model = read_model_config(job.config)
    began = perf_counter()
    engine = dummy_engine(job.config, engine_config(job, model), job.dtype, job.experts)
    ready = perf_counter() - began
    for request in _requests(job, model.vocab_size, new=4):
        engine.submit(request)
    list(engine.run())
    if wait_for is not None:
        wait_for.with_name(wait_for.name + ".ready").touch()
        while not wait_for.exists():
            sleep(0.05)
    with compilations() as compiled:
        measured = _measure(engine, _requests(job, model.vocab_size))
    record = _record(engine, model, measured)
    record = replace(record, ready_seconds=round(ready, 2), compilations=len(compiled))
    result = {
        "job": {**asdict(job), "config": job.config.name},
        "weights": "random" + SHARED * (engine.precision is not None),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **asdict(record),
    }
    if profile:
        result["profile_us"] = _profile(engine, _requests(job, model.vocab_size))
    return result


class _Measured(NamedTuple):
    """One generation: its turns, the turn before, and when it all happened."""

    before: StepRecord
    trace: list[StepRecord]
    sequences: list[Sequence]
    first_token: list[float]
    seconds: float


def _measure(engine: Engine, requests: list[Request]) -> _Measured:
    first = len(engine.trace)
    sequences = [engine.submit(request) for request in requests]
    began = perf_counter()
    first_token: dict[int, float] = {}
    for event in engine.run():
        first_token.setdefault(event.sequence.number, perf_counter() - began)
    seconds = perf_counter() - began
    times = list(first_token.values())
    return _Measured(engine.trace[first - 1], engine.trace[first:], sequences, times, seconds)


def _profile(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """Decode steps in the middle of another generation."""
    sequences = [engine.submit(request) for request in requests]
    while any(len(sequence.generated) < PROFILED_STEPS for sequence in sequences):
        engine.step()
    profile = profile_steps(engine.step, PROFILED_STEPS)
    list(engine.run())
    return profile


def engine_config(job: Job, model: ModelConfig) -> EngineConfig:
    """The engine's settings for a job."""
    longest = job.input_len + job.output_len * (RAMP_TOKENS if job.kv_ramp else 1)
    planner = PlannerConfig(kind=job.planner)
    if job.bits is not None:
        planner = PlannerConfig(bucket_floors=(job.bits,) * 3, page_movement=False)
    config = EngineConfig(
        slots=job.batch,
        max_sequence_tokens=longest,
        prefill_chunk=job.prefill_chunk,
        prefix_sharing=False,  # the same prompts again, and all of them computed
        implementation=job.implementation,
        planner=planner,
    )
    if job.budget_gib is not None:
        return replace(config, memory_budget_bytes=int(job.budget_gib * 2**30))
    if job.bits is not None and job.experts == "paged" and model.moe_layers:
        return replace(config, memory_budget_bytes=exact_budget(job, model, config))
    return config


def exact_budget(job: Job, model: ModelConfig, config: EngineConfig) -> int:
    """Bytes that all experts at ``job.bits`` and all slots at full length need."""
    shapes = registry.build_model(model, "paged")
    expert_format = RandomExperts(model).expert_format
    layout = plan_layout(model, config, expert_format, latent_layers(shapes))
    assert layout.matrices is not None
    assert job.bits is not None
    arrays = registry.parameter_count(shapes)
    experts = layout.moe_layers * layout.experts
    pages = 1 + config.slots * layout.kv_pages(config.max_sequence_tokens)
    pages += experts * sum(matrix.pages(job.bits) for matrix in layout.matrices)
    return arrays * jnp.dtype(job.dtype).itemsize + pages * layout.page_bytes


def step_bytes(
    model: ModelConfig,
    layout: PagingLayout,
    batch: int,
    context: float,
    mean_bits: float | None,
) -> float:
    """Bytes that one decode step cannot do without reading.

    All weights outside the experts but for the embedding's unused rows; of the experts those that
    ``batch`` tokens reach if they choose evenly and apart, ``E (1 - (1 - k / E)^B)`` a layer, at
    their bits with the tables of the nearest width; keys and values of ``context`` tokens a
    sequence, or of the window if that is less.

    Args:
        model: The model.
        layout: Its pages.
        batch: Sequences.
        context: Tokens of each so far.
        mean_bits: Of the experts; None for bfloat16 arrays.
    """
    outside = registry.parameter_shapes(registry.build_model(model, "paged", jnp.bfloat16))
    total = 0.0
    for name, shape in outside.items():
        if "embed_tokens" not in name or model.tie_word_embeddings:
            total += shape.size * shape.dtype.itemsize
    shape = model.expert_shape
    if shape is not None:
        reached = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** batch)
        if layout.matrices is None or mean_bits is None:
            of_expert = 2.0 * 3 * shape.ffn * shape.embed
        else:
            of_expert = sum(
                matrix.rows * matrix.columns * mean_bits / 8
                + 4 * matrix.table_words(round(mean_bits))
                for matrix in layout.matrices
            )
        total += len(model.moe_layers) * reached * of_expert
    for group in layout.kv_groups:
        seen = context if group.window is None else min(context, group.window)
        total += batch * seen * 4 * group.layout.words_per_token * len(group.layers)
    return total


def _requests(job: Job, vocabulary: int, new: int | None = None) -> list[Request]:
    generator = np.random.default_rng(1)
    prompts = generator.integers(0, vocabulary, (job.batch, job.input_len)).tolist()
    lengths = [new or job.output_len] * job.batch
    if job.kv_ramp and new is None:
        lengths[0] *= RAMP_TOKENS
    return [Request(tuple(prompt), most) for prompt, most in zip(prompts, lengths, strict=True)]


def _record(engine: Engine, model: ModelConfig, measured: _Measured) -> EngineRecord:
    before, trace, sequences, first_token, seconds = measured
    decode = [r for r in trace if r.decoded_tokens and not r.prefilled_tokens]
    batch = int(np.median([r.decoded_tokens for r in decode]))
    bits = [r.mean_bits for r in trace if r.mean_bits is not None]
    context = float(np.median([len(s.tokens) for s in sequences]))
    context -= sequences[-1].request.max_new_tokens / 2
    middle = float(np.median(bits)) if bits else None
    needed = step_bytes(model, engine.layout, batch, context, middle)
    roofline = 1e3 * needed / MEASURED_BYTES_PER_SECOND
    token_ms = _spread([r.step_seconds for r in decode])
    moving = _moving(decode, before)
    last, memory = trace[-1], jax.devices()[0].memory_stats() or {}
    return EngineRecord(
        ready_seconds=0.0,
        tokens_per_second=round(sum(len(s.generated) for s in sequences) / seconds, 1),
        decode_tokens_per_second=round(
            sum(r.decoded_tokens for r in decode) / sum(r.step_seconds for r in decode), 1
        ),
        first_token_ms=(
            round(1e3 * float(np.median(first_token)), 3),
            round(1e3 * max(first_token), 3),
        ),
        token_ms=token_ms,
        host_ms=_spread([r.step_seconds - r.wait_seconds for r in decode]),
        moving_token_ms=_spread([r.step_seconds for r in moving]) if moving else None,
        needed_gb=round(needed / 1e9, 3),
        roofline_ms=round(roofline, 3),
        over_roofline=round(token_ms[0] / roofline, 2),
        budget_bytes=engine.plan.budget_bytes,
        temporary_bytes=engine.temporary_bytes,
        peak_bytes=memory.get("peak_bytes_in_use"),
        bits_first_least_last=(bits[0], min(bits), bits[-1]) if bits else None,
        lowered=last.lowered - before.lowered,
        raised=last.raised - before.raised,
        preemptions=last.preemptions - before.preemptions,
        failed=last.failed - before.failed,
        bytes_moved=last.bytes_moved - before.bytes_moved,
        compilations=0,
        turns=len(trace),
    )


def _moving(decode: list[StepRecord], before: StepRecord) -> list[StepRecord]:
    """Turns in which a block was lowered or raised."""
    pairs = zip([before, *decode], decode, strict=False)
    return [r for last, r in pairs if (r.lowered, r.raised) != (last.lowered, last.raised)]


def _spread(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    median, high = np.percentile(seconds, (50, 99))
    return round(1e3 * float(median), 3), round(1e3 * float(high), 3)
