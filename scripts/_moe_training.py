"""Training of all weights of a mixture-of-experts model: loss, optimiser, tokens, resumption."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints.manifest import write_json
from checkpoints.store import load_item, save_item
from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.models.decoder import CausalLm
from pw_jax.models.memory import SequenceMemory
from pw_jax.models.moe import Router

STATE = "state"
CURVE = "curve.json"
SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        steps: Of the optimiser, warm-up included.
        sequences: Of a batch.
        sequence: Tokens of each that are predicted.
        learning_rate: At its peak; falls to a tenth along a cosine.
        warmup: Steps in which it rises.
        weight_decay: On matrices only.
        balance: Weight of the load-balancing loss.
        clip: Largest norm of a gradient.
        seed: Of the order of the text.
        dtype: Of the arithmetic; weights and moments are float32. A CPU wants float32.
    """

    steps: int = 3000
    sequences: int = 32
    sequence: int = 512
    learning_rate: float = 3e-4
    warmup: int = 100
    weight_decay: float = 0.1
    balance: float = 0.01
    clip: float = 1.0
    seed: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self):
        """Checks the values."""
        if self.dtype not in ("bfloat16", "float32"):
            raise UserError(f"dtype must be bfloat16 or float32, not {self.dtype}")
        for name in ("steps", "sequences", "sequence"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")


class TokenFile:
    """Tokens prepared by ``train_demo_moe.py --prepare``: little-endian uint16 and a JSON beside.

    Args:
        path: The file of tokens.
        sequence: Tokens of a sequence that are predicted.

    Raises:
        UserError: Not such a file, or too short.
    """

    def __init__(self, path: Path, sequence: int):
        self.about = read_json(path.with_suffix(".json"))
        if not path.is_file() or path.stat().st_size != 2 * self.about.get("tokens", -1):
            raise UserError(f"{path} does not have the tokens that {path.stem}.json speaks of")
        self._tokens = np.memmap(path, "<u2", mode="r")
        self._sequence = sequence
        self.count = (len(self._tokens) - 1) // sequence
        if self.count < 1:
            raise UserError(f"{path} holds no sequence of {sequence + 1} tokens")

    def batch(self, step: int, sequences: int, seed: int) -> Int[np.ndarray, "B T"]:
        """The batch of a step, with one token more than is predicted: a function of its number.

        Every sequence comes once in an epoch, in an order drawn anew.
        """
        rows = []
        for number in range(step * sequences, (step + 1) * sequences):
            epoch, place = divmod(number, self.count)
            start = self._order(seed, epoch)[place] * self._sequence
            rows.append(self._tokens[start : start + self._sequence + 1])
        return np.stack(rows).astype(np.int32)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != (seed, epoch):
            self._epoch = seed, epoch
            self._permutation = np.random.default_rng((seed, epoch)).permutation(self.count)
        return self._permutation


class Losses(NamedTuple):
    """Of a step.

    Attributes:
        text: Cross entropy, nats a token.
        balance: 1 when experts share the load evenly.
    """

    text: Any
    balance: Any


class _RecordingRouter:
    """A router that keeps its probabilities and choices."""

    def __init__(self, router: Router, seen: list[tuple[Array, Array]]):
        self._router, self._seen = router, seen

    def __call__(self, x: Array) -> tuple[Array, Array]:
        expert_ids, weights = self._router(x)
        logits = jnp.einsum("md,ed->me", x, self._router.weight[...])
        self._seen.append((jax.nn.softmax(logits.astype(jnp.float32), axis=-1), expert_ids))
        return expert_ids, weights


def losses_of(model: CausalLm, batch: Int[Array, "B T"]) -> Losses:
    """Cross entropy and load balance of a batch.

    The balance is Switch Transformer's (Fedus, Zoph and Shazeer 2021, equation 4), for k experts
    a token: E / k times the sum over experts of the share of choices that went to each and its
    mean probability, averaged over layers.
    """
    seen: list[tuple[Array, Array]] = []
    for layer in model.model.layers:
        mlp: Any = layer.mlp
        if isinstance(getattr(mlp, "gate", None), Router):
            mlp.gate = _RecordingRouter(mlp.gate, seen)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden = model(tokens, positions, SequenceMemory(jnp.ones(tokens.shape, bool))).hidden
    scores = jax.nn.log_softmax(model.logits(hidden))
    text = -jnp.take_along_axis(scores, targets[..., None], axis=-1).mean()
    return Losses(text, jnp.stack([balance(*layer) for layer in seen]).mean())


def balance(probabilities: Float[Array, "M E"], expert_ids: Int[Array, "M k"]) -> Float[Array, ""]:
    """The load-balancing loss of one layer: 1 if even, up to E / k if not."""
    experts, chosen = probabilities.shape[1], expert_ids.shape[1]
    share = jax.nn.one_hot(expert_ids, experts).sum(axis=1).mean(axis=0)
    return experts / chosen * jnp.sum(share * probabilities.mean(axis=0))


class Trainer:
    """Float32 weights and AdamW's moments, a step compiled once.

    Args:
        model: Float32, dense experts.
        options: How to train.
    """

    def __init__(self, model: CausalLm, options: TrainOptions):
        self.options = options
        self.step = 0
        self.losses: list[list[float]] = []
        self._graph, state = nnx.split(model)
        self._weights, self._tree = jax.tree.flatten(state)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0,
            options.learning_rate,
            options.warmup,
            max(options.steps, options.warmup + 1),
            options.learning_rate / 10,
        )
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(options.clip),
            optax.adamw(
                schedule,
                b1=0.9,
                b2=0.95,
                weight_decay=options.weight_decay,
                mask=[weight.ndim > 1 for weight in self._weights],
            ),
        )
        self._moments = self._optimizer.init(self._weights)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    @property
    def model(self) -> CausalLm:
        """The model as trained so far, float32."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, self._weights))

    def train(
        self,
        tokens: TokenFile,
        until: int,
        report: Callable[[int, Losses], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Trains up to a step; the host reads losses one step late.

        Args:
            tokens: The text.
            until: The step.
            report: Called after each step.
            stop: Says before each step whether to end earlier.

        Raises:
            UserError: The loss is no number any more.
        """
        unread: Losses | None = None
        while self.step < until and not stop():
            batch = tokens.batch(self.step, self.options.sequences, self.options.seed)
            self._weights, self._moments, losses = self._update(self._weights, self._moments, batch)
            self._read(unread, report)
            unread, self.step = losses, self.step + 1
        self._read(unread, report)

    def save(self, folder: Path) -> None:
        """Writes the state of this step, then removes that of earlier ones."""
        path = folder / f"{STATE}_{self.step:07d}"
        if not path.exists():
            leaves = [*self._weights, *jax.tree.leaves(self._moments)]
            save_item(path, {f"{number:05d}": leaf for number, leaf in enumerate(leaves)})
        write_json(folder / CURVE, {"losses": self.losses})
        for old in folder.glob(f"{STATE}_*"):
            if old != path:
                shutil.rmtree(old)

    def resume(self, folder: Path) -> bool:
        """Goes on from the last state that was written, if there is one.

        Raises:
            UserError: It was trained with other options.
        """
        settings = dataclasses.asdict(self.options)
        if (folder / SETTINGS).exists():
            left = read_json(folder / SETTINGS)
            different = sorted(name for name in settings if left.get(name) != settings[name])
            if different:
                raise UserError(f"{folder} was left by another {', '.join(different)}; remove it")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SETTINGS, settings)
        states = sorted(folder.glob(f"{STATE}_[0-9]*[0-9]"))
        if not states:
            return False
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        state: dict[str, Array] = load_item(states[-1], sharding)
        leaves = [leaf for _, leaf in sorted(state.items())]
        count = len(self._weights)
        self._weights = leaves[:count]
        self._moments = jax.tree.unflatten(jax.tree.structure(self._moments), leaves[count:])
        self.step = int(states[-1].name.removeprefix(f"{STATE}_"))
        self.losses = json.loads((folder / CURVE).read_text())["losses"][: self.step]
        return True

    def _read(self, losses: Losses | None, report: Callable[[int, Losses], None]) -> None:
        if losses is None:
            return
        found = Losses(float(losses.text), float(losses.balance))
        if not np.isfinite(found.text):
            raise UserError(f"the loss of step {len(self.losses) + 1} is {found.text}")
        self.losses.append(list(found))
        report(len(self.losses), found)

    def _updated(
        self, weights: list[Array], moments: Any, batch: Array
    ) -> tuple[list[Array], Any, Losses]:
        def total(weights: list[Array]) -> tuple[Array, Losses]:
            narrow = [weight.astype(self.options.dtype) for weight in weights]
            model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, narrow))
            losses = losses_of(model, batch)
            return losses.text + self.options.balance * losses.balance, losses

        gradients, losses = jax.grad(total, has_aux=True)(weights)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
            change, moments = self._optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, change), moments, losses  # pyright: ignore


