"""What compiled layers communicate is what the formulas say, and only in the rank space."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from layers import attend, blocks, make_latent_layer, make_layer, program

from sharding import formulas
from sharding.collectives import read_collectives, total_wire_elements, widths
from sharding.formulas import Transfer
from sharding.mesh import AXIS, abstract, tensor_mesh

HIDDEN, FFN, TOKENS = 94, 106, 7
HEADS = (12, 3, 22, 22)  # 264 and 66 columns
RANKS = (37, 13, 19, 41, 45, 33, 29)
LATENT_RANKS = (17, 11, 13, 9, 7, 5)
WIDE = {HIDDEN, FFN, 96, 112, 264, 66, 22, 12 * 12, 12 * 14}


def measure(layout: str, devices: int, layer):
    run, params = program(layout, devices, HIDDEN, [layer], placing=abstract)
    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.float32)
    return read_collectives(jax.jit(run).lower(params, x))


def layer_of(kind: str):
    if kind == "latent":
        return make_latent_layer(0, HIDDEN, 12, (8, 4, 6), FFN, LATENT_RANKS)
    plain = kind == "plain"
    return make_layer(0, HIDDEN, HEADS, FFN, RANKS, gated=not plain, bias=plain, centred=plain)


def shapes_of(kind: str):
    if kind == "latent":
        attention = formulas.latent_attention_shape(HIDDEN, 12, (8, 4, 6), (17, 11, 13))
        return attention, formulas.mlp_shape(HIDDEN, FFN, True, LATENT_RANKS[3:])
    attention = formulas.attention_shape(HIDDEN, 12, 3, 22, RANKS[:4])
    ranks = RANKS[5:] if kind == "plain" else RANKS[4:]
    return attention, formulas.mlp_shape(HIDDEN, FFN, kind != "plain", ranks)


@pytest.mark.parametrize(
    "devices", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("layout", ["dense", "naive", "gathered", "sharded"])
@pytest.mark.parametrize("kind", ["grouped", "plain", "latent"])
def test_compiled_elements_equal_the_formulas(kind, layout, devices):
    found = measure(layout, devices, layer_of(kind))
    expected = [t for shape in shapes_of(kind) for t in formulas.transfers(layout, shape, devices)]
    expected += 2 * formulas.norm_transfers(layout, centred=kind == "plain")
    measured = Counter((one.kind, shape[-1]) for one in found for shape in one.shapes)
    assert measured == Counter((t.kind, t.width) for t in expected)
    assert all(one.group == devices and one.runs == 1 for one in found)
    total = sum(t.wire(devices) for t in expected)
    assert total_wire_elements(found) == pytest.approx(TOKENS * total, rel=1e-12)
    if layout in ("gathered", "sharded"):
        assert not widths(found) & WIDE
        assert max(widths(found)) <= formulas.round_up(37 + 13 + 19 + 45, devices)
    else:
        assert widths(found) & WIDE


def test_formulas_are_those_of_the_paper():
    """At N dividing all ranks, and by hand."""
    n, f = 4, 3 / 4
    attention = formulas.attention_shape(64, 8, 4, 8, (12, 8, 4, 20))
    gated = formulas.mlp_shape(64, 96, True, (16, 24, 28))
    plain = formulas.mlp_shape(64, 96, False, (16, 28))
    rows = {
        ("dense", attention): 2 * f * 64,
        ("dense", gated): 2 * f * 64,
        ("naive", attention): 2 * f * (64 + 2 * 32 + 64),
        ("naive", gated): 2 * f * (2 * 96 + 64),
        ("naive", plain): 2 * f * (96 + 64),
        ("gathered", attention): f * (12 + 8 + 4) + 2 * f * 20,
        ("gathered", gated): f * (16 + 24) + 2 * f * 28,
        ("gathered", plain): f * 16 + 2 * f * 28,
        ("sharded", attention): 2 * f * (12 + 8 + 4) + 2 * f * 20,
        ("sharded", gated): 2 * f * (16 + 24) + 2 * f * 28,
    }
    for (layout, shape), elements in rows.items():
        assert formulas.wire_elements(layout, shape, n) == elements
    assert formulas.wire_elements("gathered", attention, 1) == 0
    uneven = formulas.attention_shape(64, 8, 4, 8, (13, 8, 4, 20))
    assert formulas.transfers("gathered", uneven, 4)[0] == Transfer("all-gather", 28)
    assert formulas.transfers("gathered", uneven, 4, padded=False)[0].width == 25
    assert formulas.rank_for_ratio(8192, 28672, 0.8) == 5097


def test_weights_and_cache_of_a_device():
    """GB of all decoder layers of LLaMA-3-70B in bfloat16 at TP 8, as published for the layouts."""
    for layout, ratio, gigabytes in (
        ("dense", 0.8, 17.1),
        ("sharded", 0.8, 13.7),
        ("gathered", 0.8, 23.3),
        ("gathered", 0.6, 17.5),
        ("gathered", 0.4, 11.6),
    ):
        attention, mlp = llama_70b(ratio)
        elements = sum(formulas.weight_elements(layout, shape, 8) for shape in (attention, mlp))
        assert 80 * 2 * elements / 1e9 == pytest.approx(gigabytes, abs=0.06)
    assert formulas.kv_elements("gathered", 64, 8, 128, 8) == 256
    assert formulas.kv_elements("naive", 64, 8, 128, 8) == 2048


def llama_70b(ratio: float):
    def ranks(*sizes: tuple[int, int]) -> list[int]:
        return [formulas.rank_for_ratio(*size, ratio) for size in sizes]

    d, ffn = 8192, 28672
    attention = formulas.attention_shape(d, 64, 8, 128, ranks((d, d), (d, 1024), (d, 1024), (d, d)))
    return attention, formulas.mlp_shape(d, ffn, True, ranks((d, ffn), (d, ffn), (ffn, d)))


@pytest.mark.parametrize(
    ("ratio", "kilobytes"),
    [
        (0.8, (56.0, 287, 54.1, 79.6)),
        (0.6, (56.0, 287, 40.6, 59.7)),
        (0.4, (56.0, 287, 27.1, 39.8)),
    ],
)
def test_bytes_of_llama_70b_are_the_published_ones(ratio, kilobytes):
    for layout, expected in zip(("dense", "naive", "gathered", "sharded"), kilobytes, strict=True):
        total = sum(formulas.wire_elements(layout, s, 8, padded=False) for s in llama_70b(ratio))
        assert 2 * total / 1024 == pytest.approx(expected, rel=2e-3)


def attention_flops(layout: str, devices: int) -> float:
    """FLOPs of one device between the projections."""
    layer = make_layer(0, HIDDEN, (16, 8, 16, 16), FFN, RANKS)
    block, _ = blocks(layout, devices, HIDDEN, layer)
    specs = block.between(2)
    heads = block.plan.local_heads * (devices if block.layout.splits_features else 1)
    kv = block.plan.groups * (devices if block.layout.splits_features else 1)
    arguments = [jax.ShapeDtypeStruct((64, n, 16), jnp.float32) for n in (heads, kv, kv)]
    mapped = jax.shard_map(
        attend, mesh=tensor_mesh(devices), in_specs=specs, out_specs=specs[0], check_vma=False
    )
    cost: Any = jax.jit(mapped).lower(*arguments).compile().cost_analysis()
    return cost["flops"]


def test_attention_is_not_duplicated():
    alone = attention_flops("gathered", 1)
    for layout in ("dense", "gathered", "sharded"):
        for devices in (2, 4, 8):
            assert attention_flops(layout, devices) == pytest.approx(alone / devices, rel=0.01)
    assert attention_flops("naive", 8) == alone


def test_trip_counts_multiply_and_bfloat16_is_seen_through():
    def loop(x):
        def once(c, _):
            return lax.pcast(lax.psum(c, AXIS), AXIS, to="varying"), None

        x, _ = lax.scan(once, x, None, 5)
        return lax.all_gather(x, AXIS, axis=0, tiled=True, to="invarying")

    mesh = tensor_mesh(4)
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    lowered = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 3), jnp.bfloat16))
    by_kind = {one.kind: one for one in read_collectives(lowered)}
    assert by_kind["all-reduce"].runs == 5
    assert by_kind["all-reduce"].wire_elements == 5 * 2 * 3 / 4 * (2 * 3)
    assert by_kind["all-gather"].runs == 1
    for one in by_kind.values():
        assert one.dtypes == ("bf16",)
        assert one.wire_bytes == 2 * one.wire_elements
    narrow = read_collectives(lowered.compile())
    assert total_wire_elements(narrow) == total_wire_elements(by_kind.values())


def test_a_loop_without_a_trip_count_is_said_to_be_one():
    def loop(x):
        def body(carry):
            return lax.pcast(lax.psum(carry, AXIS), AXIS, to="varying")

        return lax.while_loop(lambda c: jnp.max(c) < 100, body, x)

    mapped = jax.shard_map(loop, mesh=tensor_mesh(2), in_specs=P(AXIS), out_specs=P(AXIS))
    (one,) = read_collectives(jax.jit(mapped).lower(np.ones((2, 3), np.float32)))
    assert (one.runs, one.runs_known) == (1, False)


GPU_TEXT = """HloModule step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(%a, %b)
}

