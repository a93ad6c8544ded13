"""Small arguments in one vector: nothing is lost, and steps do not see one another's."""

import jax
import numpy as np
import pytest

from pw_jax.packing import Packing


def blank() -> dict[str, np.ndarray]:
    return {
        "counts": np.full((2, 3), 7, np.int32),
        "scales": np.ones(4, np.float32),
        "seed": np.array(2**32 - 1, np.uint32),
    }


def test_what_is_filled_in_arrives_with_its_shape_and_type():
    packing = Packing(blank())
    vector, views = packing.fill()
    views["counts"][1, 2] = -5
    views["scales"][:] = [0.5, -np.inf, 1e-30, 3]
    views["seed"][...] = 2**31 + 9
    unpacked = jax.jit(packing.unpack)(vector)
    for name, expected in views.items():
        assert unpacked[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(unpacked[name]), expected)


def test_defaults_last_and_fillings_do_not():
    packing = Packing(blank())
    packing.defaults["scales"][2] = 9
    _, first = packing.fill()
    first["counts"][:] = 0
    _, second = packing.fill()
    assert first["scales"][2] == second["scales"][2] == 9
    np.testing.assert_array_equal(second["counts"], blank()["counts"])


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="float64"):
        Packing({"x": np.zeros(3, np.float64)})
