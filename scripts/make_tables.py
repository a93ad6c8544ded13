"""Tables and plots out of raw results, so that no figure is written by hand.

    python scripts/make_tables.py --quality a.json b.json --planners planners.json \
        --long-context long.json --decomposition decomposition.json --out docs/results/cpu

Writes quality.md and quality.png (table 1, from evaluate.py), planners.md and .png (2, from
compare_planners.py), long_context.md and .png (3, from long_context.py), decomposition.md and .png
(4, from perplexity.py): those whose inputs are given.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no screen is needed

import matplotlib.pyplot as plt
import numpy as np
from _command import run
from matplotlib.figure import Figure

from pw_jax.errors import UserError
from pw_jax.evaluation.bootstrap import interval

MIB = 1 << 20
METRICS = ("acc_norm", "acc", "greedy")
"""The first of these that a task has is what tables show, beside bits per byte."""

NOTE = "Made by scripts/make_tables.py; in brackets 95% bootstrap intervals. From"

Record = Mapping[str, Any]
Made = tuple[str, Figure]


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


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def span(estimate: Record, scale: float = 1, digits: int = 1) -> str:
    """A mean with its interval."""
    mean, low, high = (scale * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def weights_mib(result: Record) -> float:
    """Memory of the weights alone: arrays, and pages that hold experts."""
    return (result["memory"]["arrays"] + result["memory"]["expert_pages"]) / MIB


def named(result: Record) -> str:
    """What a result is called."""
    return result.get("planner", result["held"])


def quality(records: Sequence[Record]) -> Made:
    """Table 1: quality against memory."""
    results = [result for record in records for result in record["results"]]
    seen: dict[tuple[Any, ...], Record] = {}
    for result in results:  # a reference that several runs measured is shown once
        seen.setdefault((named(result), result.get("bits"), result.get("budget_gib")), result)
    results = list(seen.values())
    texts, tasks = list(results[0]["texts"]), list(results[0]["tasks"])
    uniform = {r.get("bits"): r for r in results if named(r) == "uniform"}
    header = ["held", "bits", "weights, MiB", "live / predicted"]
    for text in texts:
        header += [f"{text}: perplexity", "KL, mnat", "less uniform"]
    for task in tasks:
        header.append(f"{task}: {metric_of(results[0]['tasks'][task])[0]}, bits a byte")
    rows = []
    for result in results:
        memory, bits = result["memory"], result["mean_bits"]
        row = [named(result), result["dtype"] if bits is None else f"{bits:.2f}"]
        row.append(f"{weights_mib(result):.1f}")
        row.append(f"{memory['live'] / memory['predicted']:.4f}")
        for text in texts:
            found = result["texts"][text]
            kl = found["metrics"].get("kl")
            row += [f"{found['perplexity']:.2f}", "" if kl is None else span(kl, 1e3)]
            row.append(difference(result, uniform.get(result.get("bits")), text))
        for task in tasks:
            found = result["tasks"][task]
            bits_per_byte = found["metrics"]["bits_per_byte"]["mean"]
            row.append(f"{span(metric_of(found)[1], 100)}, {bits_per_byte:.3f}")
        rows.append(row)
    return markdown(header, rows), quality_plot(results, texts, tasks)


def difference(result: Record, base: Record | None, text: str) -> str:
    """KL less that of uniform at the same size, in thousandths of a nat, paired by sequence."""
    if base is None or result is base or "kl" not in result["texts"][text]["items"]:
        return ""
    ours, theirs = (np.array(one["texts"][text]["items"]["kl"]) for one in (result, base))
    low, high = interval(ours - theirs)
    return f"{1e3 * (ours - theirs).mean():+.1f} ({1e3 * low:+.1f}..{1e3 * high:+.1f})"


def metric_of(task: Record) -> tuple[str, Record]:
    """The metric of a task that is shown."""
    name = next(name for name in METRICS if name in task["metrics"])
    return name, task["metrics"][name]


def quality_plot(results: Sequence[Record], texts: Sequence[str], tasks: Sequence[str]) -> Figure:
    """KL of each text, and the mean of all tasks, against memory."""
    panels = [*texts, *(["tasks"] if tasks else [])]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for name in dict.fromkeys(named(result) for result in results):
            own = sorted((r for r in results if named(r) == name), key=weights_mib)
            sizes = [weights_mib(result) for result in own]
            if panel == "tasks":
                ys = [
                    np.mean([metric_of(r["tasks"][task])[1]["mean"] for task in tasks]) for r in own
                ]
                axis.plot(sizes, ys, "o-", label=name)
                continue
            found = [r["texts"][panel]["metrics"].get("kl") for r in own]
            if None in found or name == "source":
                continue
            means = np.array([kl["mean"] for kl in found])
            ends = np.array([[kl["low"] for kl in found], [kl["high"] for kl in found]])
            axis.errorbar(sizes, means, np.abs(ends - means), fmt="o-", capsize=3, label=name)
        axis.set(xlabel="weights, MiB", title=panel)
        axis.set(ylabel="mean score of the tasks" if panel == "tasks" else "KL, nats a token")
        if panel != "tasks":
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def planners(records: Sequence[Record]) -> Made:
    """Table 2: planners and ablations at equal bytes."""
    entries = [entry for record in records for entry in record["results"]]
    budgets = sorted({entry["budget_bits"] for entry in entries})
    names = list(dict.fromkeys(entry["planner"] for entry in entries))
    cells = {(entry["planner"], entry["budget_bits"]): entry for entry in entries}
    rows = []
    for name in names:
        row = [name]
        for budget in budgets:
            entry = cells.get((name, budget))
            text = "" if entry is None else f"{1e3 * entry['kl']:.1f}"
            if entry is not None and name != "uniform" and "kl_less_uniform_interval" in entry:
                low, high = (1e3 * edge for edge in entry["kl_less_uniform_interval"])
                text += f" ({low:+.1f}..{high:+.1f})"
            row.append(text)
        rows.append(row)
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
    return markdown(
        ["KL, mnat (difference to uniform)", *(f"{b:g}" for b in budgets)], rows
    ), figure


def long_context(records: Sequence[Record]) -> Made:
    """Table 3: retrieval while keys and values take the experts' pages."""
    results = [result for record in records for result in record["results"]]
    header = ["planner", "budget, GiB", "tokens", "keys found, %", "mean bits", "KV pages, most"]
    rows = [
        [
            result["planner"],
            f"{result['budget_bytes'] / (1 << 30):.3f}",
            str(result["tokens"]),
            span(result["found"], 100),
            f"{result['mean_bits_at_end']:.2f}" if result["mean_bits_at_end"] else "",
            str(result["most_kv_pages"]),
        ]
        for result in results
    ]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name in dict.fromkeys(result["planner"] for result in results):
        own = [result for result in results if result["planner"] == name]
        tokens = [result["tokens"] for result in own]
        found = np.array([result["found"]["mean"] for result in own])
        ends = np.array([[r["found"][end] for r in own] for end in ("low", "high")])
        left.errorbar(tokens, found, np.abs(ends - found), fmt="o-", capsize=3, label=name)
        right.plot(tokens, [result["mean_bits_at_end"] or 16 for result in own], "o-", label=name)
    left.set(xlabel="tokens", ylabel="pass keys found", ylim=(-0.05, 1.05))
    right.set(xlabel="tokens", ylabel="mean bits of an expert weight")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    return markdown(header, rows), figure


