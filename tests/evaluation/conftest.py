"""A tiny model, and a tokenizer of single bytes."""

import pytest
from byte_language import CONFIG, ByteTokenizer

from pw_jax.evaluation.forward import Forward
from pw_jax.models import registry


@pytest.fixture
def tokenizer():
    return ByteTokenizer()


@pytest.fixture(scope="session")
def model():
    return registry.random_model(registry.read_config(CONFIG))


@pytest.fixture(scope="session")
def forward(model):
    return Forward(model)