%wrapped (p: bf16[16,64]) -> bf16[16,8] {
  ROOT %rs = bf16[16,8]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}

%body (t: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %ag = (bf16[16,8]{1,0}, bf16[16,64]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8]
  %agd = bf16[16,64]{1,0} all-gather-done(%ag)
  %two = ((bf16[2,1]{1,0}, s8[3]{0}), (bf16[2,4]{1,0}, s8[12]{0})) all-gather-start(%x, %y)
  %ar = (bf16[16,5]{1,0}, /*index=1*/f32[3]{0}) all-reduce-start(%p, %q), replica_groups=[8]<=[8]
  %rss = ((bf16[16,64]), bf16[16,8]) async-start(%p), calls=%wrapped
  %rsd = bf16[16,8] async-done(%rss), calls=%wrapped
}

%condition (t: (s32[], bf16[16,64])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: bf16[16,64]) -> bf16[16,64] {
  %w = (s32[], bf16[16,64]) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %cp = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%p0), source_target_pairs={{0,1}}
  ROOT %out = bf16[16,64]{1,0} get-tuple-element(%w), index=1
}
"""


def test_text_as_gpus_compile_it():
    gather, combined, reduce, permute, scatter = sorted(
        read_collectives(GPU_TEXT),
        key=lambda one: ["all-gather", "all-reduce", "collective-permute", "reduce-scatter"].index(
            one.kind
        ),
    )[:5]
    assert (gather.shapes, gather.group, gather.runs) == (((16, 64),), 4, 6)
    assert combined.shapes == ((2, 4), (12,))
    assert (combined.dtypes, combined.group) == (("bf16", "s8"), 8)
    assert (reduce.shapes, reduce.result_bytes) == (((16, 5), (3,)), 2 * 80 + 4 * 3)
    assert (scatter.shapes, scatter.runs, scatter.group) == (((16, 8),), 6, 8)
    assert scatter.wire_elements == 6 * 7 * 16 * 8
    assert (permute.shapes, permute.runs) == (((4,),), 1)
