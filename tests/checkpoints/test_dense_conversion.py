"""A dense family through conversion: nothing to quantise, and the same tokens at the end."""

import json
import shutil
from pathlib import Path

import numpy as np

from checkpoints.convert import convert
from checkpoints.engine import load_engine
from checkpoints.manifest import ConvertOptions
from pw_jax.engine.config import EngineConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "opt"


def test_opt_generates_alike_after_conversion(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN, source)
    with np.load(GOLDEN / "reference.npz") as arrays:
        tokens, length = arrays["tokens"][1], int(arrays["lengths"][1])
        wanted = arrays["generated"][1].tolist()
    ends = [int(wanted[20]), int(wanted[10])]
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    converted = convert(source, tmp_path / "out", ConvertOptions(dtype="float32"))
    assert not (converted / "experts").exists()
    config = EngineConfig(slots=1, max_sequence_tokens=128, kv_dtype="float32", page_bytes=2048)
    engine = load_engine(converted, config, "float32", with_tokenizer=False)
    (generation,) = engine.generate([tokens[:length].tolist()], 64)
    stop = min(wanted.index(end) for end in ends)
    assert list(generation.tokens) == wanted[: stop + 1]
    assert generation.stopped
