"""Real models against transformers, on real text, where their checkpoints are."""

import hashlib
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, Forward

from checkpoints.huggingface import load_dense_model

CACHE = pathlib.Path(__file__).parents[2] / ".cache"
MODELS = {
    "demo_moe": "make test builds it",
    "gemma3_270m": "scripts/gguf_to_huggingface.py makes it",
}
ALL = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not (CACHE / name / "config.json").exists(), reason=f"no .cache/{name}; {how}"
        ),
    )
    for name, how in MODELS.items()
]


@pytest.mark.parametrize("name", ALL)
def test_largest_logits_match(name):
    with np.load(GOLDEN / name / "reference.npz") as arrays:
        reference = dict(arrays)
    _, model = load_dense_model(CACHE / name, jnp.float32)
    tokens, lengths = reference["tokens"], reference["lengths"]
    mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    logits = Forward(model)(tokens, mask)[0][mask]
    top_ids = reference["top_ids"].astype(np.int64)
    ours = np.take_along_axis(logits, top_ids, axis=-1)
    hint = what_failed(name, str(reference["weights_sha256"]))
    assert np.abs(reference["top_logits"]).max() > 10
    np.testing.assert_allclose(ours, reference["top_logits"], rtol=0, atol=1e-3, err_msg=hint)
    np.testing.assert_array_equal(logits.argmax(-1), top_ids[:, 0], err_msg=hint)


def what_failed(name: str, weights_sha256: str) -> str:
    """What a failure may mean: other weights are a changed model, not a wrong forward."""
    found = hashlib.sha256()
    for file in sorted((CACHE / name).glob("*.safetensors")):
        found.update(file.read_bytes())
    if found.hexdigest() == weights_sha256:
        return "the weights are those of the reference"
    return f"the model has changed; run scripts/make_golden.py real --model .cache/{name}"
