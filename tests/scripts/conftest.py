"""Scripts called as a user calls them, and a tiny checkpoint for them."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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


@pytest.fixture
def load(monkeypatch):
    """Imports a script by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def command(load, capsys):
    """Runs a script in this process; gives its exit code, stdout and stderr."""

    def call(script, *arguments):
        main = load(script).main
        code = load("_command").run(main, [str(argument) for argument in arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return call
