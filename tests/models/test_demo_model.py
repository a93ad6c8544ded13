"""The real demo model against transformers, on real text."""

import hashlib
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, Forward

from checkpoints.huggingface import load_dense_model

CHECKPOINT = pathlib.Path(__file__).parents[2] / ".cache" / "demo_moe"
REFERENCE = GOLDEN / "demo_moe" / "reference.npz"

pytestmark = [
    pytest.mark.skipif(
        not (CHECKPOINT / "config.json").exists(),
        reason="no demo model at .cache/demo_moe; make test builds it",
    ),
    pytest.mark.skipif(
        not REFERENCE.exists(),
        reason="no tests/golden/demo_moe; scripts/make_golden.py demo makes it",
    ),
]


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(REFERENCE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def logits(reference) -> np.ndarray:
    _, model = load_dense_model(CHECKPOINT, jnp.float32)
    tokens, lengths = reference["tokens"], reference["lengths"]
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    return Forward(model)(tokens, mask)[0][mask]


@pytest.fixture(scope="module")
def hint(reference) -> str:
    """What a failure may mean: other weights are a changed demo model, not a wrong forward."""
    found = hashlib.sha256()
    for file in sorted(CHECKPOINT.glob("*.safetensors")):
        found.update(file.read_bytes())
    if found.hexdigest() == str(reference["weights_sha256"]):
        return "the weights are those of the reference"
    return "the demo model has changed; run scripts/make_golden.py demo --model .cache/demo_moe"


def test_largest_logits_match(reference, logits, hint):
    ours = np.take_along_axis(logits, reference["top_ids"].astype(np.int64), axis=-1)
    assert np.abs(reference["top_logits"]).max() > 10
    np.testing.assert_allclose(ours, reference["top_logits"], rtol=0, atol=1e-3, err_msg=hint)


def test_best_tokens_match(reference, logits, hint):
    np.testing.assert_array_equal(logits.argmax(-1), reference["top_ids"][:, 0], err_msg=hint)
