"""Step times of an engine over latents, with and without sizes of its page tables."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pw_jax.engine.buckets import UsedTables
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.models import registry
from pw_jax.models.decoder import CausalLm

LAYERS, RANK, SLOTS, CHUNK, DECODE_STEPS = 2, 96, 4, 64, 24
MODEL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 16,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Record:
    """One length of text.

    Attributes:
        context: Tokens of each prompt.
        table_tokens: Tokens that a page table holds.
        sizes: Steps are compiled for several lengths of the tables.
        programs: Compiled prefill and decode steps.
        decode_ms: Host time of a turn that only decodes, all slots full: median.
        decode_p90_ms: 90th percentile.
        prefill_ms: Of a turn that only prefills, up to the prompt's last chunk: median of three;
            None for shorter prompts.
    """

    context: int
    table_tokens: int
    sizes: bool
    programs: int
    decode_ms: float
    decode_p90_ms: float
    prefill_ms: float | None


def factored_model() -> CausalLm:
    """Random, its keys and values factored."""
    ranks = {
        f"model.layers.{layer}.self_attn.{name}_proj": RANK
        for layer in range(LAYERS)
        for name in "kv"
    }
    return registry.random_model(registry.read_config(MODEL), ranks=ranks)


def run(contexts: list[int], table_tokens: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Measures every length of text, with one size of tables and with several."""
    model = factored_model()
    for sizes in (False, True):
        config = EngineConfig(
            slots=SLOTS,
            max_sequence_tokens=table_tokens,
            prefill_chunk=CHUNK,
            kv_cache="latent",
            prefix_sharing=False,
            latent_bucket_tokens=256 if sizes else table_tokens,
        )
        engine = Engine(model, config)
        lengths = (table_tokens, config.latent_bucket_tokens)
        tables = UsedTables(engine.layout, SLOTS, engine.plan.kv_blocks, *lengths)
        engine.generate([[1] * CHUNK], 2, stop_token_ids=())  # the first call of all takes longer
        programs = len(tables.prefill) + len(tables.decode)
        for context in contexts:
            times = _measure(engine, context)
            report(asdict(Record(context, table_tokens, sizes, programs, *times)))


def _measure(engine: Engine, context: int) -> tuple[float, float, float | None]:
    draw = np.random.default_rng(context)
    first = len(engine.trace)
    prompts = draw.integers(0, MODEL["vocab_size"], (SLOTS, context)).tolist()
    engine.generate(prompts, SLOTS * -(-context // CHUNK) + DECODE_STEPS, stop_token_ids=())
    trace = engine.trace[first:]
    full = [r for r in trace if r.decoded_tokens == SLOTS and not r.prefilled_tokens]
    decode = [1e3 * r.step_seconds for r in full[2 : DECODE_STEPS + 2]]
    # A turn waits for the step before it. The first prompt has nobody beside it.
    chunks = -(-context // CHUNK)
    prefill = [1e3 * r.step_seconds for r in trace[chunks - 3 : chunks]] if chunks > 3 else []
    return (
        float(np.median(decode)),
        float(np.percentile(decode, 90)),
        float(np.median(prefill)) if prefill else None,
    )
