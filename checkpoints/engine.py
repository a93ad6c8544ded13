"""An engine from a folder: a converted, a decomposed or a Hugging Face checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints.huggingface import MODULES, load_dense_model
from checkpoints.low_rank import is_low_rank, load_low_rank_model
from checkpoints.store import MANIFEST, ExpertArrays, Store, open_store
from checkpoints.text import load_tokenizer
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.engine.expert_source import CalibrationCounts
from pw_jax.engine.prompts import PromptCalibration
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.paging.layout import ExpertFormat
from pw_jax.planner.residual import Heads
from pw_jax.tensor_parallel.model import parallelize
from sharding.mesh import tensor_mesh


@dataclass(frozen=True)
class StoredExperts:
    """The experts of a converted checkpoint; a :class:`pw_jax.engine.expert_source.ExpertSource`.

    Attributes:
        store: The checkpoint.
    """

    store: Store

    @property
    def expert_format(self) -> ExpertFormat:
        """Widths and rows a table, from the manifest."""
        manifest = self.store.manifest
        gate_up, down = (manifest["rows_per_table"][module] for module in MODULES)
        return ExpertFormat(manifest["seed_bits"], manifest["parent_bits"], (gate_up, down))

    @property
    def calibration(self) -> CalibrationCounts | None:
        """What calibration saw of each expert, if the conversion had a text."""
        seen = self.store.calibration
        if seen is None:
            return None
        return CalibrationCounts(seen["routing_mass"], seen["tokens_seen"], int(seen["tokens"]))

    @property
    def prompt_calibration(self) -> PromptCalibration | None:
        """For the prompt correction; None if scripts/calibrate.py was not run."""
        item = self.store.prompts
        if item is None:
            return None
        heads = Heads(
            center=item["head_center"],
            scale=item["head_scale"],
            weights=item["head_weights"],
            r_squared=item["head_r_squared"],
            kept=item["head_kept"].astype(bool),
        )
        error = item["gate_up_error"][:, :, self.store.widths.index(int(item["bits"]))]
        return PromptCalibration(error, item["gate_up_mean_square"], heads)

    def load_experts(self, layer: int, module: int) -> ExpertArrays:
        """All experts of a module of the layer-th MoE layer."""
        return self.store.load_experts(self.store.model_config.moe_layers[layer], MODULES[module])


@dataclass(frozen=True)
class TensorParallel:
    """How to run a model over several devices, those of other processes included.

    Attributes:
        mesh: From `sharding.mesh.tensor_mesh`.
        layout: A name of `sharding.layouts.LAYOUTS`.
    """

    mesh: Mesh
    layout: str = "gathered"

    @classmethod
    def over(cls, devices: int, layout: str = "gathered") -> "TensorParallel":
        """Over the first so many devices.

        Raises:
            UserError: There are fewer.
        """
        present = len(jax.devices())
        if not 1 <= devices <= present:
            raise UserError(
                f"tensor parallelism over {devices} devices, but there are {present}; on a CPU, "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes them"
            )
        return cls(tensor_mesh(devices), layout)


def load_engine(
    directory: str | Path,
    config: EngineConfig,
    dtype: DTypeLike,
    *,
    with_tokenizer: bool = True,
    parallel: TensorParallel | None = None,
) -> Engine:
    """Makes an engine ready to generate.

    Args:
        directory: A folder made by scripts/convert.py: its experts are paged. Or one made by
            scripts/decompose.py, or a Hugging Face folder: its weights are arrays, and only keys
            and values are paged.
        config: Sizes and budget.
        dtype: Of weights and activations: float32 or bfloat16.
        with_tokenizer: False if all prompts are token ids.
        parallel: Over which devices and how; default one device.

    Raises:
        UserError: Anything wrong with the folder, a budget that is too small, or a model that
            does not lie in the layout.
    """
    path = Path(directory)
    tokenizer = load_tokenizer(path) if with_tokenizer and path.is_dir() else None
    if not (path / MANIFEST).exists() or is_low_rank(path):
        load = load_low_rank_model if is_low_rank(path) else load_dense_model
        _, model = load(path, dtype, on_host=parallel is not None)
        if parallel is not None:
            model = parallelize(model, parallel.mesh, parallel.layout)
        return Engine(model, config, tokenizer=tokenizer)
    store = open_store(path)
    model = registry.build_model(store.model_config, "paged", dtype)
    on_host = parallel is not None
    weights = store.load_dense(dtype, on_host=on_host)
    model = registry.set_weights(model, weights, on_host=on_host)
    if parallel is not None:
        model = parallelize(model, parallel.mesh, parallel.layout)
    experts = StoredExperts(store) if store.model_config.moe_layers else None
    return Engine(model, config, experts, tokenizer)
