"""Tables and plots out of raw results, so that no figure is written by hand.

    python scripts/make_tables.py --quality a.json b.json --planners planners.json \
        --long-context long.json --decomposition decomposition.json --out docs/results/cpu

Writes quality.md and quality.png (table 1, from evaluate.py and offload.py), before_after (two
files of evaluate.py), planners (table 2, from compare_planners.py), domain_shift (2, from
domain_shift.py), long_context (3, from long_context.py), decomposition (4, from perplexity.py):
those whose inputs are given. --scores and --golden put one model's scores beside another
implementation's in scores.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: no screen is needed

import _quality_tables
import _tables
import matplotlib.pyplot as plt
import numpy as np
from _command import run
from _quality_tables import (
    SOURCE,
    first_two,
    measured_quality,
    named,
    offloads,
    task_bits,
    weights_mib,
)
from _tables import BASELINE, MIB, Record, results_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError

NOTE = "Made by scripts/make_tables.py; in brackets 95% bootstrap intervals. From"


def read(path: Path, fields: Sequence[str]) -> Record:
    """Reads results, and checks that they are of the kind wanted.

    Raises:
        UserError: No such file, or another script's.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = [f for f in fields for row in record["results"] if f not in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the results {path}: {error}") from None
    if missing:
        raise UserError(f"{path} has results without {missing[0]}: it is of another kind")
    return record