def affine_error(weight: Float[np.ndarray, "... K"], bits: int = 4, group: int = 32) -> float:
    """Relative error (Frobenius) of affine rounding in groups along the last axis.

    Weights drawn from a normal distribution give about 0.078 with 4 bits in groups of 32; weights
    that were stored in this very form give almost nothing.
    """
    if weight.shape[-1] % group:
        raise ValueError(f"{weight.shape[-1]} columns are no multiple of {group}")
    groups = weight.astype(np.float64).reshape(-1, group)
    low = groups.min(axis=1, keepdims=True)
    step = (groups.max(axis=1, keepdims=True) - low) / (2**bits - 1)
    rounded = low + np.rint((groups - low) / np.where(step > 0, step, 1)) * step
    return float(np.linalg.norm(rounded - groups) / np.linalg.norm(groups))


def grid_errors(weights: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean `affine_error` of each kind of matrix of the layers, by the last parts of its name."""
    errors: dict[str, list[float]] = {}
    for name, weight in weights.items():
        if ".layers." in name and "proj" in name and weight.ndim > 1 and not weight.shape[-1] % 32:
            kind = name.split(".layers.")[1].split(".", 1)[1].removesuffix(".weight")
            errors.setdefault(kind, []).append(affine_error(np.asarray(weight, np.float32)))
    return {kind: float(np.mean(found)) for kind, found in errors.items()}
