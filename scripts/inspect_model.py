"""Prints what a model is made of, from its config.json alone: no weights, no memory.

python scripts/inspect_model.py --config DIR_OR_FILE
python scripts/inspect_model.py --config DIR_OR_FILE --ratio 0.6      # factored: latents too
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from _command import run
from rich.console import Console
from rich.table import Table

from checkpoints.manifest import ConvertOptions, shared_tables
from checkpoints.tensor_files import read_json
from pallas_kernels.page_layout import KvLayout, LatentLayout
from pw_jax.engine.cache_choice import choose_cache, token_bytes
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.memory_plan import plan_layout
from pw_jax.low_rank.layers import factorable_shapes
from pw_jax.low_rank.ranks import check_ratio, read_ranks, uniform_ranks
from pw_jax.models import registry
from pw_jax.models.config import ModelConfig
from pw_jax.models.latent import latent_layers
from pw_jax.paging.layout import MODULES, ExpertFormat

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
    factors = parser.add_mutually_exclusive_group()
    factors.add_argument(
        "--ranks", type=Path, help="JSON of ranks as decompose.py takes and writes"
    )
    factors.add_argument("--ratio", type=float, help="factored to keep that share of each matrix")
    add("--slots", type=int, default=EngineConfig.slots, help="default %(default)s")
    add(
        "--max-sequence-tokens",
        type=int,
        default=EngineConfig.max_sequence_tokens,
        help="with --slots, what the engine chooses its cache by (default %(default)s)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None) -> None:
    """Computes and prints."""
    flags = parse(argv)
    path = flags.config / "config.json" if flags.config.is_dir() else flags.config
    config = registry.read_config(read_json(path), str(path))
    widths = ConvertOptions(seed_bits=flags.seed_bits, parent_bits=flags.parent_bits)
    settings = EngineConfig(
        slots=flags.slots,
        max_sequence_tokens=flags.max_sequence_tokens,
        page_bytes=None if flags.page_kib is None else int(flags.page_kib * 256) * 4,
        kv_dtype=KV_DTYPE,
    )
    sizes = summary(
        config, settings, _expert_format(str(path), config, widths), _ranks(flags, config)
    )
    sizes = {"config": str(flags.config), **sizes}
    if flags.json:
        print(json.dumps(sizes))
        return
    for table in tables(sizes):
        Console().print(table)


def _expert_format(where: str, config: ModelConfig, widths: ConvertOptions) -> ExpertFormat | None:
    """The format that a conversion would give the experts."""
    if config.expert_shape is None:
        return None
    shared = shared_tables(where, config.expert_shape, widths.parent_bits)
    rows = (shared["gate_up"], shared["down"])
    return ExpertFormat(widths.seed_bits, widths.parent_bits, rows)


def _ranks(flags: argparse.Namespace, config: ModelConfig) -> dict[str, int]:
    """Of the linear layers that are to be factored."""
    if flags.ranks is not None:
        return read_ranks(read_json(flags.ranks), str(flags.ranks))
    if flags.ratio is None:
        return {}
    check_ratio(flags.ratio)
    return uniform_ranks(factorable_shapes(registry.build_model(config)), flags.ratio)


def summary(
    config: ModelConfig,
    settings: EngineConfig,
    expert_format: ExpertFormat | None,
    ranks: Mapping[str, int],
) -> dict[str, Any]:
    """All sizes, ready for JSON.

    Args:
        config: The model.
        settings: Of the engine whose pages and cache are shown.
        expert_format: Of the experts, if there are any.
        ranks: Of the linear layers that are factored.

    Raises:
        UserError: The page size does not suit the model.
    """
    dense = registry.build_model(config, "dense", jnp.bfloat16, ranks)
    paged = registry.build_model(config, "paged", jnp.bfloat16, ranks)
    latents = latent_layers(paged)
    layout = plan_layout(config, settings, expert_format, latents)
    cache = {"full": token_bytes(config.kv_shapes, KV_DTYPE), "latent": None}
    if latents:
        asked = dataclasses.replace(settings, kv_cache="latent")
        cache["latent"] = token_bytes(choose_cache(config, latents, asked), KV_DTYPE)
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
            **_kept(group.layout),
            "window": group.window,
            "bytes_per_token": 4 * group.layout.words_per_token * len(group.layers),
            "tokens_per_page": group.layout.tokens_per_page,
        }
        for group in layout.kv_groups
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
        "kv_bytes_per_token": cache | {"engine": layout.kv_token_bytes},
    }


def _kept(layout: KvLayout | LatentLayout) -> dict[str, Any]:
    """What a layer keeps of a token."""
    if isinstance(layout, KvLayout):
        return {"keeps": "heads", "kv_heads": layout.kv_heads, "head_dim": layout.head_dim}
    parts = dict(zip(("k_rank", "v_rank", "shared_dim"), layout.parts, strict=True))
    return {"keeps": "latents", **parts}


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
        if group["keeps"] == "heads":
            kept = f"{group['kv_heads']} x {group['head_dim']}"
        else:
            ranks = (group[part] for part in ("k_rank", "v_rank", "shared_dim"))
            kept = "latents " + " + ".join(f"{rank}" for rank in ranks if rank)
        rows[f"KV of a token, {group['layers']} layers of {kept}{window}"] = (
            f"{group['bytes_per_token'] / 1024:g} KiB, {group['tokens_per_page']} tokens a page"
        )
    cache = sizes["kv_bytes_per_token"]
    rows["KV of a token, bfloat16, as the engine keeps it"] = f"{cache['engine'] / 1024:g} KiB"
    if cache["latent"] is not None:
        rows["the same as keys and values"] = f"{cache['full'] / 1024:g} KiB"
        rows["the same as latents, where there are any"] = f"{cache['latent'] / 1024:g} KiB"
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
