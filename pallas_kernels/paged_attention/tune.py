"""Times candidate sizes of the attention kernels on a GPU: ``python -m`` this module.

Prints a line a candidate, the quickest first for each shape; the best go to ``configs.py`` by hand.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import jax

from pallas_kernels.paged_attention.benchmark import (
    CHUNK,
    COMPILERS,
    ROUNDS,
    SHAPES,
    Shape,
    compile_rounds,
    copy_bandwidth,
    measure,
    operands,
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


def decode_once(shape: Shape, config: DecodeConfig, q, pool, pages, positions):
    """The decode kernel with given sizes."""
    scores = Scores(shape.options["scale"], None)
    return paged_decode(
        q[:, 0],
        pool,
        pages,
        positions[:, 0],
        layout=shape.layout,
        scores=scores,
        window=shape.window,
        config=config,
    )


def prefill_once(shape: Shape, config: PrefillConfig, q, pool, pages, positions):
    """The prefill kernel with given sizes."""
    scores = Scores(shape.options["scale"], None)
    return paged_prefill(
        q,
        pool,
        pages,
        positions,
        layout=shape.layout,
        scores=scores,
        window=shape.window,
        config=config,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    models = parser.parse_args().models
    pool = random_pool(jax.random.key(0))
    print("copy", round(copy_bandwidth(pool), 3), "TB/s", flush=True)
    for name in models:
        shape = SHAPES[name]
        for once, candidates, sequences, context, chunk in (
            (decode_once, decode_candidates(shape), 16, 8192, 1),
            (decode_once, decode_candidates(shape), 1, 8192, 1),
            (prefill_once, prefill_candidates(shape), 1, 8192, CHUNK),
        ):
            args = operands(shape, sequences, context, chunk)

            def build(config, once=once, shape=shape, args=args):
                try:
                    return compile_rounds(partial(once, shape, config), pool, args, ROUNDS)
                except Exception as error:  # too much shared memory, most often
                    return str(error).splitlines()[0][:120]

            with ThreadPoolExecutor(COMPILERS) as threads:
                programs = list(threads.map(build, candidates))
            rows = []
            for config, program in zip(candidates, programs, strict=True):
                if isinstance(program, str):
                    print(name, config, program)
                    continue
                time = measure(lambda p=program, a=args: p(a[0], pool, *a[1:]), ROUNDS)
                rows.append((time.median, time.spread, config))
            for median, spread, config in sorted(rows, key=lambda row: row[0]):
                size = 4 * sequences * min(context, shape.window or context)
                rate = size * shape.layout.words_per_token / median / 1e6
                line = {"model": name, "sequences": sequences, "queries": chunk}
                line |= {"us": round(median, 1), "spread": round(spread, 1)}
                print(json.dumps(line | {"tbytes_per_s": round(rate, 2)}), config, flush=True)


if __name__ == "__main__":
    main()
