"""The paged engine against transformers.generate, and paged experts against dense ones."""

import dataclasses

import pytest
from engine_doubles import TINY_MOE, MemoryExperts
from golden import TINY, Golden, read

from pallas_kernels.bitplanes import WORD_BITS
from pw_jax.engine.config import EngineConfig
from pw_jax.engine.engine import Engine
from pw_jax.errors import UserError

CONFIG = EngineConfig(
    slots=3,
    max_sequence_tokens=128,
    page_bytes=2048,  # a few tokens: texts cross many pages
    kv_dtype="float32",
)
ONE_CHUNK, SMALL_CHUNKS = 32, 5


def prompts(golden: Golden) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(golden.tokens, golden.lengths, strict=True)]


@pytest.mark.parametrize(
    "prefill_chunk", [SMALL_CHUNKS, pytest.param(ONE_CHUNK, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        # quick: one reference a family, in chunks
        name if name.endswith("/reference") else pytest.param(name, marks=pytest.mark.slow)
        for name in TINY
    ],
)
def test_tokens_equal_those_of_transformers(name, prefill_chunk):
    golden = read(name)
    assert golden.lengths.max() <= ONE_CHUNK
    engine = Engine(golden.model(), dataclasses.replace(CONFIG, prefill_chunk=prefill_chunk))
    generations = engine.generate(prompts(golden), golden.generated.shape[1], stop_token_ids=())
    assert [list(g.tokens) for g in generations] == golden.generated.tolist()
    engine.check_pages()


def pageable(name: str) -> bool:
    """Whether the experts' rows fill whole words; one reference a folder is enough."""
    shape = read(name).config.expert_shape
    if shape is None or not name.endswith("/reference"):
        return False
    return shape.embed % WORD_BITS == 0 and shape.ffn % WORD_BITS == 0


PAGEABLE = [name for name in TINY if pageable(name)]


@pytest.mark.parametrize(
    "name",
    [
        # latent attention from pages has tests of its own; compiling it with experts takes long
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("deepseek") else name
        for name in PAGEABLE
    ],
)
def test_moe_families_run_from_pages(name):
    golden = read(name)
    experts = MemoryExperts(golden.model())
    wanted = Engine(experts.dequantized(8), CONFIG).generate(prompts(golden), 24, stop_token_ids=())
    engine = Engine(experts.paged(), CONFIG, experts)
    assert engine.precision is not None
    assert engine.precision.mean_bits == 8
    paged = engine.generate(prompts(golden), 24, stop_token_ids=())
    assert [g.tokens for g in paged] == [g.tokens for g in wanted]
    engine.check_pages()


def test_no_moe_family_is_left_out():
    configs = [read(name).config for name in TINY]
    paged = {read(name).config.model_type for name in PAGEABLE}
    in_test_engine = {TINY_MOE["model_type"]}
    assert {c.model_type for c in configs if c.expert_shape} == paged | in_test_engine


def test_any_of_several_end_tokens_ends_a_text():
    golden = read("llama/reference")
    first, second = int(golden.generated[0, 9]), int(golden.generated[1, 4])
    assert first != second
    model = golden.model()
    model.config = dataclasses.replace(golden.config, eos_token_ids=(first, second))
    generations = Engine(model, CONFIG).generate(prompts(golden), 64)
    for generation, whole in zip(generations, golden.generated.tolist(), strict=True):
        ends = [place for place, token in enumerate(whole) if token in (first, second)]
        assert list(generation.tokens) == whole[: ends[0] + 1 if ends else None]
        assert generation.stopped == bool(ends)
    assert sum(generation.stopped for generation in generations) >= 2


def test_learned_positions_end_where_their_table_does():
    golden = read("opt/reference")
    with pytest.raises(UserError, match=r"positions for 512 tokens .* 513: lower it"):
        Engine(golden.model(), dataclasses.replace(CONFIG, max_sequence_tokens=513))
