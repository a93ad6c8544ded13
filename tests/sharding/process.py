"""One of several processes with two CPU devices each; run by test_processes.py.

python process.py PORT PROCESSES INDEX LAYOUT
"""

import sys

import jax


def main(port: str, processes: str, index: str, layout: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
    import numpy as np
    from jax.experimental import multihost_utils
    from layers import make_layer, oracle, program

    hidden = 46
    layer = make_layer(1, hidden, (12, 3, 6, 6), 53, (37, 13, 19, 41, 45, 33, 29))
    x = np.random.default_rng(0).standard_normal((4, hidden)).astype(np.float32)
    assert len(jax.devices()) == 4
    assert len(jax.local_devices()) == 2
    run, params = program(layout, 4, hidden, [layer])
    # Each device has its share, whichever process it belongs to.
    assert {len(leaf.addressable_shards) for leaf in jax.tree.leaves(params)} == {2}
    (out,) = jax.jit(run)(params, x)
    found = multihost_utils.process_allgather(out, tiled=True)[:, :hidden]
    (expected,) = oracle([layer], x)
    print("error", np.abs(found - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    main(*sys.argv[1:])
