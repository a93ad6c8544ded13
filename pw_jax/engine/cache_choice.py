"""Which layers keep latents and which keep keys and values."""

from collections.abc import Iterable, Mapping

import jax

from pallas_kernels.kv_reconstruct import UpProjections
from pallas_kernels.kv_reconstruct.api import decode_shape
from pallas_kernels.kv_reconstruct.configs import RATES
from pallas_kernels.kv_reconstruct.counts import COSTS, cheapest
from pallas_kernels.page_layout import PAGE_WORD_MULTIPLE, KvLayout, LatentLayout
from pw_jax.engine.config import EngineConfig
from pw_jax.errors import UserError
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.latent import LatentLayer, latent_layers
from pw_jax.paging.layout import LARGEST_PAGE_WORDS, CacheShape, cache_layout
from pw_jax.tensor_parallel.model import ParallelModel

ANY_TOKEN_WORDS = 1 << 24


def latents_of(model: CausalLm | ParallelModel, config: EngineConfig) -> dict[int, LatentLayer]:
    """The layers of a model that can keep latents, as a device has them.

    Args:
        model: On one device or over those of a mesh.
        config: The engine's settings.

    Raises:
        UserError: Latents are asked for in a layout whose devices have no whole latents.
    """
    if not isinstance(model, ParallelModel):
        return latent_layers(model)
    if config.kv_cache == "latent" and not model.layout.whole_latents:
        raise UserError(
            f"a latent KV cache is not possible with --layout {model.layout.name}: a device has a "
            "part of each latent only, and keys and values of all tokens would have to be reduced "
            "over the devices in every step; choose gathered or sharded, or the full cache"
        )
    return model.latent_layers


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
        layers: Those that can keep latents. Over a mesh a latent is whole on every device, while
            the heads of ``model.kv_shapes`` are those of one.
        config: The engine's settings.

    Raises:
        UserError: Latents are asked for and no layer has any.
    """
    if config.kv_cache == "full":
        return model.kv_shapes
    if config.kv_cache == "latent" and not layers:
        raise UserError(
            "a latent KV cache needs layers whose keys and values are factored (MLA, or a model of "
            "scripts/decompose.py), and this model has none: choose the full cache"
        )
    return tuple(
        layers[index].kept
        if index in layers
        and (config.kv_cache == "latent" or _is_cheaper(model, index, layers[index], config))
        else full
        for index, full in enumerate(model.kv_shapes)
    )


def token_bytes(kept: Iterable[CacheShape], kv_dtype: str) -> int:
    """Bytes that a token takes in the cache over all layers, page rounding apart."""
    layouts = (cache_layout(shape, kv_dtype, ANY_TOKEN_WORDS)[0] for shape in kept)
    return sum(4 * layout.words_per_token for layout in layouts)


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
    shape = decode_shape(up, kept, latent.rotation, latent.heads, config.slots, blocks)
    read = 4 * full.words_per_token * shape.tokens / RATES.bytes
    return COSTS[cheapest(shape)](shape).microseconds <= read + 2 * RATES.launch


def _layout(shape: CacheShape, config: EngineConfig) -> KvLayout | LatentLayout:
    """Of the largest usual page, or of a page as large as a token."""
    words = cache_layout(shape, config.kv_dtype, ANY_TOKEN_WORDS)[0].words_per_token
    page_words = max(LARGEST_PAGE_WORDS, -(-words // PAGE_WORD_MULTIPLE) * PAGE_WORD_MULTIPLE)
    return cache_layout(shape, config.kv_dtype, page_words)[0]
