"""What prefill learns of a prompt, beside its keys and values."""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


@jax.tree_util.register_dataclass
@no_type_check  # also built of shapes, when compiling
@dataclass(frozen=True)
class PromptStatistics:
    """Sums over the real tokens of one chunk; see `pw_jax.planner.residual.PromptSums`.

    Attributes:
        norms: Sum, sum of squares and maximum of the norms of each layer's MoE inputs.
        routed: Tokens that chose each expert.
        ratio: Sum of the direct ratio over these; None in the mode "heads".
    """

    norms: Float32[Array, "L 3"]
    routed: Float32[Array, "L E"]
    ratio: Float32[Array, "L E"] | None


class PromptObserver:
    """Watches the MoE inputs while a prefill step is traced.

    Args:
        column_weight: What `x_j^2` counts for in the direct ratio of each expert, [L, E, D]; None
            to leave that out.
    """

    def __init__(self, column_weight: Any | None):
        self._column_weight = column_weight
        self._layers: dict[int, PromptStatistics] = {}

    def see(
        self,
        moe_index: int,
        x: Float[Array, "M D"],
        expert_ids: Int32[Array, "M k"],
        token_mask: Bool[Array, " M"],
        experts: int,
    ) -> None:
        """Takes in the inputs of one layer."""
        square = jnp.square(x.astype(jnp.float32))
        real = token_mask.astype(jnp.float32)
        length = jnp.sqrt(square.sum(axis=1)) * real
        norms = jnp.stack([length.sum(), jnp.square(length).sum(), length.max()])
        chosen = jax.nn.one_hot(expert_ids, experts).sum(axis=1) * real[:, None]
        ratio = None
        if self._column_weight is not None:
            # The sums of x_j^2 of each expert against its column errors, in the order that needs
            # no sums as large as the weights: first the product with every expert's errors.
            weighted = jnp.einsum("md,ed->me", square, self._column_weight[moe_index])
            ratio = (weighted * chosen).sum(axis=0)
        self._layers[moe_index] = PromptStatistics(norms, chosen.sum(axis=0), ratio)

    def statistics(self) -> PromptStatistics:
        """All layers, stacked in their order."""
        layers = [self._layers[index] for index in sorted(self._layers)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
