"""What every linear layer is given on a text, one decoder layer at a time.

Only the weights of one layer are held, and the hidden states between two layers.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.decoder import CausalLm
from pw_jax.models.layers import Linear
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.opt import POSITION_OFFSET, Opt

Weights = Mapping[str, Any]
Read = Callable[[str], np.ndarray]  # a weight by its dotted name
BATCH = 4  # sequences at a time


class Recorder(nnx.Module):
    """A linear layer that tells what it is given.

    Args:
        linear: The layer.
        record: Called with the inputs of every call.
    """

    def __init__(self, linear: Linear, record: Callable[[Array], None]):
        self.linear = linear
        self.record = record

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Records and multiplies."""
        self.record(x)
        return self.linear(x)


class LayerRunner:
    """Runs the layers of a dense model apart from each other, in float32.

    Args:
        config: The model; routed experts are arrays.
        read: Gives a weight by name.
    """

    def __init__(self, config: ModelConfig, read: Read):
        self.model: CausalLm = registry.build_model(config)
        self.read = read
        self.prefix = "model.decoder" if isinstance(self.model, Opt) else "model"
        inner: Any = self.model.model
        self.decoder = inner.decoder if isinstance(self.model, Opt) else inner
        self.shapes = factorable_shapes(self.model)

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's weights begin with, dot included."""
        return f"{self.prefix}.layers.{layer}."

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the layer's linear layers that can be factored, by full name."""
        prefix = self.layer_prefix(layer)
        return {name: shape for name, shape in self.shapes.items() if name.startswith(prefix)}

    def weight_names(self, layer: int | None) -> list[str]:
        """Names of all weights of a layer, or of those that belong to none."""
        names = registry.parameter_shapes(self.model)
        if layer is not None:
            return [name for name in names if name.startswith(self.layer_prefix(layer))]
        return [name for name in names if not name.startswith(f"{self.prefix}.layers.")]

    def embed(self, tokens: Int32[np.ndarray, "S T"]) -> Float32[np.ndarray, "S T D"]:
        """What the first layer is given."""
        rows = self.read(f"{self.prefix}.embed_tokens.weight")[tokens].astype(np.float32)
        hidden = rows * np.float32(self.model.config.embedding_scale)
        if isinstance(self.model, Opt):
            places = np.arange(tokens.shape[1]) + POSITION_OFFSET
            table = self.read(f"{self.prefix}.embed_positions.weight")
            hidden += table[places].astype(np.float32)[None]
        return hidden

    def run(
        self,
        layer: int,
        hidden: Float32[np.ndarray, "S T D"],
        mask: Bool[np.ndarray, "S T"],
        weights: Weights,
    ) -> Iterator[tuple[np.ndarray, dict[tuple[str, ...], np.ndarray]]]:
        """Runs one layer over a few sequences at a time.

        Args:
            layer: Its index.
            hidden: What the layer is given.
            mask: True for real tokens.
            weights: Of the layer, by full name.

        Yields:
            Hidden states [few, T, D] that the layer gives, and by the names of the linear layers
            that share it an input [real tokens, features].
        """
        config = self.model.config
        # Without a cache a layer does not know its number: layers of one shape share one program.
        kinds = [(kv, i in config.moe_layers) for i, kv in enumerate(config.kv_shapes)]
        alike = self.decoder.layers[kinds.index(kinds[layer])]
        prefix = self.layer_prefix(layer)
        short = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        graph, state = nnx.split(registry.set_weights(alike, short))
        leaves, tree = jax.tree.flatten(state)
        linears = frozenset(name.removeprefix(prefix) for name in self.linears(layer))
        positions = np.broadcast_to(np.arange(hidden.shape[1], dtype=np.int32), mask.shape)
        for start in range(0, len(hidden), BATCH):
            part = slice(start, start + BATCH)
            rope = self.model.ropes(config, jnp.asarray(positions[part]), jnp.float32)[layer]
            few = (jnp.asarray(hidden[part]), rope, jnp.asarray(mask[part]))
            out, groups = _run(graph, tree, linears, leaves, *few)
            inputs = {
                tuple(prefix + name for name in names): np.asarray(x).reshape(-1, x.shape[-1])[
                    mask[part].reshape(-1)
                ]
                for names, x in groups.items()
            }
            yield np.asarray(out), inputs


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    graph: Any,
    tree: Any,
    linears: frozenset[str],
    leaves: list[Array],
    hidden: Float32[Array, "S T D"],
    rope: tuple[Array, Array] | None,
    mask: Bool[Array, "S T"],
) -> tuple[Array, dict[tuple[str, ...], Array]]:
    """One layer; q, k and v are given one array, and so it comes out once."""
    layer = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    seen: list[tuple[list[str], Array]] = []

    def record(name: str, x: Array) -> None:
        for names, earlier in seen:
            if earlier is x:
                names.append(name)
                return
        seen.append(([name], x))

    for path, module in list(nnx.iter_modules(layer)):
        if ".".join(map(str, path)) in linears:
            parent: Any = layer
            for part in path[:-1]:
                parent = getattr(parent, str(part))
            setattr(
                parent,
                str(path[-1]),
                Recorder(cast(Linear, module), partial(record, ".".join(map(str, path)))),
            )
    memory = SequenceMemory(mask)
    out = layer(hidden, memory)[0] if rope is None else layer(hidden, rope, memory)[0]
    return out, {tuple(names): x for names, x in seen}
