"""Comparing a converted checkpoint with its source, width by width."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32

from checkpoints.huggingface import load_dense_model
from checkpoints.store import Store, dequantized_model
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory


@dataclass(frozen=True)
class Comparison:
    """How far one width is from the source, over all positions of a text.

    Attributes:
        bits: width of the experts; None for the source itself.
        kl: mean of KL(source || this) over positions, in nats.
        max_logit_difference: largest absolute difference of any logit.
        same_argmax: share of positions with the same most likely token.
        perplexity: of the text.
    """

    bits: int | None
    kl: float
    max_logit_difference: float
    same_argmax: float
    perplexity: float


def compare(
    source: str,
    store: Store,
    tokens: Int32[np.ndarray, "S T"],
    dtype: DTypeLike = jnp.float32,
    report: Callable[[str], None] = lambda stage: None,
) -> Iterator[Comparison]:
    """Compares the source with every width of a store, experts multiplied densely.

    One model is held at a time, and the source's logits on the host (4 S T V bytes).

    Args:
        source: Hugging Face folder the store was made from.
        store: the converted checkpoint.
        tokens: the text.
        dtype: to compute in.
        report: called with what is being done.

    Yields:
        First the source's own perplexity, then the widths from the widest down.
    """
    report("source")
    config, model = load_dense_model(source, dtype)
    if config != store.model_config:
        raise UserError(f"{store.directory} was not made from {source}: their config.json differ")
    if tokens.max() >= config.vocab_size:
        raise UserError(f"token {tokens.max()} of the tokenizer is beyond vocab_size")
    reference = list(_logits(model, tokens))
    del model
    yield _summary(None, reference, reference, tokens)
    for bits in reversed(store.widths):
        report(f"{bits} bits")
        _, model = dequantized_model(store, bits, dtype)
        yield _summary(bits, reference, _logits(model, tokens), tokens)
        del model


def mean_loss(model: CausalLm, tokens: Int32[np.ndarray, "S T"]) -> float:
    """Mean negative log likelihood, in nats, of all tokens but the first of each sequence."""
    losses = []
    for row, logits in zip(tokens, _logits(model, tokens), strict=True):
        scores = jnp.asarray(logits)
        losses.append(float(_measure(scores, scores, jnp.asarray(row))[3]))
    return float(np.mean(losses))


def _logits(model: CausalLm, tokens: Int32[np.ndarray, "S T"]) -> Iterator[np.ndarray]:
    """Yields the logits float32 [T, V] of each sequence."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    for row in tokens:
        yield np.asarray(_forward(graph, treedef, leaves, jnp.asarray(row)[None]))[0]


@partial(jax.jit, static_argnums=(0, 1))  # all widths have the same graph: compiled once
def _forward(
    graph: Any, treedef: Any, leaves: list[Array], tokens: Int32[Array, "1 T"]
) -> Float32[Array, "1 T V"]:
    model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    memory = SequenceMemory(jnp.ones(tokens.shape, bool))
    return model.logits(model(tokens, positions, memory).hidden)


def _summary(
    bits: int | None,
    reference: Iterable[np.ndarray],
    logits: Iterable[np.ndarray],
    tokens: Int32[np.ndarray, "S T"],
) -> Comparison:
    rows = [
        jax.tree.map(float, _measure(jnp.asarray(ours), jnp.asarray(theirs), jnp.asarray(row)))
        for theirs, ours, row in zip(reference, logits, tokens, strict=True)
    ]
    kl, difference, same, loss = (np.array(column) for column in zip(*rows, strict=True))
    return Comparison(
        bits,
        float(kl.mean()),
        float(difference.max()),
        float(same.mean()),
        math.exp(min(float(loss.mean()), 700.0)),
    )


@jax.jit
def _measure(
    ours: Float32[Array, "T V"], theirs: Float32[Array, "T V"], tokens: Int32[Array, "T"]
) -> tuple[Array, Array, Array, Array]:
    """Mean KL, largest difference, share of equal argmax and mean loss of one sequence."""
    log_ours = jax.nn.log_softmax(ours)
    log_theirs = jax.nn.log_softmax(theirs)
    kl = jnp.sum(jnp.exp(log_theirs) * (log_theirs - log_ours), axis=-1)
    same = jnp.argmax(ours, axis=-1) == jnp.argmax(theirs, axis=-1)
    loss = -jnp.take_along_axis(log_ours[:-1], tokens[1:, None], axis=-1)
    return kl.mean(), jnp.max(jnp.abs(ours - theirs)), same.mean(), loss.mean()
