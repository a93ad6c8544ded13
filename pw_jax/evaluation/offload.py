"""Lossless offload, the baseline that keeps whole experts and fetches what is missing.

Each layer keeps the experts it used last on the device; a miss is copied from the host. Caches are
per layer: layers run in turn, so that one LRU order over all of them would drop the experts of a
layer just before it runs again.
"""

import numpy as np
from jaxtyping import Bool, Int


def decode_steps(chosen: Bool[np.ndarray, "S T L E"], batch: int) -> Bool[np.ndarray, "G T L E"]:
    """Experts that steps of several sequences use together.

    Args:
        chosen: Experts of each token.
        batch: Sequences that decode at once; those that fill no batch are left out.

    Raises:
        ValueError: Fewer sequences than a batch.
    """
    groups = len(chosen) // batch
    if not groups:
        raise ValueError(f"{len(chosen)} sequences make no batch of {batch}")
    return chosen[: groups * batch].reshape(groups, batch, *chosen.shape[1:]).any(axis=1)


def lru_misses(chosen: Bool[np.ndarray, "T L E"], kept: int) -> Int[np.ndarray, " T"]:
    """Experts that each step has to fetch, over all layers, from an empty cache on.

    Args:
        chosen: Experts that each step uses.
        kept: Experts that a layer keeps: the last used ones. Where a step uses more, the rest is
            fetched for this step only.
    """
    _, layers, experts = chosen.shape
    last = np.full((layers, experts), -1)
    misses = np.zeros(len(chosen), np.int64)
    for step, used in enumerate(chosen):
        newest = np.argsort(-last, axis=1, kind="stable")[:, :kept]
        resident = np.zeros_like(used)
        np.put_along_axis(resident, newest, True, axis=1)
        misses[step] = (used & ~(resident & (last >= 0))).sum()
        last[used] = step
    return misses
