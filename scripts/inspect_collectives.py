"""Prints what a layer communicates under tensor parallelism: compiled, beside the formulas.

python scripts/inspect_collectives.py --config DIR_OR_FILE --tp 8 --layout gathered --ratio 0.8

Compiles for CPU devices of this machine, from shapes alone: no weights, no GPU.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from _command import run
from _layer_shapes import (
    DTYPE,
    RankOf,
    block_shapes,
    check_family,
    make_work,
    ranks_by_ratio,
    ranks_of_layer,
)
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.low_rank.ranks import read_ranks
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.deepseek_v2 import DeepseekV2Config
from sharding import formulas, parallel
from sharding.attention import causal_attention, latent_causal_attention
from sharding.collectives import Collective, read_collectives, total_wire_bytes
from sharding.formulas import BlockShape
from sharding.layouts import LAYOUTS
from sharding.mesh import abstract, tensor_mesh

ITEM_BYTES, SUM_BYTES = 2, 4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Collectives of one decoder layer.")
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a config.json, or a folder that holds one")
    add("--tp", type=int, default=8, help="devices (default %(default)s)")
    add("--ranks", type=Path, help="JSON of ranks as decompose.py takes and writes, for --ratio")
    add("--layer", type=int, default=0, help="whose ranks, with --ranks (default %(default)s)")
    add("--layout", choices=list(LAYOUTS), default="gathered", help="shown in detail")
    add(
        "--ratio",
        type=float,
        default=0.8,
        help="share of parameters that factors keep (%(default)s)",
    )
    add("--tokens", type=int, default=64, help="tokens to compile for (default %(default)s)")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Compiles and prints."""
    flags = parse(argv)
    path = flags.config / "config.json" if flags.config.is_dir() else flags.config
    config = registry.read_config(read_json(path), str(path))
    check_family(config, str(path))
    for name, value, good in (
        ("tp", flags.tp, flags.tp >= 1),
        ("tokens", flags.tokens, flags.tokens >= 1),
        ("ratio", flags.ratio, 0 < flags.ratio <= 2),
        ("layer", flags.layer, 0 <= flags.layer < config.num_layers),
    ):
        if not good:
            raise UserError(f"--{name} {value} is out of range")
    # Fails where JAX already runs, and then what devices there are must do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", flags.tp)
    if len(jax.devices()) < flags.tp:
        raise UserError(f"--tp {flags.tp}, but this process has {len(jax.devices())} devices")
    rank_of, title = ranks_by_ratio(flags.ratio), f"{100 * flags.ratio:g}% of parameters kept"
    if flags.ranks is not None:
        ranks = read_ranks(read_json(flags.ranks), str(flags.ranks))
        rank_of = ranks_of_layer(config, ranks, flags.layer)
        title = f"{flags.ranks.name}, layer {flags.layer}"
    report = inspect(config, flags.tp, flags.layout, rank_of, flags.tokens)
    report = {"config": str(flags.config), "title": title, **report}
    if flags.json:
        print(json.dumps(report))
        return
    console = Console()
    console.print(_detail_table(report))
    console.print(_layout_table(report))
    console.print(verdict(report))


def inspect(
    config: ModelConfig, devices: int, layout: str, rank_of: RankOf, tokens: int
) -> dict[str, Any]:
    """Everything that is printed, ready for JSON; byte counts are per token, layer and device.

    Args:
        config: The model; its first layer with an MLP is taken.
        devices: Of the mesh.
        layout: Shown in detail; all are measured that can hold the layer.
        rank_of: See `block_shapes`.
        tokens: To compile for.

    Raises:
        UserError: The layout cannot hold a matrix that is not factored.
    """
    shapes = block_shapes(config, rank_of)
    layers = {"attention": config.num_layers, "mlp": config.num_layers - len(config.moe_layers)}
    layouts, detail = {}, []
    for name in LAYOUTS:
        try:
            for shape in shapes.values():
                formulas.transfers(name, shape, devices)
        except ValueError as problem:
            if name == layout:
                raise UserError(str(problem)) from problem
            continue
        measured = formula = weights = 0.0
        for block, shape in shapes.items():
            centred = config.model_type == "opt"
            transfers = formulas.transfers(name, shape, devices)
            norms = formulas.norm_transfers(name, centred=centred)
            found = _compile(config, name, devices, block, shape, tokens)
            formula += ITEM_BYTES * sum(one.wire(devices) for one in transfers)
            formula += SUM_BYTES * sum(one.wire(devices) for one in norms)
            measured += total_wire_bytes(found) / tokens
            weights += layers[block] * formulas.weight_elements(name, shape, devices)
            if name == layout:
                detail += _rows(block, found, (*norms, *transfers), devices, tokens)
        kv = config.kv_shapes[0]
        layouts[name] = {
            "measured_bytes": measured,
            "formula_bytes": formula,
            "weight_bytes": ITEM_BYTES * weights,
            "kv_bytes": ITEM_BYTES
            * formulas.kv_elements(name, config.num_heads, kv.kv_heads, kv.head_dim, devices),
        }
    return {
        "model_type": config.model_type,
        "tp": devices,
        "layout": layout,
        "tokens": tokens,
        "blocks": {block: layers[block] for block in shapes},
        "ranks": {
            f"{block}.{m.name}": m.rank
            for block, shape in shapes.items()
            for m in (*shape.entries, shape.last)
        },
        "collectives": detail,
        "layouts": layouts,
    }


