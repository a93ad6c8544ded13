"""Models with experts, or with norms on both sides, over a mesh: what transformers says of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import factored, full_ranks, read

from checkpoints.huggingface import Checkpoint, load_weights
from pw_jax.models import registry
from pw_jax.models.memory import SequenceMemory
from pw_jax.tensor_parallel.model import parallelize
from sharding.mesh import tensor_mesh

SLOW = pytest.mark.slow
CASES = [
    pytest.param("gemma4_text", "gathered", 3, False),
    pytest.param("qwen2_moe", "sharded", 3, True),
    pytest.param("deepseek_v2", "gathered", 5, True, marks=SLOW),
    pytest.param("deepseek_v2_lite", "sharded", 2, True, marks=SLOW),
    pytest.param("gemma3_text", "sharded", 3, True, marks=SLOW),
    pytest.param("gemma3_text", "dense", 2, False, marks=SLOW),
    pytest.param("gemma4", "gathered", 8, True, marks=SLOW),
    pytest.param("gemma4_text", "sharded", 3, True, marks=SLOW),
    pytest.param("mixtral", "dense", 8, False, marks=SLOW),
    pytest.param("qwen2_moe", "naive", 3, True, marks=SLOW),
]


@pytest.mark.parametrize(("name", "layout", "devices", "factors"), CASES)
def test_parity(name, layout, devices, factors):
    golden = read(f"{name}/reference")
    weights = load_weights(Checkpoint(golden.directory), np.float32)
    ranks = full_ranks(golden.config) if factors else {}
    model = registry.build_model(golden.config, ranks=ranks)
    model = registry.set_weights(model, factored(weights, ranks), on_host=True)
    over_devices = parallelize(model, tensor_mesh(devices), layout)

    @jax.jit
    def forward(model, tokens, mask):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        out = model(tokens, positions, SequenceMemory(mask))
        return model.logits(out.hidden), out.routing_mass

    logits, mass = forward(over_devices, golden.tokens, golden.mask)
    error = np.abs(np.asarray(logits)[golden.mask] - golden.logits)
    assert error.max() < 2e-4
    experts = golden.config.expert_shape.experts if golden.config.expert_shape else 0
    assert mass.shape == (len(golden.config.moe_layers), experts)
    if golden.config.renormalize and name != "gemma4_text":
        np.testing.assert_allclose(mass.sum(1), golden.mask.sum(), rtol=1e-5)
