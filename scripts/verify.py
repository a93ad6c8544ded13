"""Compares a converted checkpoint with its source at every width.

python scripts/verify.py --model DIR --converted DIR --text text.jsonl
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from _command import progress_console, run
from rich.console import Console
from rich.table import Table

from checkpoints.store import open_store
from checkpoints.text import load_tokenizer, read_documents, token_sequences
from checkpoints.verify import Comparison, compare
from pw_jax.errors import UserError

SAMPLE = (
    "The harbour was quiet when the ferry came in. A few people waited on the quay with their "
    "collars turned up, and a dog slept under the bench beside the ticket office. The captain "
    "brought the boat alongside without a sound; he had done it every morning for thirty years, "
    "and he knew how the current ran between the two stone piers. Letters, bread and a crate of "
    "oranges were handed ashore first, because the shop opened at eight and the children would "
    "stop there on their way to school. Then the passengers followed: a teacher with a box of "
    "books, two engineers who had come to look at the lighthouse, and an old woman who owned the "
    "last farm at the end of the road. By nine the fog had lifted from the hills, the engine was "
    "running again, and the water was as bright as glass."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Source and converted checkpoint, side by side.")
    add = parser.add_argument
    add("--model", required=True, help="the Hugging Face folder that was converted")
    add("--converted", required=True, help="what scripts/convert.py made of it")
    add("--text", type=Path, help=".txt or .jsonl to measure on; default a short passage")
    add("--tokens", type=int, default=1024, help="how much of it (default %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Compares and prints."""
    flags = parse(argv)
    if flags.tokens < 1:
        raise UserError(f"--tokens must be positive, not {flags.tokens}")
    store = open_store(flags.converted)
    documents = read_documents(flags.text) if flags.text else [SAMPLE]
    tokens = token_sequences(load_tokenizer(store.directory), documents, flags.tokens)
    console = progress_console()
    with console.status("starting") as status:
        results = list(compare(flags.model, store, tokens, flags.dtype, status.update))
    if flags.json:
        rows = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"tokens": int(tokens.size), "dtype": flags.dtype, "widths": rows}))
    else:
        Console().print(table(results, tokens.size))


def table(results: list[Comparison], tokens: int) -> Table:
    """The results for people."""
    out = Table(title=f"experts dequantised and multiplied densely, {tokens} tokens")
    for heading in ("bits", "KL (nats)", "max |logit difference|", "same argmax", "perplexity"):
        out.add_column(heading, justify="right")
    for result in results:
        same = result.bits is None
        out.add_row(
            "source" if same else str(result.bits),
            "" if same else f"{result.kl:.2e}",
            "" if same else f"{result.max_logit_difference:.3f}",
            "" if same else f"{result.same_argmax:.1%}",
            f"{result.perplexity:.3f}",
        )
    return out


if __name__ == "__main__":
    sys.exit(run(main))
