"""Every layout computes what the unsharded layers compute."""

import jax
import numpy as np
import pytest
from layers import Layer, make_latent_layer, make_layer, oracle, program

HIDDEN = 46  # divides by 2 only
TOKENS = 5
DEVICES = (1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5)), 3, 8)
LAYOUTS = ("dense", "naive", "gathered", "sharded")


def grouped() -> list[Layer]:
    """12 heads with 3 kv heads, ranks odd and other ones in each layer, some below 8."""
    return [
        make_layer(1, HIDDEN, (12, 3, 6, 6), 53, (37, 13, 19, 41, 45, 33, 29)),
        make_layer(2, HIDDEN, (12, 3, 6, 4), 53, (11, 5, 3, 1, 7, 9, 2)),
    ]


def with_biases() -> list[Layer]:
    """OPT's kind: LayerNorm, no rotation, biases everywhere, an MLP without a gate."""
    options = {"gated": False, "bias": True, "centred": True}
    return [
        make_layer(
            3, HIDDEN, (7, 7, 6, 6), 51, (9, 4, 5, 7, 0, 13, 11), activation="relu", **options
        ),
        # cos(0) is not 0: what padding computes must not reach the result.
        make_layer(
            4, HIDDEN, (4, 2, 6, 6), 51, (9, 4, 5, 7, 0, 13, 11), activation="shifted", **options
        ),
    ]


def latent() -> list[Layer]:
    """MLA: with a norm and biases of latents, and without; a way out that is not factored last."""
    return [
        make_latent_layer(5, HIDDEN, 6, (6, 4, 5), 53, (17, 11, 13, 9, 7, 5), bias=True),
        make_latent_layer(6, HIDDEN, 5, (6, 4, 6), 53, (9, 7, 8, 9, 7, 5), q_norm=False),
    ]


def check(layout: str, devices: int, layers: list[Layer], precision: float = 3e-5) -> None:
    x = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    run, params = program(layout, devices, HIDDEN, layers)
    found = jax.jit(run)(params, x)
    for index, (one, expected) in enumerate(zip(found, oracle(layers, x), strict=True)):
        got = np.asarray(one)
        assert got.shape[-1] == HIDDEN or layout == "sharded"
        scale = np.abs(expected).max()
        error = np.abs(got[:, :HIDDEN] - expected).max() / scale
        assert error < precision, f"layer {index}: {error}"
        assert not got[:, HIDDEN:].any()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [grouped, with_biases, latent])
def test_equals_the_oracle(layers, layout, devices):
    check(layout, devices, layers())


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_gathered_takes_whole_weights_beside_factors(devices):
    first = make_layer(7, HIDDEN, (6, 3, 6, 6), 51, (None, 5, None, None, 7, None, 9), bias=True)
    second = make_layer(8, HIDDEN, (6, 3, 6, 6), 51, (None, None, None, 7, None, None, None))
    check("gathered", devices, [first, second])


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_sharded_takes_a_whole_last_weight(devices):
    layer = make_layer(9, HIDDEN, (6, 3, 6, 6), 51, (3, 5, 7, None, 7, 3, None), bias=True)
    check("sharded", devices, [layer])


def test_layouts_refuse_what_they_cannot_hold():
    layer = make_layer(9, HIDDEN, (6, 3, 6, 6), 51, (3, None, 7, 4, 7, 3, 5))
    for layout in ("naive", "sharded"):
        with pytest.raises(ValueError, match=rf"the {layout} layout needs factors, but k is"):
            program(layout, 2, HIDDEN, [layer])
    with pytest.raises(ValueError, match="layout 'ring' is not one of dense, naive, gathered"):
        program("ring", 2, HIDDEN, [layer])
    with pytest.raises(ValueError, match="over 99 devices, but there are"):
        program("gathered", 99, HIDDEN, [layer])
