"""Fixtures of the checkpoint tests."""

from pathlib import Path

import pytest
from tiny_moe import CONFIG, Weights, make_weights, split_experts, write


@pytest.fixture(scope="session")
def weights() -> Weights:
    """Fused float32 weights by our names."""
    return make_weights(CONFIG)


@pytest.fixture
def tiny(tmp_path: Path, weights: Weights) -> Path:
    """A folder as the hub would have it: expert by expert, in two shards."""
    return write(tmp_path / "tiny", split_experts(weights), shards=2)
