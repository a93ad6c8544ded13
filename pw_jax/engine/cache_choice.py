"""Which layers keep latents and which keep keys and values."""

from collections.abc import Mapping

import jax

from pallas_kernels.kv_reconstruct import UpProjections
from pallas_kernels.kv_reconstruct.api import decode_shape
from pallas_kernels.kv_reconstruct.configs import RATES
from pallas_kernels.kv_reconstruct.counts import COSTS, cheapest
from pallas_kernels.page_layout import PAGE_WORD_MULTIPLE, KvLayout, LatentLayout
from pw_jax.engine.config import EngineConfig
from pw_jax.errors import UserError
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import LatentLayer
from pw_jax.paging.layout import LARGEST_PAGE_WORDS, CacheShape, cache_layout

ANY_TOKEN_WORDS = 1 << 24


def choose_cache(
    model: ModelConfig, layers: Mapping[int, LatentLayer], config: EngineConfig
) -> tuple[CacheShape, ...]:
    """What each layer keeps of a token.

    With ``kv_cache="auto"`` a layer keeps latents if they take fewer bytes a token, and if a decode
    step over full sequences in all slots is not slower by the counts of `kv_reconstruct.counts`:
    the time of the cheapest mode over latents, against that of reading keys and values once. So
    MLA keeps its latent; factored keys that rotate are kept whole unless the user asks, because
    making them anew each step costs more than reading them.

    Args:
        model: The model.
        layers: Those that can keep latents; none over a mesh, where each device keeps its heads.
        config: The engine's settings.

    Raises:
        UserError: Latents are asked for and no layer has any.
    """
    if config.kv_cache == "full":
        return model.kv_shapes
    if config.kv_cache == "latent" and not layers:
        raise UserError(
            "a latent KV cache needs one device, and layers whose keys and values are factored "
            "(MLA, or a model of scripts/decompose.py), and has not both: choose the full cache"
        )
    return tuple(
        layers[index].kept
        if index in layers
        and (config.kv_cache == "latent" or _is_cheaper(model, index, layers[index], config))
        else full
        for index, full in enumerate(model.kv_shapes)
    )


def _is_cheaper(model: ModelConfig, index: int, latent: LatentLayer, config: EngineConfig) -> bool:
    full, kept = (_layout(shape, config) for shape in (model.kv_shapes[index], latent.kept))
    if kept.words_per_token >= full.words_per_token:
        return False
    assert isinstance(kept, LatentLayout)
    k_rank, v_rank = latent.kept.k_rank, latent.kept.v_rank or latent.kept.k_rank
    up = UpProjections(
        jax.ShapeDtypeStruct((latent.kv_heads, latent.k_dim, k_rank), config.kv_dtype),
        jax.ShapeDtypeStruct((latent.kv_heads, latent.v_dim, v_rank), config.kv_dtype),
    )
    blocks = -(-config.max_sequence_tokens // kept.tokens_per_page)
    shape = decode_shape(up, kept, latent.rotation, model.num_heads, config.slots, blocks)
    read = 4 * full.words_per_token * shape.tokens / RATES.bytes
    return COSTS[cheapest(shape)](shape).microseconds <= read + 2 * RATES.launch


def _layout(shape: CacheShape, config: EngineConfig) -> KvLayout | LatentLayout:
    """Of the largest usual page, or of a page as large as a token."""
    words = cache_layout(shape, config.kv_dtype, ANY_TOKEN_WORDS)[0].words_per_token
    page_words = max(LARGEST_PAGE_WORDS, -(-words // PAGE_WORD_MULTIPLE) * PAGE_WORD_MULTIPLE)
    return cache_layout(shape, config.kv_dtype, page_words)[0]
