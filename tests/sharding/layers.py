"""Small decoder layers with every feature, and what they compute in float64 numpy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding import parallel
from sharding.blocks import AttentionBlock, LatentBlock, MlpBlock
from sharding.layouts import make_layout
from sharding.mesh import place, tensor_mesh
from sharding.weights import AttentionWeights, Dense, Factors, LatentWeights, MlpWeights, Norm

EPS = 1e-5
THETA = 100.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer: weights in float32, and the shapes that its blocks need."""

    attention: AttentionWeights | LatentWeights
    mlp: MlpWeights
    heads: dict[str, int]
    activation: str
    rope: bool


def linear(random, inputs: int, outputs: int, rank: int | None, bias: bool) -> Any:
    """Random factors, or a whole weight without a rank."""

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    added = normal(outputs) * 3 if bias else None
    if rank is None:
        return Dense(normal(inputs, outputs), added)
    return Factors(normal(inputs, rank), 2 * normal(rank, outputs), added)


def norm(random, width: int, centred: bool = False) -> Norm:
    weight = (1 + 0.2 * random.standard_normal(width)).astype(np.float32)
    bias = 0.3 * random.standard_normal(width).astype(np.float32) if centred else None
    return Norm(weight, bias)


def make_mlp(random, hidden, ffn, ranks, *, gated, bias, centred) -> MlpWeights:
    gate, up, down = ranks
    return MlpWeights(
        linear(random, hidden, ffn, gate, bias) if gated else None,
        linear(random, hidden, ffn, up, bias),
        linear(random, ffn, hidden, down, bias),
        norm(random, hidden, centred),
    )


def make_layer(
    seed, hidden, heads, ffn, ranks, *, gated=True, bias=False, centred=False, activation="silu"
) -> Layer:
    """Multi-head or grouped-query attention; `heads`: query heads, kv heads, width, value width."""
    random = np.random.default_rng(seed)
    queries, kv, width, value = heads
    q, k, v, o, *rest = ranks
    attention = AttentionWeights(
        linear(random, hidden, queries * width, q, bias),
        linear(random, hidden, kv * width, k, bias),
        linear(random, hidden, kv * value, v, bias),
        linear(random, queries * value, hidden, o, bias),
        norm(random, hidden, centred),
    )
    weights = make_mlp(random, hidden, ffn, rest, gated=gated, bias=bias, centred=centred)
    shape = {"heads": queries, "kv_heads": kv, "head_dim": width, "value_dim": value}
    return Layer(attention, weights, shape, activation, rope=not centred)


def make_latent_layer(seed, hidden, heads, dims, ffn, ranks, *, bias=False, q_norm=True) -> Layer:
    """Latent attention; `dims`: plain, rotated and value dimensions of a head."""
    random = np.random.default_rng(seed)
    plain, turning, value = dims
    q, kv, o, *rest = ranks
    up = linear(random, kv, heads * (plain + value), None, False).weight
    attention = LatentWeights(
        linear(random, hidden, heads * (plain + turning), q, False),
        Factors(linear(random, hidden, kv + turning, None, False).weight, up),
        linear(random, heads * value, hidden, o, bias),
        norm(random, kv),
        norm(random, q) if q_norm else None,
        random.standard_normal(q).astype(np.float32) if bias else None,
        random.standard_normal(kv + turning).astype(np.float32) if bias else None,
        norm(random, hidden),
    )
    weights = make_mlp(random, hidden, ffn, rest, gated=True, bias=False, centred=False)
    names = ("plain_dim", "rope_dim", "value_dim")
    shape = {"heads": heads, "rank": kv, **dict(zip(names, dims, strict=True))}
    return Layer(attention, weights, shape, "gelu", rope=True)


def whole(linear: Any) -> Dense:
    """The product of factors."""
    if isinstance(linear, Dense):
        return linear
    return Dense((linear.v.astype(np.float64) @ linear.u).astype(np.float32), linear.bias)


def weights_for(layout: str, layer: Layer) -> Layer:
    """The same layer with whole weights where the layout takes no factors."""
    if layout != "dense":
        return layer
    names = ["o"] if isinstance(layer.attention, LatentWeights) else ["q", "k", "v", "o"]
    attention = layer.attention._replace(**{n: whole(getattr(layer.attention, n)) for n in names})
    ways = {n: getattr(layer.mlp, n) for n in ("gate", "up", "down")}
    weights = layer.mlp._replace(**{n: None if w is None else whole(w) for n, w in ways.items()})
    return dataclasses.replace(layer, attention=attention, mlp=weights)


# ---- float64 oracle


def oracle(layers: list[Layer], x: np.ndarray) -> list[np.ndarray]:
    """The residual behind each layer, float64 [T, D]."""
    x, out = x.astype(np.float64), []
    for layer in layers:
        x = x + oracle_attention(layer, normal(x, layer.attention.norm))
        hidden = normal(x, layer.mlp.norm)
        up = apply(layer.mlp.up, hidden)
        if layer.mlp.gate is None:
            features = activate(layer.activation, up)
        else:
            features = activate(layer.activation, apply(layer.mlp.gate, hidden)) * up
        x = x + apply(layer.mlp.down, features)
        out.append(x)
    return out


def apply(linear: Any, x: np.ndarray) -> np.ndarray:
    first, *rest = (np.asarray(part, np.float64) for part in linear if part is not None)
    out = x @ first
    if isinstance(linear, Factors):
        out = out @ rest.pop(0)
    return out + rest[0] if rest else out