def _compile(
    config: ModelConfig, name: str, devices: int, which: str, shape: BlockShape, tokens: int
) -> tuple[Collective, ...]:
    """The collectives of one block in one layout."""
    mesh = tensor_mesh(devices)
    latent = isinstance(config, DeepseekV2Config)
    attend = latent_causal_attention if latent else causal_attention
    work = make_work(config, name, devices, which, shape, attend)

    def step(params: Any, x: jax.Array) -> jax.Array:
        return work.call(mesh, work.block, params, x)

    # Hidden states come padded, as between the layers of a model.
    divided, width = work.block.layout.splits_residual, config.hidden_size
    columns = formulas.round_up(width, devices) if divided else width
    sharding = NamedSharding(mesh, parallel.residual_spec(work.block, 2))
    x = jax.ShapeDtypeStruct((tokens, columns), DTYPE, sharding=sharding)
    params = abstract(mesh, work.block.prepare, work.weights)
    return read_collectives(jax.jit(step).lower(params, x))


def _rows(
    block: str,
    found: tuple[Collective, ...],
    transfers: tuple[formulas.Transfer, ...],
    devices: int,
    tokens: int,
) -> list[dict[str, Any]]:
    """Measured and expected elements a token, matched by kind and width."""
    measured: dict[tuple[str, int], float] = {}
    for one in found:
        for shape in one.shapes:
            alone = formulas.Transfer(one.kind, shape[-1])
            wire = one.runs * alone.wire(one.group)
            if one.kind == "reduce-scatter":  # its result is one share of what was reduced
                alone = formulas.Transfer(one.kind, shape[-1] * one.group)
                wire = one.runs * alone.wire(one.group)
            key = (alone.kind, alone.width)
            measured[key] = measured.get(key, 0.0) + wire
    expected: dict[tuple[str, int], float] = {}
    for one in transfers:
        key = (one.kind, one.width)
        expected[key] = expected.get(key, 0.0) + one.wire(devices)
    keys = [*expected, *(key for key in measured if key not in expected)]
    return [
        {
            "block": block,
            "kind": kind,
            "width": width,
            "formula_elements": expected.get((kind, width), 0.0),
            "measured_elements": measured.get((kind, width), 0.0),
        }
        for kind, width in keys
    ]


def verdict(report: dict[str, Any]) -> str:
    """How the layout compares with the two baselines, in a sentence each."""
    layouts, name = report["layouts"], report["layout"]
    own = layouts[name]["measured_bytes"]
    lines = []
    for other in ("naive", "dense"):
        base = layouts.get(other, {}).get("measured_bytes")
        if other == name or not base:
            continue
        saved = 1 - own / base
        if saved >= 0.05:
            lines.append(f"{name} moves {saved:.1%} fewer bytes than {other}.")
        elif saved > -0.05:
            lines.append(f"{name} is no better than {other} here ({-saved:+.1%} bytes).")
        else:
            lines.append(f"{name} moves {-saved:.1%} more bytes than {other}.")
    return "\n".join(lines)


def _detail_table(report: dict[str, Any]) -> Table:
    title = f"{report['config']}, {report['layout']} over {report['tp']} devices"
    out = Table(title=f"{title}: elements on the wire, a token, layer and device")
    for column in ("block", "collective"):
        out.add_column(column)
    for column in ("width", "formula", "compiled"):
        out.add_column(column, justify="right")
    for row in report["collectives"]:
        numbers = (row["formula_elements"], row["measured_elements"])
        out.add_row(
            row["block"], row["kind"], f"{row['width']}", *(f"{number:.1f}" for number in numbers)
        )
    return out


def _layout_table(report: dict[str, Any]) -> Table:
    blocks = ", ".join(f"{block} of {count} layers" for block, count in report["blocks"].items())
    out = Table(title=f"bfloat16, {report['title']}, {blocks}")
    out.add_column("layout")
    for column in ("formula KiB", "compiled KiB", "vs naive", "vs dense", "weights GiB", "KV B"):
        out.add_column(column, justify="right")
    layouts = report["layouts"]
    for name, row in layouts.items():
        bases = (layouts.get(other, {}).get("measured_bytes") for other in ("naive", "dense"))
        ratios = (f"{row['measured_bytes'] / base:.3f}" if base else "-" for base in bases)
        sizes = (row["formula_bytes"] / 1024, row["measured_bytes"] / 1024)
        out.add_row(
            name,
            *(f"{size:.2f}" for size in sizes),
            *ratios,
            f"{row['weight_bytes'] / 2**30:.2f}",
            f"{row['kv_bytes']}",
        )
    out.caption = "KiB and KV: a token, layer and device. Weights: of all these blocks, a device."
    return out


if __name__ == "__main__":
    sys.exit(run(main))
