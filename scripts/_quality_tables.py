"""Results of evaluate.py and offload.py as tables in Markdown."""

from collections.abc import Sequence

from _tables import BASELINE, MIB, Record, distinct, markdown, paired, results_of, span

from pw_jax.errors import UserError

SOURCE = "source"
METRICS = ("acc_norm", "acc", "greedy")
"""The first of these that a task has is what tables show, beside bits per byte."""


def weights_mib(result: Record) -> float:
    """Memory of the weights alone: arrays, and pages that hold experts."""
    return (result["memory"]["arrays"] + result["memory"]["expert_pages"]) / MIB


def named(result: Record) -> str:
    """What a result is called."""
    return result.get("planner", result["held"])


def metric_of(task: Record) -> tuple[str, Record]:
    """The metric of a task that is shown."""
    name = next(name for name in METRICS if name in task["metrics"])
    return name, task["metrics"][name]


def quality(records: Sequence[Record]) -> str:
    """Table 1: quality against memory, then tasks, then what lossless offload copies.

    KL and bits a byte are in thousandths. Differences are paired: of KL by sequence, of bits a byte
    by task, since a whole task can shift one way (yes for no), however many questions it has.
    """
    results = measured_quality(records)
    texts = list(results[0]["texts"])
    uniform = {r.get("bits"): r for r in results if named(r) == BASELINE}
    source = next((r for r in results if named(r) == SOURCE), None)
    header = ["held", "bits", "weights, MiB", "live / predicted"]
    for text in texts:
        header += [f"{text}: perplexity", "KL, mnat", "less uniform"]
    if results[0]["tasks"]:
        header += ["tasks: bits a byte, less source", "less uniform"]
    rows = []
    for result in results:
        memory = result["memory"]
        row = [*_held(result), f"{weights_mib(result):.1f}"]
        row.append(f"{memory['live'] / memory['predicted']:.4f}")
        for text in texts:
            found = result["texts"][text]
            kl = found["metrics"].get("kl")
            row += [f"{found['perplexity']:.2f}", "" if kl is None else span(kl, 1e3)]
            row.append(_less_uniform(result, uniform.get(result.get("bits")), text))
        if result["tasks"]:
            bases = source, uniform.get(result.get("bits"))
            row += [_tasks_less(result, base) for base in bases]
        rows.append(row)
    parts = [markdown(header, rows)]
    if results[0]["tasks"]:
        parts.append(_tasks(results))
    if fetched := offloads(records):
        parts.append(_offload(fetched))
    return "\n".join(parts)


def _held(result: Record) -> list[str]:
    bits = result["mean_bits"]
    return [named(result), result["dtype"] if bits is None else f"{bits:.2f}"]


def _tasks_less(result: Record, base: Record | None) -> str:
    if base is None or result is base:
        return ""
    return paired(task_bits(result), task_bits(base))


def task_bits(result: Record) -> list[float]:
    """Bits a byte of each task's gold answers."""
    return [_bits(task) for task in result["tasks"].values()]


def _tasks(results: Sequence[Record]) -> str:
    tasks = results[0]["tasks"]
    shown = [f"{name}: {metric_of(task)[0]}, %; bits a byte" for name, task in tasks.items()]
    rows = []
    for result in results:
        own = [result["tasks"][name] for name in tasks]
        rows.append([*_held(result), *(f"{_percent(task)}; {_bits(task):.3f}" for task in own)])
    return markdown(["held", "bits", *shown], rows)


def _percent(task: Record) -> str:
    return span(metric_of(task)[1], 100)


def _bits(task: Record) -> float:
    return task["metrics"]["bits_per_byte"]["mean"]


def before_after(records: Sequence[Record]) -> str:
    """One model before and after its training: the first results of two files."""
    before, after = first_two(records)
    rows = [
        [f"{name}: perplexity", f"{text['perplexity']:.2f}", f"{end['perplexity']:.2f}", "", "", ""]
        for name, text in before["texts"].items()
        for end in (after["texts"][name],)
    ]
    for name, task in before["tasks"].items():
        end = after["tasks"][name]
        difference = paired(end["items"]["bits_per_byte"], task["items"]["bits_per_byte"])
        scores = [_percent(task), _percent(end), f"{_bits(task):.3f}", f"{_bits(end):.3f}"]
        rows.append([f"{name}: {metric_of(task)[0]}, %", *scores, difference])
    header = [
        "",
        "before",
        "after",
        "bits a byte before",
        "after",
        "after less before, thousandths",
    ]
    return markdown(header, rows)


def first_two(records: Sequence[Record]) -> tuple[Record, Record]:
    """The first result of each of two files, of the same questions.

    Raises:
        UserError: Not two files, or not the same texts and tasks.
    """
    if len(records) != 2:
        raise UserError(f"--before-after takes two files, before and after, not {len(records)}")
    before, after = (record["results"][0] for record in records)
    for kind in ("texts", "tasks"):
        if list(before[kind]) != list(after[kind]):
            raise UserError(f"--before-after: the two files have other {kind}")
    return before, after


def measured_quality(records: Sequence[Record]) -> list[Record]:
    """The results of evaluate.py, without repetition; those of one size together, uniform first.

    Raises:
        UserError: There are none.
    """
    found = [result for result in results_of(records) if "texts" in result]
    if not found:
        raise UserError("--quality needs results of evaluate.py")
    found = distinct(found, lambda r: (named(r), r.get("bits"), r.get("budget_gib")))

    def place(result: Record) -> tuple[float, bool, str]:
        size = result.get("bits") or result.get("budget_gib") or 0
        return size, named(result) != BASELINE, named(result)

    return sorted(found, key=place)


def offloads(records: Sequence[Record]) -> list[Record]:
    """The results of offload.py."""
    return [result for result in results_of(records) if "misses_a_token" in result]


def _offload(results: Sequence[Record]) -> str:
    """Lossless offload: what the source's own quality costs in copies at less memory."""
    rows = []
    for result in results:
        seconds = result["copy_seconds_a_token"]
        rows.append(
            [
                f"{result['kept']} of {result['experts']}",
                str(result["batch"]),
                f"{weights_mib(result):.1f}",
                span(result["misses_a_token"], digits=2),
                f"{result['miss_rate']:.1%}",
                f"{result['bytes_a_token'] / MIB:.2f}",
                "" if seconds is None else f"{1e3 * seconds:.2f}",
            ]
        )
    header = ["lossless offload: experts kept a layer", "sequences", "weights, MiB"]
    header += ["misses a token", "of uses", "MiB copied a token", "ms of copying"]
    return markdown(header, rows)


def _less_uniform(result: Record, base: Record | None, text: str) -> str:
    if base is None or result is base or "kl" not in result["texts"][text]["items"]:
        return ""
    ours, theirs = (one["texts"][text]["items"]["kl"] for one in (result, base))
    return paired(ours, theirs)


def scores(record: Record, golden: Record) -> str:
    """Task scores of one model beside those of another implementation, on the same questions."""
    (result,) = record["results"]
    rows = []
    for name, theirs in golden["tasks"].items():
        ours = result["tasks"][name]
        for metric, value in theirs["metrics"].items():
            digits, scale = (4, 1) if metric == "bits_per_byte" else (1, 100)
            unit = "" if scale == 1 else ", %"
            own = span(ours["metrics"][metric], scale, digits)
            rows.append([f"{name}: {metric}{unit}", own, f"{scale * value:.{digits}f}"])
    versions = golden["versions"]
    other = f"transformers {versions['transformers']}, torch {versions['torch']}"
    return markdown([f"first {golden['limit']} questions", "here", other], rows)