def normal(x: np.ndarray, norm: Any) -> np.ndarray:
    if norm is None:
        return x
    if norm.bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * norm.weight
    return x if norm.bias is None else x + norm.bias


def activate(name: str, x: np.ndarray) -> np.ndarray:
    match name:
        case "silu":
            return x / (1 + np.exp(-x))
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        case "shifted":
            return np.cos(x)
    raise ValueError(name)


ACTIVATIONS = {"silu": jax.nn.silu, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "shifted": jnp.cos}


def oracle_attention(layer: Layer, x: np.ndarray) -> np.ndarray:
    weights: Any = layer.attention
    shape = layer.heads
    tokens, heads = x.shape[0], shape["heads"]
    if isinstance(weights, LatentWeights):
        plain, rank = shape["plain_dim"], shape["rank"]
        q_proj: Any = weights.q
        q = x @ q_proj.v.astype(np.float64)
        kv = x @ weights.kv.v.astype(np.float64)
        q = q if weights.q_latent_bias is None else q + weights.q_latent_bias
        kv = kv if weights.kv_latent_bias is None else kv + weights.kv_latent_bias
        q = normal(q, weights.q_norm) @ q_proj.u
        both = (normal(kv[:, :rank], weights.kv_norm) @ weights.kv.u).reshape(tokens, heads, -1)
        q, shared = q.reshape(tokens, heads, -1), kv[:, None, rank:]
        q = np.concatenate((q[..., :plain], turn(q[..., plain:], np)), -1)
        shared = np.broadcast_to(turn(shared, np), (tokens, heads, shape["rope_dim"]))
        k, v = np.concatenate((both[..., :plain], shared), -1), both[..., plain:]
    else:
        q, k, v = (
            apply(getattr(weights, name), x).reshape(tokens, -1, shape[width])
            for name, width in (("q", "head_dim"), ("k", "head_dim"), ("v", "value_dim"))
        )
        if layer.rope:
            q, k = turn(q, np), turn(k, np)
    out = np.zeros((tokens, heads, v.shape[-1]))
    for head in range(heads):  # slowly, one head at a time: nothing shared with what is tested
        key = head // (heads // k.shape[1])
        scores = q[:, head] @ k[:, key].T / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(tokens) > 0, scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = share / share.sum(-1, keepdims=True) @ v[:, key]
    return apply(weights.o, out.reshape(tokens, -1))


def turn(x: Any, library: Any) -> Any:
    """Rotates the pairs (d, d + half) of [T, heads, width] by position."""
    half = x.shape[-1] // 2
    frequency = THETA ** -(np.arange(half) / half)
    angle = (np.arange(x.shape[0])[:, None] * frequency)[:, None]
    cosine, sine = (library.asarray(f(angle), dtype=x.dtype) for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return library.concatenate((first * cosine - second * sine, second * cosine + first * sine), -1)


# ---- what is tested


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Exact causal attention of [T, heads, width]."""
    tokens, kv, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    q = q.reshape(tokens, kv, group, -1)
    scores = jnp.einsum("tkgd,skd->kgts", q, k) / jnp.sqrt(jnp.asarray(q.shape[-1], q.dtype))
    mask = jnp.tri(tokens, dtype=bool)[None, None]
    share = jax.nn.softmax(jnp.where(mask, scores, jnp.asarray(-1e30, q.dtype)), axis=-1)
    return jnp.einsum("kgts,skd->tkgd", share, v).reshape(tokens, kv * group, -1)


def rotate_and_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attend(turn(q, jnp), turn(k, jnp), v)


def latent_attend(q: jax.Array, plain: jax.Array, shared: jax.Array, v: jax.Array) -> jax.Array:
    first, turning = jnp.split(q, (plain.shape[-1],), axis=-1)
    q = jnp.concatenate((first, turn(turning, jnp)), axis=-1)
    shared = jnp.broadcast_to(turn(shared, jnp), (*plain.shape[:2], shared.shape[-1]))
    return attend(q, jnp.concatenate((plain, shared), axis=-1), v)


def attend_of(layer: Layer):
    if isinstance(layer.attention, LatentWeights):
        return latent_attend
    return rotate_and_attend if layer.rope else attend


def blocks(layout: str, devices: int, hidden: int, layer: Layer):
    made = make_layout(layout, devices)
    latent = isinstance(layer.attention, LatentWeights)
    extra: dict[str, Any] = {"latent_eps": EPS} if latent else {}
    kind: Any = LatentBlock if latent else AttentionBlock
    return (
        kind(made, hidden, EPS, **layer.heads, **extra),
        MlpBlock(made, hidden, EPS, activation=ACTIVATIONS[layer.activation]),
    )


def program(layout: str, devices: int, hidden: int, layers: list[Layer], placing=place):
    """A function of placed parameters and x [T, hidden] to every residual, and the parameters."""
    mesh = tensor_mesh(devices)
    layers = [weights_for(layout, layer) for layer in layers]
    pairs = [blocks(layout, devices, hidden, layer) for layer in layers]
    params = [
        (
            placing(mesh, attention.prepare, layer.attention),
            placing(mesh, mlp.prepare, layer.mlp),
        )
        for (attention, mlp), layer in zip(pairs, layers, strict=True)
    ]

    def run(params, x):
        x = pairs[0][0].layout.residual(x)
        out = []
        for (attention, mlp), (first, second), layer in zip(pairs, params, layers, strict=True):
            x = x + parallel.attention(mesh, attention, first, x, attend_of(layer))
            x = x + parallel.mlp(mesh, mlp, second, x)
            out.append(x)
        return out

    return run, params
