"""Tables of tensor parallelism out of the raw results of `benchmark.py tp`, for the documentation.

python scripts/make_tp_table.py docs/results/cpu/tp_bytes.json        # of --bytes
python scripts/make_tp_table.py docs/results/multi_gpu/p2p0.json      # times
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _command import run
from _tables import markdown

from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from sharding.layouts import LAYOUTS

Record = Mapping[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Tables out of benchmark.py tp.")
    parser.add_argument("results", type=Path, help="JSON of benchmark.py tp")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Prints Markdown."""
    flags = parse(argv)
    found = read_json(flags.results)
    records = found.get("records") or []
    if not records or "layout" not in records[0]:
        raise UserError(f"{flags.results} holds no records of benchmark.py tp")
    if "wire_bytes" in records[0]:
        print(bytes_table(records), end="")
        return
    if found["device"] == "cpu":
        print(ran_table(records, found["shrink"]), end="")
        return
    print(times_table(records), end="")


def bytes_table(records: Sequence[Record]) -> str:
    """A row for each model, ratio and number of devices: KiB of a token, layer and device."""
    header = ["model", "removed", "devices", *(f"{layout}" for layout in LAYOUTS)]
    header += ["cache: full", "latent", "weights: dense", "gathered", "sharded"]
    by_case = {_key(record): record for record in records}
    rows = []
    for model, devices, ratio in _groups(records):

        def value(layout: str, field: str, kv: str = "full", where=(model, devices, ratio)) -> str:
            model, devices, ratio = where
            own = 1.0 if layout == "dense" else ratio
            record = by_case.get((model, layout, devices, own, kv))
            unit = (1 << 20) if field == "weight_bytes" else 1024
            return "-" if record is None else f"{record[field] / unit:.1f}"

        row = [model, f"{100 * (1 - ratio):.0f}%", f"{devices}"]
        row += [value(layout, "wire_bytes") for layout in LAYOUTS]
        row += [value("gathered", "cache_bytes", kv) for kv in ("full", "latent")]
        row += [value(layout, "weight_bytes") for layout in ("dense", "gathered", "sharded")]
        rows.append(row)
    return markdown(header, rows)


def times_table(records: Sequence[Record]) -> str:
    """A row a record."""
    header = ["model", "layout", "devices", "kept", "KV", "workload", "tokens/s"]
    header += ["first token, ms", "a token, ms", "spread", "in collectives, prefill", "decode"]
    rows = []
    for record in records:
        first, decode = record["model_first_token_ms"], record["decode_us"]
        names = [record["model"], record["layout"], f"{record['devices']}"]
        names += [f"{100 * record['ratio']:.0f}%", record["kv"], record["workload"]]
        prefill = record["prefill_us"]
        share = record["prefill_collectives_us"] / prefill if prefill else None
        rows.append(
            [
                *names,
                f"{record['model_tokens_per_s']:.0f}",
                "-" if first is None else f"{first:.1f}",
                f"{record['model_per_token_ms']:.2f}",
                f"{100 * record['decode_spread_us'] / decode:.0f}%",
                "-" if share is None else f"{100 * share:.0f}%",
                f"{100 * record['decode_collectives_us'] / decode:.0f}%",
            ]
        )
    return markdown(header, rows)


def ran_table(records: Sequence[Record], shrink: int) -> str:
    """What was run where times say nothing: a row for each workload and number of devices."""
    names = ("model", "layout", "ratio", "kv")
    rows = []
    for workload, devices in sorted({(one["workload"], one["devices"]) for one in records}):
        own = [one for one in records if (one["workload"], one["devices"]) == (workload, devices)]
        had = (", ".join(sorted({f"{one[name]}" for one in own})) for name in names)
        rows.append([workload, f"{devices}", f"{len(own)}", f"{own[0]['batch']}", *had])
    header = ["workload", "devices", "cases", f"batch (divided by {shrink})"]
    return markdown([*header, "models", "layouts", "kept", "KV"], rows)


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("model", "layout", "devices", "ratio", "kv"))


def _groups(records: Iterable[Record]) -> list[tuple[str, int, float]]:
    """Models, devices and ratios, in order; one device sends nothing."""
    found = {
        (record["model"], record["devices"], record["ratio"]): None
        for record in records
        if record["layout"] != "dense" and record["devices"] > 1
    }
    return sorted(found, key=lambda group: (group[0], -group[2], group[1]))


if __name__ == "__main__":
    sys.exit(run(main))
