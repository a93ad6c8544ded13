"""The engine on a GPU, at the layer shapes of Qwen1.5-MoE-A2.7B and with random weights."""

import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_doubles import StackedExperts, no_compilation

from pallas_kernels.implementation import Implementation
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.sequence import Request
from pw_jax.models import registry
from pw_jax.models.decoder import CausalLm
from pw_jax.paging.layout import ExpertFormat
from pw_jax.planner.config import PlannerConfig

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, EMBED, FFN = 3, 60, 2048, 1408
CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 4096,
    "hidden_size": EMBED,
    "intermediate_size": 5632,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": FFN,
    "shared_expert_intermediate_size": 5632,
    "max_position_embeddings": 8192,
}


class RandomExperts:
    """Random codes; tables as a Gaussian's would be, and scales that keep activations alive."""

    expert_format = ExpertFormat(3, 8, (2, 4))
    calibration = None
    prompt_calibration = None

    def load_experts(self, layer: int, module: int) -> StackedExperts:
        rows, columns = ((2 * FFN, EMBED), (EMBED, FFN))[module]
        generator = np.random.default_rng((layer, module))
        groups = rows // self.expert_format.rows_per_table[module]
        tables, scales = {}, {}
        for bits in range(3, 9):
            dtype = np.int8 if bits <= 6 else np.int16
            entries = np.sort(generator.standard_normal(1 << bits)) / 4
            entries = (np.clip(entries, -1, 1) * np.iinfo(dtype).max).astype(dtype)
            tables[bits] = np.broadcast_to(entries, (EXPERTS, groups, 1 << bits))
            scale = 4 / np.iinfo(dtype).max / columns**0.5
            scales[bits] = np.full((EXPERTS, rows), scale, np.float32)
        planes = generator.integers(0, 2**32, (EXPERTS, 8, rows, columns // 32), dtype=np.uint32)
        damage = 4.0 ** -np.arange(6) * generator.uniform(0.5, 2, (EXPERTS, 1))
        return StackedExperts(planes, tables, scales, damage)


@pytest.fixture(scope="module")
def model() -> CausalLm:
    return registry.random_model(registry.read_config(CONFIG), "paged", jnp.bfloat16)


def make_engine(model: CausalLm, mib: int, implementation: Implementation = "auto") -> Engine:
    config = EngineConfig(
        memory_budget_bytes=mib << 20,
        slots=16,
        max_sequence_tokens=2048,
        prefill_chunk=256,
        implementation=implementation,
        planner=PlannerConfig(bucket_floors=(3, 3, 3), restore_residence_steps=8),
    )
    return Engine(model, config, RandomExperts())


def requests(count: int, prompt: int, new: int) -> list[Request]:
    generator = np.random.default_rng(3)
    return [Request(tuple(generator.integers(0, 4096, prompt).tolist()), new) for _ in range(count)]


def test_kernels_and_references_generate_alike(model):
    """bf16 sums differ in order, so late tokens may part; the first ones must not."""
    texts = []
    both: tuple[Implementation, ...] = ("xla", "auto")
    for implementation in both:
        engine = make_engine(model, 4096, implementation)
        sequences = [engine.submit(request) for request in requests(4, 300, 8)]
        list(engine.run())
        texts.append([sequence.generated for sequence in sequences])
    same = np.mean([a[0] == b[0] for a, b in zip(*texts, strict=True)])
    assert same >= 0.75, texts


def test_pressure_and_steps(model):
    """Precision falls and rises under load; nothing compiles; the pool is not copied."""
    engine = make_engine(model, 2200)
    assert engine.precision is not None
    assert engine.temporary_bytes < engine.plan.pool_bytes // 4
    sequences = [engine.submit(request) for request in requests(16, 600, 500)]
    times, bits = [], []
    with no_compilation():
        while not engine.idle:
            started = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - started)
            bits.append(engine.precision.mean_bits)
            engine.check_pages()
    assert [len(s.generated) for s in sequences] == [500] * 16
    assert min(bits) < bits[0]
    decode = [t for t, r in zip(times, engine.trace, strict=True) if not r.prefilled_tokens]
    report = {
        "device": jax.devices()[0].device_kind,
        "layers": LAYERS,
        "pool_bytes": engine.plan.pool_bytes,
        "temporary_bytes": engine.temporary_bytes,
        "bits_first_least_last": [bits[0], min(bits), bits[-1]],
        "lowered": engine.precision.moves.lowered,
        "raised": engine.precision.moves.raised,
        "decode_turn_ms_median_p99": [
            1e3 * float(np.median(decode)),
            1e3 * float(np.percentile(decode, 99)),
        ],
        "turns": len(times),
    }
    print(json.dumps(report))
    if "PW_JAX_REPORT" in os.environ:
        Path(os.environ["PW_JAX_REPORT"]).write_text(json.dumps(report, indent=2) + "\n")
