"""A converted model whose blocks each have their own width, and the pages that they then hold.

The model multiplies its experts densely at these widths, which is what paged experts equal up to
rounding (tests/checkpoints/test_mixed_widths.py compares the two). On a CPU that is many times
faster than reading bitplanes, so long comparisons run on it; bytes are still those of the real page
table.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int, Int32

from checkpoints.engine import StoredExperts
from checkpoints.huggingface import MODULES
from checkpoints.store import Store, dequantized_model
from pw_jax.calibration import moe_blocks
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.paging.allocator import Owner, PageAllocator
from pw_jax.paging.host_pages import HostPages
from pw_jax.paging.layout import PagingLayout, choose_page_words, paging_layout
from pw_jax.paging.weight_pages import WeightPageTable
from pw_jax.quantizer.format import dequantize
from sharding.placement import host_memory

Stacks = list[tuple[Array, Array]]
"""For each MoE layer gate_up and down at all widths, float32 ``[W, E, rows, columns]``."""


class MixedWidths:
    """All widths of all blocks in float32, and a model to put them into.

    Attributes:
        model: The model at parent bits.
        leaves: Its arrays; arguments of what is compiled, not constants in it.
        stacks: The experts' weights.
        widths: Widths of the checkpoint.
    """

    def __init__(self, store: Store):
        _, self.model = dequantized_model(store, store.widths[-1], np.float32)
        self.widths = store.widths
        self._graph, state = nnx.split(self.model)
        self.leaves, self._tree = jax.tree.flatten(state)
        self.stacks: Stacks = []
        for layer in store.model_config.moe_layers:
            both = []
            for module in MODULES:
                arrays = store.load_experts(layer, module)
                matrices = [arrays.matrix(expert) for expert in range(arrays.experts)]
                both.append(
                    jnp.stack(
                        [jnp.stack([dequantize(m, b) for m in matrices]) for b in self.widths]
                    )
                )
            self.stacks.append((both[0], both[1]))

    @property
    def block_weights(self) -> tuple[int, int]:
        """Weights of a gate_up and of a down block."""
        gate_up, down = self.stacks[0]
        return gate_up.shape[-2] * gate_up.shape[-1], down.shape[-2] * down.shape[-1]

    def at(self, leaves: Any, stacks: Stacks, index: Int32[Array, "L E 2"]) -> CausalLm:
        """The model with each block at a width, given as an index into `widths`; for tracing."""
        running = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))
        expert = jnp.arange(index.shape[1])
        for layer, (_, experts) in enumerate(moe_blocks(running)):
            gate_up, down = stacks[layer]
            experts.gate_up_proj.set_value(gate_up[index[layer, :, 0], expert])
            experts.down_proj.set_value(down[index[layer, :, 1], expert])
        return running

    def index(self, bits: Int[np.ndarray, "L E 2"]) -> Int32[np.ndarray, "L E 2"]:
        """Indices into `widths`."""
        return (bits - self.widths[0]).astype(np.int32)

    def mean_bits(self, bits: Int[np.ndarray, "L E 2"]) -> float:
        """Mean width of a weight."""
        sizes = np.array(self.block_weights)
        return float((bits.mean((0, 1)) * sizes).sum() / sizes.sum())


def expert_layout(store: Store, kv_dtype: str = "bfloat16") -> PagingLayout:
    """The layouts that an engine would choose for a checkpoint."""
    config = store.model_config
    words = choose_page_words(config.kv_shapes, kv_dtype=kv_dtype, expert_shape=config.expert_shape)
    return paging_layout(
        config.kv_shapes,
        kv_dtype=kv_dtype,
        page_words=words,
        expert_shape=config.expert_shape,
        expert_format=StoredExperts(store).expert_format,
        moe_layers=len(config.moe_layers),
    )


def page_table(layout: PagingLayout) -> Int[np.ndarray, "2 W"]:
    """Pages of a block of each module at each width."""
    assert layout.matrices is not None
    return np.array([[matrix.pages(b) for b in matrix.widths] for matrix in layout.matrices])


def host_pages(store: Store, layout: PagingLayout) -> HostPages:
    """All planes and tables of a checkpoint in host memory."""
    host, experts = HostPages(layout, host_memory()), StoredExperts(store)
    for layer in range(layout.moe_layers):
        for module in range(len(MODULES)):
            host.add(layer, module, [experts.load_experts(layer, module)])
    return host


def pages_held(layout: PagingLayout, host: HostPages, bits: Int[np.ndarray, "L E 2"]) -> int:
    """Pages that the weights own once every block has its width in a fresh page table."""
    most = int(page_table(layout)[:, -1].sum()) * bits.shape[0] * bits.shape[1]
    allocator = PageAllocator(most + 1)
    table = WeightPageTable(layout, allocator, host)
    table.place(bits.astype(np.int8))
    held = allocator.owned(Owner.WEIGHT)
    if held != len(table.used_pages()):
        raise AssertionError(f"the table names {len(table.used_pages())} pages and owns {held}")
    return held


def second_half(model: CausalLm, tokens: Int32[Array, " T"]) -> Float32[Array, "half V"]:
    """Log probabilities of the tokens after each of the second half of a text."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    memory = SequenceMemory(jnp.ones((1, tokens.shape[0]), bool))
    hidden = model(tokens[None], positions, memory).hidden[0, tokens.shape[0] // 2 :]
    return jax.nn.log_softmax(model.logits(hidden))
