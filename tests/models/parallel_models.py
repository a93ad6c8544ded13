"""Random models with every feature that decides how they lie on devices."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pw_jax.low_rank.layers import linear_shapes, use_low_rank
from pw_jax.models import registry

LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 46,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "rope_theta": 50.0,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 131,
    "hidden_size": 42,
    "word_embed_proj_dim": 42,
    "ffn_dim": 74,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
MLA = {
    "model_type": "deepseek_v2",
    "vocab_size": 131,
    "hidden_size": 46,
    "intermediate_size": 74,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 19,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "attention_bias": True,
}


def model_of(raw: dict, factored: bool = True):
    """A random model, its decomposable matrices factored with ranks of their own in each layer."""
    config = registry.read_config(raw)
    model = registry.build_model(config, "dense", jnp.float32)
    if factored:
        shapes = linear_shapes(model)
        names = [
            name for name in shapes if not name.split(".")[-1].startswith(("kv_", "q_a", "q_b"))
        ]
        ranks = {name: 5 + (7 * i) % 17 for i, name in enumerate(names)}
        use_low_rank(model, ranks, jnp.float32)
    random = np.random.default_rng(0)

    def value(path, leaf):
        noise = random.standard_normal(leaf.shape)
        if "bias" in str(path):
            return jnp.asarray(0.3 * noise, jnp.float32)
        if "norm" in str(path):
            return jnp.asarray(1 + 0.2 * noise, jnp.float32)
        return jnp.asarray(2.0 * noise / np.sqrt(leaf.shape[-1]), jnp.float32)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(value, state))
