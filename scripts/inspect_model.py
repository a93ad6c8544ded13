"""Prints what a model is made of, from its config.json alone: no weights, no memory.

python scripts/inspect_model.py --config DIR_OR_FILE
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from _command import run
from rich.console import Console
from rich.table import Table

from checkpoints.manifest import ConvertOptions, shared_tables
from checkpoints.tensor_files import read_json
from pw_jax.errors import UserError
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.paging.layout import (
    MODULES,
    ExpertFormat,
    PagingLayout,
    choose_page_words,
    paging_layout,
)

KV_DTYPE = "bfloat16"
BFLOAT16_BYTES = 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description="Sizes of a model, from its config.json alone.")
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a config.json, or a folder that holds one")
    add("--seed-bits", type=int, default=3, help="lowest width (default %(default)s)")
    add("--parent-bits", type=int, default=8, help="highest width (default %(default)s)")
    add("--page-kib", type=float, help="size of a page; default what the engine would choose")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Computes and prints."""
    flags = parse(argv)
    path = flags.config / "config.json" if flags.config.is_dir() else flags.config
    config = registry.read_config(read_json(path), str(path))
    widths = ConvertOptions(seed_bits=flags.seed_bits, parent_bits=flags.parent_bits)
    layout = _layout(str(path), config, widths, flags.page_kib)
    sizes = {"config": str(flags.config), **summary(config, layout)}
    if flags.json:
        print(json.dumps(sizes))
        return
    for table in tables(sizes):
        Console().print(table)


def _layout(
    where: str, config: ModelConfig, widths: ConvertOptions, page_kib: float | None
) -> PagingLayout:
    """The layouts that an engine would use."""
    shape = config.expert_shape
    expert_format = None
    if shape is not None:
        shared = shared_tables(where, shape, widths.parent_bits)
        expert_format = ExpertFormat(
            widths.seed_bits, widths.parent_bits, (shared["gate_up"], shared["down"])
        )
    page_words = (
        choose_page_words(config.kv_shapes, kv_dtype=KV_DTYPE, expert_shape=shape)
        if page_kib is None
        else int(page_kib * 256)
    )
    try:
        return paging_layout(
            config.kv_shapes,
            kv_dtype=KV_DTYPE,
            page_words=page_words,
            expert_shape=shape,
            expert_format=expert_format,
            moe_layers=len(config.moe_layers),
        )
    except ValueError as problem:
        raise UserError(
            f"pages of {page_words / 256:g} KiB do not suit this model: {problem}"
        ) from problem


def summary(config: ModelConfig, layout: PagingLayout) -> dict[str, Any]:
    """All sizes, ready for JSON.

    Args:
        config: The model.
        layout: Its pages.
    """
    dense = registry.build_model(config, "dense", jnp.bfloat16)
    paged = registry.build_model(config, "paged", jnp.bfloat16)
    blocks = [
        {
            "module": name,
            "rows": matrix.rows,
            "columns": matrix.columns,
            "rows_per_table": matrix.rows_per_table,
            "layers": layout.moe_layers,
            "experts": layout.experts,
            "pages_per_plane": matrix.plane_pages,
            "pages_per_width": {bits: matrix.pages(bits) for bits in matrix.widths},
        }
        for name, matrix in zip(MODULES, layout.matrices or (), strict=bool(layout.matrices))
    ]
    widths = layout.matrices[0].widths if layout.matrices else ()
    all_pages = {
        bits: sum(b["layers"] * b["experts"] * b["pages_per_width"][bits] for b in blocks)
        for bits in widths
    }
    groups = [
        {
            "layers": len(group.layers),
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "window": group.window,
            "bytes_per_token": 4 * group.layout.words_per_token * len(group.layers),
            "tokens_per_page": group.layout.tokens_per_page,
        }
        for group in layout.kv_groups
        for shape in [config.kv_shapes[group.layers[0]]]
    ]
    outside = registry.parameter_count(paged)
    return {
        "model_type": config.model_type,
        "layers": config.num_layers,
        "parameters": registry.parameter_count(dense),
        "parameters_outside_pages": outside,
        "bytes_outside_pages": BFLOAT16_BYTES * outside,
        "page_bytes": layout.page_bytes,
        "blocks": blocks,
        "expert_pages": all_pages,
        "expert_bytes": {bits: pages * layout.page_bytes for bits, pages in all_pages.items()},
        "kv_groups": groups,
        "kv_bytes_per_token": sum(group["bytes_per_token"] for group in groups),
    }


def tables(sizes: dict[str, Any]) -> list[Table]:
    """The sizes for people."""
    return [_model_table(sizes), *([_block_table(sizes)] if sizes["blocks"] else [])]


def _model_table(sizes: dict[str, Any]) -> Table:
    out = Table(title=f"{sizes['config']} ({sizes['model_type']})")
    out.add_column("what")
    out.add_column("size", justify="right")
    rows = {
        "layers": f"{sizes['layers']}",
        "parameters": f"{sizes['parameters'] / 1e9:.2f} B",
        "outside pages, bfloat16": _gib(sizes["bytes_outside_pages"]),
        "page": f"{sizes['page_bytes'] / 1024:g} KiB",
    }
    for group in sizes["kv_groups"]:
        window = f", window {group['window']}" if group["window"] is not None else ""
        heads = f"{group['layers']} layers of {group['kv_heads']} x {group['head_dim']}{window}"
        rows[f"KV of a token, {heads}"] = (
            f"{group['bytes_per_token'] / 1024:g} KiB, {group['tokens_per_page']} tokens a page"
        )
    rows["KV of a token, bfloat16"] = f"{sizes['kv_bytes_per_token'] / 1024:g} KiB"
    for what, size in rows.items():
        out.add_row(what, size)
    return out


def _block_table(sizes: dict[str, Any]) -> Table:
    first, *_ = sizes["blocks"]
    out = Table(title=f"blocks: {first['layers']} layers x {first['experts']} experts x module")
    out.add_column("pages of a block")
    for block in sizes["blocks"]:
        out.add_column(block["module"], justify="right")
    out.add_column("all experts", justify="right")
    shapes = [f"{b['rows']} x {b['columns']}" for b in sizes["blocks"]]
    out.add_row("rows x columns", *shapes, "")
    out.add_row("rows a table", *(f"{b['rows_per_table']}" for b in sizes["blocks"]), "")
    out.add_row("one plane", *(f"{b['pages_per_plane']}" for b in sizes["blocks"]), "")
    for bits, total in sizes["expert_bytes"].items():
        pages = (f"{b['pages_per_width'][bits]}" for b in sizes["blocks"])
        out.add_row(f"{bits} bits, with table", *pages, _gib(total))
    return out


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(run(main))
