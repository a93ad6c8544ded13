"""Loss of texts that go through a cache of pages chunk by chunk, as prompts do in an engine.

It is there to compare what a cache keeps: keys and values, or the latents that they come from.
"""

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from pw_jax.engine.cache_choice import choose_cache
from pw_jax.engine.config import EngineConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.latent import latent_layers
from pw_jax.paging.layout import PagingLayout, choose_page_words, paging_layout
from pw_jax.paging.memory import PagedMemory


@dataclass(frozen=True)
class CachedLoss:
    """Texts through a cache.

    Attributes:
        loss: Mean negative log-likelihood of the tokens but the first, in nats, for each text.
        pool_bytes: Bytes of the pages that these texts fill, of the array on the device.
        token_bytes: Bytes a token over all layers by the layout, rounding to pages apart.
    """

    loss: Float[np.ndarray, " S"]
    pool_bytes: int
    token_bytes: int


def cached_loss(
    model: CausalLm, tokens: Int32[np.ndarray, "S T"], config: EngineConfig
) -> CachedLoss:
    """Runs texts, all at once, a chunk of each at a time.

    Args:
        model: Without paged experts.
        tokens: Texts of equal length.
        config: Of the engine: what is kept (`kv_cache`, `kv_dtype`) and `prefill_chunk` are read.

    Raises:
        UserError: Latents are asked for and the model has none.
    """
    shapes = choose_cache(model.config, latent_layers(model), config)
    words = choose_page_words(shapes, kv_dtype=config.kv_dtype, expert_shape=None)
    layout = paging_layout(shapes, kv_dtype=config.kv_dtype, page_words=words)
    tables = _tables(layout, *tokens.shape)
    pages = 1 + sum(table.size for table in tables)  # page 0 takes what padding writes
    pool = jnp.zeros((pages, words), jnp.uint32)
    graph, state = nnx.split(model)

    @jax.jit
    def step(state: Any, pool: Array, chunk: Array, targets: Array, start: Array):
        running = nnx.merge(graph, state)
        places = start + jnp.arange(chunk.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(places, chunk.shape)
        memory = PagedMemory(pool, tuple(map(jnp.asarray, tables)), positions, None, layout)
        out = running(chunk, positions, memory)
        scores = jax.nn.log_softmax(running.logits(out.hidden))
        found = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        total = -jnp.where(targets >= 0, found, 0.0).sum(axis=1)
        return total, cast(PagedMemory, out.memory).pool

    targets = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -1, np.int32)], axis=1)
    total = np.zeros(len(tokens))
    for start in range(0, tokens.shape[1], config.prefill_chunk):
        part = slice(start, start + config.prefill_chunk)
        place = jnp.asarray(start, jnp.int32)
        found, pool = step(state, pool, tokens[:, part], targets[:, part], place)
        total += np.asarray(found, np.float64)
    return CachedLoss(total / (tokens.shape[1] - 1), pool.nbytes, layout.kv_token_bytes)


def _tables(layout: PagingLayout, texts: int, length: int) -> list[Int32[np.ndarray, "layers S n"]]:
    """Pages of each text in each layer of each group, numbered from 1."""
    tables, first = [], 1
    for group in layout.kv_groups:
        shape = len(group.layers), texts, group.blocks(length)
        count = int(np.prod(shape))
        tables.append(np.arange(first, first + count, dtype=np.int32).reshape(shape))
        first += count
    return tables
