"""Weights saved on one mesh load on another: the checkpoint holds no padding and no mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from layers import blocks, make_layer, program
from orbax.checkpoint import v1 as ocp

from sharding.mesh import place, restore_sharding, tensor_mesh

HIDDEN = 46


def named(weights):
    """A dictionary, as checkpoints hold them."""
    return {
        f"{group}.{name}.{part}": array
        for group, block in weights.items()
        for name, linear in block._asdict().items()
        if linear is not None
        for part, array in linear._asdict().items()
        if array is not None
    }


def test_saved_on_eight_loads_on_any(tmp_path):
    layer = make_layer(1, HIDDEN, (12, 3, 6, 6), 53, (37, 13, 19, 41, 45, 33, 29), bias=True)
    flat = named({"attention": layer.attention, "mlp": layer.mlp})
    eight = tensor_mesh(8)
    on_eight = {
        name: jax.device_put(array, restore_sharding(eight, array.shape))
        for name, array in flat.items()
    }
    assert on_eight["attention.q.u"].sharding == NamedSharding(eight, PartitionSpec(None, "tp"))
    ocp.save(tmp_path / "weights", on_eight)
    x = np.random.default_rng(0).standard_normal((4, HIDDEN)).astype(np.float32)
    run, params = program("gathered", 1, HIDDEN, [layer])
    expected = np.asarray(jax.jit(run)(params, x)[0])
    for devices, layout in ((1, "gathered"), (3, "gathered"), (4, "sharded"), (5, "naive")):
        mesh = tensor_mesh(devices)
        template = {
            name: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=restore_sharding(mesh, array.shape)
            )
            for name, array in flat.items()
        }
        loaded = ocp.load(tmp_path / "weights", template)
        for name, array in loaded.items():
            np.testing.assert_array_equal(np.asarray(array), flat[name])
            assert array.sharding.mesh == mesh
        again = rebuilt(layer, loaded)
        run, _ = program(layout, devices, HIDDEN, [layer])
        attention, mlp = blocks(layout, devices, HIDDEN, layer)
        params = [
            (place(mesh, attention.prepare, again.attention), place(mesh, mlp.prepare, again.mlp))
        ]
        found = np.asarray(jax.jit(run)(params, x)[0])[:, :HIDDEN]
        np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())


def rebuilt(layer, flat):
    """The layer with the arrays of a dictionary."""

    def block(group, old):
        return type(old)(
            **{
                name: None
                if linear is None
                else type(linear)(
                    **{
                        part: None if array is None else flat[f"{group}.{name}.{part}"]
                        for part, array in linear._asdict().items()
                    }
                )
                for name, linear in old._asdict().items()
            }
        )

    return type(layer)(
        block("attention", layer.attention),
        block("mlp", layer.mlp),
        layer.heads,
        layer.activation,
        layer.rope,
    )


@pytest.mark.parametrize("devices", [3, 8])
def test_no_device_holds_more_than_its_share(devices):
    """Nothing of a `sharded` layer is replicated but for vectors of the width of a rank."""
    layer = make_layer(1, HIDDEN, (12, 3, 6, 6), 53, (37, 13, 19, 41, 45, 33, 29))
    _, params = program("sharded", devices, HIDDEN, [layer])
    for array in jax.tree.leaves(params):
        assert array.addressable_shards[0].data.size * devices == array.size
