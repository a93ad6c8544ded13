"""Writes a Hugging Face folder out of a GGUF model."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pw_jax.errors import UserError

if TYPE_CHECKING:
    from _gguf_model import GgufModel  # needs the package gguf

LAYERS_PER_SHARD = 10


@contextlib.contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder to fill beside `out`, which becomes `out` if nothing is raised.

    Args:
        out: folder to make.
        force: replace a model that is there.

    Raises:
        UserError: it exists, and is not to be replaced or holds no model; or cannot be made.
    """
    if out.exists():
        if not force:
            raise UserError(f"{out} exists; --force replaces it")
        if not (out / "config.json").is_file():
            raise UserError(f"{out} holds no model, so --force does not replace it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write beside {out}: {error.strerror}") from None
    try:
        partial.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        yield partial
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_model(
    out: Path,
    gguf: "GgufModel",
    config: Mapping[str, Any],
    layer: Callable[[int], Mapping[str, np.ndarray]],
    done: Callable[[int], None],
) -> None:
    """Writes bfloat16 weights, config and tokenizer, holding a shard of the weights at a time.

    Args:
        out: folder to fill; must exist and be empty.
        gguf: gives what is not in a layer, and the tokenizer.
        config: contents of config.json.
        layer: gives the weights of a layer by name without its prefix.
        done: told how many layers are written.
    """
    shards = -(-gguf.layers // LAYERS_PER_SHARD)
    weight_map, total_size = {}, 0
    for shard in range(shards):
        tensors = gguf.other_tensors() if shard == 0 else {}
        layers = range(shard * LAYERS_PER_SHARD, (shard + 1) * LAYERS_PER_SHARD)
        for index in layers[: gguf.layers - layers.start]:
            tensors |= {f"model.layers.{index}.{name}": w for name, w in layer(index).items()}
            done(index + 1)
        # In C order: safetensors writes the memory of a column-ordered array as it lies.
        halves = {n: w.astype(ml_dtypes.bfloat16, order="C") for n, w in tensors.items()}
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(halves, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)  # safetensors keeps others from reading it
        weight_map |= dict.fromkeys(halves, name)
        total_size += sum(weight.nbytes for weight in halves.values())
    documents = {
        "model.safetensors.index": {
            "metadata": {"total_size": total_size},
            "weight_map": weight_map,
        },
        "config": config,
        "generation_config": gguf.special_tokens(),
        "tokenizer": gguf.tokenizer(),
        "tokenizer_config": gguf.tokenizer_config(),
    }
    for name, content in documents.items():
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
