"""Results as tables in Markdown: what make_tables.py, compare_planners.py and others show."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pw_jax.evaluation.bootstrap import interval

MIB = 1 << 20
BASELINE = "uniform"
FULL = "full"

Record = Mapping[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def results_of(records: Sequence[Record]) -> list[Record]:
    """The results of several files, one after another."""
    return [result for record in records for result in record["results"]]


def distinct(results: Sequence[Record], key: Callable[[Record], Hashable]) -> list[Record]:
    """The first result of each key: what several runs compare with is shown once."""
    seen: dict[Hashable, Record] = {}
    for result in results:
        seen.setdefault(key(result), result)
    return list(seen.values())


def span(estimate: Record, scale: float = 1, digits: int = 1) -> str:
    """A mean with its interval."""
    mean, low, high = (scale * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def edges(ends: Sequence[float]) -> str:
    """An interval of a difference, in thousandths."""
    low, high = (1e3 * end for end in ends)
    return f"{low:+.1f}..{high:+.1f}"


def paired(ours: ArrayLike, theirs: ArrayLike) -> str:
    """A mean difference in thousandths with its interval, resampled in pairs."""
    difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    return f"{1e3 * difference.mean():+.1f} ({edges(interval(difference))})"


def planners(records: Sequence[Record]) -> str:
    """Table 2: KL of each planner, its differences to uniform and to full, and the bytes held."""
    entries = results_of(records)
    step = max(record["largest_step_bytes"] for record in records)
    references = {e["budget_bits"]: e["kl_of_texts"] for e in entries if e["planner"] == FULL}

    def less_uniform(entry: Record) -> str:
        text = f"{1e3 * entry['kl']:.1f}"
        if entry["planner"] == BASELINE or "kl_less_uniform" not in entry:
            return text
        return f"{text} ({edges(entry['kl_less_uniform_interval'])})"

    def less_full(entry: Record) -> str:
        reference = references.get(entry["budget_bits"])
        return "" if reference is None else paired(entry["kl_of_texts"], reference)

    others = [entry for entry in entries if entry["planner"] != FULL]
    parts = [
        by_budget("KL, mnat (less uniform)", entries, less_uniform),
        by_budget("KL less full, mnat", others, less_full),
        bytes_line(entries, step),
    ]
    return "\n".join(parts)


def by_budget(title: str, entries: Sequence[Record], cell: Callable[[Record], str]) -> str:
    """A row a planner, a column a budget."""
    budgets = sorted({entry["budget_bits"] for entry in entries})
    cells = {(entry["planner"], entry["budget_bits"]): cell(entry) for entry in entries}
    names = dict.fromkeys(entry["planner"] for entry in entries)
    rows = [[name, *(cells.get((name, budget), "") for budget in budgets)] for name in names]
    return markdown([title, *(f"{budget:g} bits" for budget in budgets)], rows)


def bytes_line(entries: Sequence[Record], largest_step: int) -> str:
    """How equal the bytes are."""
    short = [
        entry["budget_bytes"] - held for entry in entries for held in entry["held_bytes_of_texts"]
    ]
    least = min(entry["budget_bytes"] for entry in entries) / MIB
    return (
        f"Weights held {min(short)} to {max(short)} bytes less than the budget, of {least:.1f} MiB "
        f"and more; the largest step of a block is {largest_step} bytes.\n"
    )


def movement(report: Record) -> str:
    """Of scripts/page_movement.py; KL in thousandths of a nat."""
    rows = [
        [
            phase,
            f"{one['fixed_bits']:.2f}, {one['moving_bits']:.2f}",
            f"{1e3 * one['fixed_kl']:.1f}, {1e3 * one['moving_kl']:.1f}",
            f"{1e3 * one['moving_less_fixed']:+.1f} ({edges(one['moving_less_fixed_interval'])})",
        ]
        for phase, one in report["results"].items()
    ]
    header = ["phase", "bits: fixed, moving", "KL: fixed, moving", "difference (95% interval)"]
    return markdown(header, rows)


def ramps(reports: Mapping[str, Record]) -> str:
    """Of `scripts/benchmark.py ramp`: a column a report, under its name; times in milliseconds."""

    def times(report: Record, name: str) -> str:
        found = report.get(name)  # files of earlier versions lack some
        return "" if found is None else ", ".join(f"{found[p]:.2f}" for p in ("p50", "p99", "p100"))

    def numbers(report: Record, *names: str) -> str:
        return ", ".join(str(report[name]) for name in names)

    def limits(report: Record) -> str:
        names = ("moves_per_turn", "restore_pages_per_step")
        return numbers(report, *names) if names[0] in report else ""

    rows: dict[str, Callable[[Record], str]] = {
        "layers": lambda r: str(r["layers"]),
        "most blocks a turn, pages a plan of raises": limits,
        "sequences: steady, burst": lambda r: numbers(r["ramp"], "steady", "burst"),
        "mean bits: before, least, after": lambda r: ", ".join(f"{b:.2f}" for b in r["mean_bits"]),
        "blocks lowered, raised": lambda r: numbers(r, "lowered", "raised"),
        "pages of experts that held keys one boundary later; turns": lambda r: numbers(
            r["handed_over_within_a_step"], "pages", "turns"
        ),
        "compilations, preemptions": lambda r: numbers(r, "compilations", "preemptions"),
        "turns without a plan": lambda r: str(r["turns_without_plan_ms"]["count"]),
        "their time: median, 99%, most": lambda r: times(r, "turns_without_plan_ms"),
        "of the host's thread alone": lambda r: times(r, "host_without_plan_ms"),
        "over the median of as many sequences": lambda r: times(r, "ratio_without_plan"),
        "turns with a plan": lambda r: str(r["turns_with_plan_ms"]["count"]),
        "their time": lambda r: times(r, "turns_with_plan_ms"),
        "of it planning and moving": lambda r: times(r, "plan_and_move_ms"),
        "of the host's thread alone, with a plan": lambda r: times(r, "host_with_plan_ms"),
        "over the median of turns without": lambda r: times(r, "ratio_with_plan"),
        "above 1.5 medians: without a plan, with, because of it": lambda r: numbers(
            r, "slow_without_plan", "slow_with_plan", "slow_because_of_plan"
        ),
    }
    cells = [[name, *(cell(r) for r in reports.values())] for name, cell in rows.items()]
    return markdown(["", *reports], cells)


def domain_shift(records: Sequence[Record]) -> str:
    """Table 2, while the subject changes: KL in each phase, less uniform and less full."""
    parts = []
    for record in records:
        full = next(r["kl"] for r in record["results"] if r["planner"] == FULL)
        places = np.split(np.arange(len(full)), len(record["phases"]))
        rows = []
        for result in record["results"]:
            row, kl = [result["planner"]], np.array(result["kl"])
            for phase, own in zip(result["kl_of_phases"], places, strict=True):
                text = f"{1e3 * phase['kl']:.1f}"
                if result["planner"] != BASELINE:
                    text += f" ({edges(phase['kl_less_uniform_interval'])})"
                if result["planner"] != FULL:
                    text += f"; {paired(kl[own], np.array(full)[own])}"
                row.append(text)
            row.append(f"{np.mean(result['changed'][1:]):.1%}, {result['moved_buckets'][-1]:.1%}")
            rows.append(row)
        header = [f"{record['budget_bits']:g} bits: KL, mnat (less uniform); less full"]
        header += [*record["phases"], "widths changed a text, experts in other buckets at the end"]
        parts.append(markdown(header, rows))
    return "\n".join(parts)


def long_context(records: Sequence[Record]) -> str:
    """Table 3: retrieval while keys and values take the experts' pages."""
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
        for result in results_of(records)
    ]
    return markdown(header, rows)


def decomposition(records: Sequence[Record]) -> str:
    """Table 4: method and ratio, and the cache of keys and values against that of latents."""
    results = distinct(results_of(records), lambda result: result["model"])
    first = results[0]["perplexity"]
    caches = list(dict.fromkeys(kind for result in results for kind in result.get("caches", {})))
    rows = [
        [
            result["method"],
            result["allotment"] or "",
            "" if result["kept_ratio"] is None else f"{result['kept_ratio']:.0%}",
            f"{result['parameters']:,}",
            f"{result['perplexity']:.4g}",
            f"{result['perplexity'] / first:.2f}",
            *(_cache(result.get("caches", {}).get(kind)) for kind in caches),
        ]
        for result in results
    ]
    header = ["method", "allotment", "kept", "parameters", "perplexity", "against the first"]
    header += [f"{kind} cache: perplexity, bytes a token, MiB of pages" for kind in caches]
    return markdown(header, rows)


def _cache(found: Record | None) -> str:
    if found is None:
        return ""
    return f"{found['perplexity']:.6g}, {found['token_bytes']}, {found['pool_bytes'] / MIB:.2f}"
