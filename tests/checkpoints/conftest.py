"""Fixtures of the checkpoint tests."""

from pathlib import Path

import pytest
from tiny_moe import CONFIG, Weights, make_weights, split_experts, write

from checkpoints.convert import convert
from checkpoints.store import Store, open_store


@pytest.fixture(scope="session")
def weights() -> Weights:
    """Fused float32 weights by our names."""
    return make_weights(CONFIG)


@pytest.fixture
def tiny(tmp_path: Path, weights: Weights) -> Path:
    """A folder as the hub would have it: expert by expert, in two shards."""
    return write(tmp_path / "tiny", split_experts(weights), shards=2)


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Store:
    """A conversion without calibration; its experts are large, so that their widths matter."""
    folder = tmp_path_factory.mktemp("converted")
    weights = {k: 4 * w if ".experts." in k else w for k, w in make_weights(CONFIG).items()}
    source = write(folder / "source", split_experts(weights))
    return open_store(convert(source, folder / "converted"))