def whiskers(estimates: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Means of estimates, and how far their intervals reach below and above."""
    means = np.array([one["mean"] for one in estimates])
    ends = np.array([[one[end] for one in estimates] for end in ("low", "high")])
    return means, np.abs(ends - means)


def quality(records: Sequence[Record]) -> Figure:
    """KL of each text, and bits a byte of the tasks' answers, against memory."""
    results, fetched = measured_quality(records), offloads(records)
    texts, tasks = list(results[0]["texts"]), list(results[0]["tasks"])
    panels = [*texts, *(["tasks"] if tasks else []), *(["lossless offload"] if fetched else [])]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        if panel == "lossless offload":
            offload(axis, fetched)
            continue
        for name in dict.fromkeys(named(result) for result in results):
            own = sorted((r for r in results if named(r) == name), key=weights_mib)
            sizes = [weights_mib(result) for result in own]
            if panel == "tasks":
                axis.plot(sizes, [np.mean(task_bits(r)) for r in own], "o-", label=name)
                continue
            found = [r["texts"][panel]["metrics"].get("kl") for r in own]
            if None in found or name == SOURCE:
                continue
            axis.errorbar(sizes, *whiskers(found), fmt="o-", capsize=3, label=name)
        axis.set(xlabel="weights, MiB", title=panel)
        axis.set(
            ylabel="bits a byte, mean of the tasks" if panel == "tasks" else "KL, nats a token"
        )
        if panel != "tasks":
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def before_after(records: Sequence[Record]) -> Figure:
    """Bits a byte of each task's answers, before and after training."""
    figure, axis = plt.subplots(figsize=(9, 4))
    for shift, (name, result) in enumerate(
        zip(("before", "after"), first_two(records), strict=True)
    ):
        found = [task["metrics"]["bits_per_byte"] for task in result["tasks"].values()]
        means, lengths = whiskers(found)
        places = np.arange(len(found)) + 0.4 * shift
        axis.bar(places, means, 0.4, yerr=lengths, capsize=2, label=name)
    tasks = list(records[0]["results"][0]["tasks"])
    axis.set_xticks(np.arange(len(tasks)) + 0.2, tasks, rotation=45, ha="right")
    axis.set(ylabel="bits a byte of the gold answer")
    axis.legend()
    return figure


def offload(axis: Axes, results: Sequence[Record]) -> None:
    """What is copied for each token, against memory."""
    for batch in dict.fromkeys(result["batch"] for result in results):
        own = [result for result in results if result["batch"] == batch]
        moved = [result["bytes_a_token"] / MIB for result in own]
        axis.plot([weights_mib(result) for result in own], moved, "o-", label=f"{batch} at once")
    axis.set(xlabel="weights, MiB", ylabel="MiB copied a token", title="lossless offload")
    axis.grid(alpha=0.3)
    axis.legend()


def domain_shift(records: Sequence[Record]) -> Figure:
    """KL less uniform, text by text, and the subjects."""
    figure, axes = plt.subplots(1, len(records), figsize=(8 * len(records), 4), squeeze=False)
    for axis, record in zip(axes[0], records, strict=True):
        base = next(np.array(r["kl"]) for r in record["results"] if r["planner"] == BASELINE)
        for result in record["results"]:
            axis.plot(np.array(result["kl"]) - base, ".-", label=result["planner"])
        for number, phase in enumerate(record["phases"]):
            axis.axvline(number * record["texts_a_phase"] - 0.5, color="#bbbbbb")
            place = number * record["texts_a_phase"], 0.97
            axis.annotate(phase, place, xycoords=("data", "axes fraction"), va="top")
        axis.set(
            xlabel="text", ylabel="KL less uniform, nats", title=f"{record['budget_bits']:g} bits"
        )
        axis.legend(fontsize="small")
    return figure


def planners(records: Sequence[Record]) -> Figure:
    """KL of each planner, a group of bars a budget."""
    entries = results_of(records)
    budgets = sorted({entry["budget_bits"] for entry in entries})
    names = list(dict.fromkeys(entry["planner"] for entry in entries))
    cells = {(entry["planner"], entry["budget_bits"]): entry for entry in entries}
    figure, axis = plt.subplots(figsize=(8, 5))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [cells.get((name, budget)) for budget in budgets]
        places = [x + number * width for x, entry in enumerate(own) if entry is not None]
        found = [entry for entry in own if entry is not None]
        kl = np.array([entry["kl"] for entry in found])
        ends = np.array([entry["kl_interval"] for entry in found]).T
        axis.bar(places, kl, width, yerr=np.abs(ends - kl), capsize=1, label=name)
    axis.set_xticks(np.arange(len(budgets)) + 0.4, [f"{budget:g} bits" for budget in budgets])
    axis.set(ylabel="KL, nats a token")
    axis.legend(fontsize="small", ncols=2)
    return figure


def long_context(records: Sequence[Record]) -> Figure:
    """Keys found and the width of experts, by length."""
    results = results_of(records)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name in dict.fromkeys(result["planner"] for result in results):
        own = [result for result in results if result["planner"] == name]
        tokens = [result["tokens"] for result in own]
        found = whiskers([result["found"] for result in own])
        left.errorbar(tokens, *found, fmt="o-", capsize=3, label=name)
        right.plot(tokens, [result["mean_bits_at_end"] or 16 for result in own], "o-", label=name)
    left.set(xlabel="tokens", ylabel="pass keys found", ylim=(-0.05, 1.05))
    right.set(xlabel="tokens", ylabel="mean bits of an expert weight")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def decomposition(records: Sequence[Record]) -> Figure:
    """Perplexity by method and ratio."""
    results = results_of(records)
    first = results[0]["perplexity"]
    figure, axis = plt.subplots(figsize=(7, 4))
    lines: dict[str, list[Record]] = {}
    for result in results:
        if result["kept_ratio"] is not None and result["method"] != "dense":
            name = f"{result['method']}, {result['allotment']}"
            lines.setdefault(name, []).append(result)
    for name, own in lines.items():
        own.sort(key=lambda result: result["kept_ratio"])
        ratios = [result["kept_ratio"] for result in own]
        axis.plot(ratios, [result["perplexity"] for result in own], "o-", label=name)
    axis.axhline(first, color="black", linestyle="--", label="dense")
    axis.set(xlabel="parameters kept", ylabel="perplexity", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


class Kind(NamedTuple):
    """A kind of results.

    Attributes:
        table: Makes the Markdown.
        plot: Makes the figure.
        fields: What every result of this kind has.
    """

    table: Callable[[Sequence[Record]], str]
    plot: Callable[[Sequence[Record]], Figure]
    fields: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "quality": Kind(_quality_tables.quality, quality, ("memory",)),
    "planners": Kind(_tables.planners, planners, ("planner", "budget_bits", "kl_interval")),
    "domain_shift": Kind(_tables.domain_shift, domain_shift, ("planner", "kl_of_phases")),
    "long_context": Kind(_tables.long_context, long_context, ("found", "tokens", "most_kv_pages")),
    "before_after": Kind(_quality_tables.before_after, before_after, ("texts", "tasks")),
    "decomposition": Kind(
        _tables.decomposition, decomposition, ("model", "method", "kept_ratio", "perplexity")
    ),
}


def main(argv: Sequence[str] | None) -> None:
    """Reads, and writes the tables whose inputs are given."""
    parser = argparse.ArgumentParser(description="Tables and plots of results.")
    for name in KINDS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=Path, nargs="+", default=[], help="results, JSON")
    parser.add_argument("--scores", type=Path, help="of one model, from evaluate.py")
    parser.add_argument("--golden", type=Path, help="the same by make_golden_scores.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for .md and .png")
    flags = parser.parse_args(argv)
    if (flags.scores is None) != (flags.golden is None):
        raise UserError("give --scores and --golden together")
    flags.out.mkdir(parents=True, exist_ok=True)
    if flags.scores is not None:
        record = read(flags.scores, ("tasks",))
        text = _quality_tables.scores(record, read_json(flags.golden))
        note = f"{NOTE}\n\n    {record['command']}\n"
        (flags.out / "scores.md").write_text(f"{text}\n{note}", encoding="utf-8")
        print(flags.out / "scores.md")
    for name, kind in KINDS.items():
        paths = getattr(flags, name)
        if not paths:
            continue
        records = [read(path, kind.fields) for path in paths]
        figure = kind.plot(records)
        commands = "\n".join(f"    {record['command']}" for record in records)
        note = f"{NOTE}\n\n{commands}\n"
        (flags.out / f"{name}.md").write_text(f"{kind.table(records)}\n{note}", encoding="utf-8")
        figure.tight_layout()
        figure.savefig(flags.out / f"{name}.png", dpi=120)
        plt.close(figure)
        print(flags.out / f"{name}.md")


if __name__ == "__main__":
    sys.exit(run(main))
