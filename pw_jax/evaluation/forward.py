"""A model's forward pass over whole sequences, compiled once for each shape.

Experts are arrays of the model, or lie in the pages of a pool and are read from there by the same
kernels that an engine runs; only the keys and values, which are not kept, are no pages here.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.implementation import Implementation
from pallas_kernels.paged_expert_ffn import Activation, ModulePages
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.paging.layout import PagingLayout
from pw_jax.paging.memory import PagedMemory


@jax.tree_util.register_dataclass
@no_type_check  # also built of placeholders
@dataclass(frozen=True)
class ExpertPages:
    """Where paged experts are.

    Attributes:
        pool: uint32 [pages, words].
        pages: Widths and page ids of gate_up and of down.
        layout: Of the pages.
        implementation: Which kernels run.
    """

    pool: Array
    pages: tuple[ModulePages, ModulePages]
    layout: PagingLayout = field(metadata={"static": True})
    implementation: Implementation = field(default="auto", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedSequences(SequenceMemory):
    """Whole sequences at once, with the experts in pages; an `ExpertMemory`.

    Attributes:
        experts: The pages.
    """

    experts: Any  # `ExpertPages`, or placeholders in tree transformations

    def expert_ffn(
        self,
        moe_index: int,
        x: Float[Array, "M D"],
        expert_ids: Int32[Array, "M k"],
        weights: Float32[Array, "M k"],
        activation: Activation,
    ) -> Float32[Array, "M D"]:
        """Multiplies tokens with their experts out of the pool."""
        paged = PagedMemory(
            pool=self.experts.pool,
            kv_pages=(),
            positions=jnp.where(self.token_mask, 0, -1),
            expert_pages=self.experts.pages,
            layout=self.experts.layout,
            implementation=self.experts.implementation,
        )
        return paged.expert_ffn(moe_index, x, expert_ids, weights, activation)


class Forward:
    """A model taken apart into its structure and flat arrays.

    Args:
        model: With weights.
        experts: Pages, if the model's experts are paged.
    """

    def __init__(self, model: CausalLm, experts: ExpertPages | None = None):
        self.config = model.config
        self._graph, state = nnx.split(model)
        leaves, self._tree = jax.tree.flatten(state)
        # Bound to their device, all of them: jit compiles again for arguments that are not.
        self._leaves = [jax.device_put(leaf, leaf.sharding) for leaf in leaves]
        self._experts = experts

    @property
    def array_bytes(self) -> int:
        """Bytes of the weights that are arrays."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def hidden(
        self, tokens: Int32[np.ndarray, "B T"], token_mask: Bool[np.ndarray, "B T"]
    ) -> Float[Array, "B T D"]:
        """Hidden states after the last norm.

        Args:
            tokens: Token ids; padding on the right may be any.
            token_mask: True for real tokens.
        """
        return _hidden(
            self._graph, self._tree, self._leaves, self._experts, tokens, np.asarray(token_mask)
        )

    def log_probabilities(self, hidden: Float[Array, "*P D"]) -> Float32[Array, "*P V"]:
        """Of the next token, after the given hidden states."""
        return _log_probabilities(self._graph, self._tree, self._leaves, hidden)

    def score(
        self,
        hidden: Float[Array, "B T D"],
        rows: Int32[np.ndarray, " P"],
        columns: Int32[np.ndarray, " P"],
        targets: Int32[np.ndarray, " P"],
    ) -> tuple[Float32[Array, " P"], Bool[Array, " P"]]:
        """Log-likelihood of given next tokens, in nats, and whether each is the likeliest.

        Args:
            hidden: From :meth:`hidden`.
            rows: Row of each position.
            columns: Its place in the row.
            targets: The token that follows.
        """
        return _score(self._graph, self._tree, self._leaves, hidden, rows, columns, targets)


# Static arguments: models that differ in their weights only are compiled once together.
_compiled = partial(jax.jit, static_argnums=(0, 1))


@_compiled
def _hidden(graph: Any, tree: Any, leaves: Any, experts: Any, tokens: Array, mask: Array) -> Array:
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    memory = SequenceMemory(mask) if experts is None else PagedSequences(mask, experts)
    return model(tokens, positions, memory).hidden


@_compiled
def _log_probabilities(graph: Any, tree: Any, leaves: Any, hidden: Array) -> Array:
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return jax.nn.log_softmax(model.logits(hidden))


@_compiled
def _score(
    graph: Any, tree: Any, leaves: Any, hidden: Array, rows: Array, columns: Array, targets: Array
) -> tuple[Array, Array]:
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    logits = model.logits(hidden[rows, columns])
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return likelihood, jnp.argmax(logits, axis=1) == targets
