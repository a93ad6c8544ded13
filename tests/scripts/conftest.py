"""Scripts called as a user calls them, and a tiny checkpoint for them."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints.calibrate import CalibrateOptions, recalibrate
from checkpoints.convert import convert
from pw_jax.models import registry

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A tiny checkpoint with a tokenizer of single bytes."""
    directory = tmp_path_factory.mktemp("source")
    model = registry.build_model(registry.read_config(CONFIG))
    generator = np.random.default_rng(0)
    weights = {
        name: np.ones(leaf.shape, np.float32)
        if "norm" in name
        else (generator.standard_normal(leaf.shape) / 4).astype(np.float32)
        for name, leaf in registry.parameter_shapes(model).items()
    }
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="session")
def converted(source, tmp_path_factory) -> Path:
    return convert(source, tmp_path_factory.mktemp("converted") / "out")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    texts = [f"line {number} of a text about {number**2} things, " * 9 for number in range(9)]
    lines = [json.dumps({"text": one}) for one in texts]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def calibrated(converted, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "out"
    options = CalibrateOptions(tokens=256, prompts=12, prompt_tokens=16)
    return recalibrate(converted, [text], out, options).path


@pytest.fixture(scope="session")
def load():
    """Imports a script by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module


@pytest.fixture
def command(load, capsys):
    """Runs a script in this process; gives its exit code, stdout and stderr."""

    def call(script, *arguments):
        main = load(script).main
        code = load("_command").run(main, [str(argument) for argument in arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return call
