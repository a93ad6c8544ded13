"""Times candidate sizes of the attention kernels on a GPU: ``python -m`` this module.

Prints a line a candidate, the quickest first for each shape; the best go to ``configs.py`` by hand.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import jax

from pallas_kernels.paged_attention.benchmark import (
    CHUNK,
    COMPILERS,
    SHAPES,
    Case,
    Programs,
    Shape,
    random_pool,
)
from pallas_kernels.paged_attention.configs import DecodeConfig, PrefillConfig
from pallas_kernels.paged_attention.decode import paged_decode
from pallas_kernels.paged_attention.prefill import paged_prefill
from pallas_kernels.paged_attention.tiles import Scores


def decode_candidates(shape: Shape) -> list[DecodeConfig]:
    """Sizes worth timing."""
    tiles = {32: (64, 128), 64: (32, 64), 128: (16, 32), 256: (16,)}
    sizes = product(tiles[shape.layout.words_per_head], (2, 4), (3, 4), (128, 256, 512))
    return [DecodeConfig(*size[:3], split_tokens=size[3]) for size in sizes]


def prefill_candidates(shape: Shape) -> list[PrefillConfig]:
    """Sizes worth timing: rows, tile, warps, stages."""
    sizes = {
        32: ((64, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)),
        64: ((64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
        128: ((64, 32, 8, 3), (64, 32, 4, 3), (128, 32, 8, 3), (128, 64, 8, 2)),
        256: ((32, 32, 8, 3), (64, 32, 8, 1), (64, 32, 8, 2), (64, 16, 8, 2), (64, 16, 8, 3)),
    }
    return [PrefillConfig(*size) for size in sizes[shape.layout.words_per_head]]


def kernel(shape: Shape, config: DecodeConfig | PrefillConfig, q, pool, pages, positions):
    """A kernel with given sizes."""
    options = {
        "layout": shape.layout,
        "scores": Scores(shape.options["scale"], None),
        "window": shape.window,
    }
    if isinstance(config, PrefillConfig):
        return paged_prefill(q, pool, pages, positions, config=config, **options)
    return paged_decode(q[:, 0], pool, pages, positions[:, 0], config=config, **options)


def tune(case: Case, candidates: Sequence, pool: jax.Array) -> None:
    """Times the candidates of a case and prints them."""
    programs = Programs(case, pool)

    def build(config):
        try:
            return programs.compile(partial(kernel, SHAPES[case.model], config))
        except jax.errors.JaxRuntimeError as error:  # too much shared memory
            return str(error).splitlines()[0]

    with ThreadPoolExecutor(COMPILERS) as threads:
        built = list(threads.map(build, candidates))
    rows = []
    for config, program in zip(candidates, built, strict=True):
        if isinstance(program, str):
            print(case.model, config, program)
        else:
            rows.append((programs.time(program), config))
    for time, config in sorted(rows, key=lambda row: row[0].median):
        rate = case.bytes_and_operations()[0] / time.median / 1e6
        line = f"{time.median:8.1f} us +-{time.spread:5.1f} {rate:6.2f} TB/s"
        print(case.model, case.sequences, case.chunk, line, config, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    models = parser.parse_args().models
    pool = random_pool(jax.random.key(0))
    for name in models:
        decode, prefill = decode_candidates(SHAPES[name]), prefill_candidates(SHAPES[name])
        for sequences, chunk, candidates in ((16, 1, decode), (1, 1, decode), (1, CHUNK, prefill)):
            tune(Case(name, sequences, 8192, chunk, compared=False), candidates, pool)


if __name__ == "__main__":
    main()