def decomposition(records: Sequence[Record]) -> Made:
    """Table 4: method and ratio."""
    results = [result for record in records for result in record["results"]]
    first = results[0]["perplexity"]
    rows = [
        [
            result["method"],
            result["allotment"] or "",
            "" if result["kept_ratio"] is None else f"{result['kept_ratio']:.0%}",
            f"{result['parameters']:,}",
            f"{result['perplexity']:.4g}",
            f"{result['perplexity'] / first:.2f}",
        ]
        for result in results
    ]
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
    header = ["method", "allotment", "kept", "parameters", "perplexity", "against the first"]
    return markdown(header, rows), figure


TABLES: Mapping[str, tuple[Callable[[Sequence[Record]], Made], tuple[str, ...]]] = {
    "quality": (quality, ("memory", "texts", "tasks")),
    "planners": (planners, ("planner", "budget_bits", "kl_interval")),
    "long_context": (long_context, ("found", "tokens", "most_kv_pages")),
    "decomposition": (decomposition, ("method", "kept_ratio", "perplexity")),
}


def main(argv: Sequence[str] | None) -> None:
    """Reads, and writes the tables whose inputs are given."""
    parser = argparse.ArgumentParser(description="Tables and plots of results.")
    for name in TABLES:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=Path, nargs="+", default=[], help="results, JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for .md and .png")
    flags = parser.parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    for name, (make, fields) in TABLES.items():
        paths = getattr(flags, name)
        if not paths:
            continue
        records = [read(path, fields) for path in paths]
        text, figure = make(records)
        commands = "\n".join(f"    {record['command']}" for record in records)
        note = f"{NOTE}\n\n{commands}\n"
        (flags.out / f"{name}.md").write_text(f"{text}\n{note}", encoding="utf-8")
        figure.tight_layout()
        figure.savefig(flags.out / f"{name}.png", dpi=120)
        plt.close(figure)
        print(flags.out / f"{name}.md")


if __name__ == "__main__":
    sys.exit(run(main))
