"""The small program that gives a slot pages of other texts, and copies the block they end in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.page_write import write_pages
from pw_jax.engine.kv_cache import PageCopies
from pw_jax.engine.sequence import Sequence
from pw_jax.engine.steps import Caches
from pw_jax.paging.layout import PagingLayout


class ReuseArguments(NamedTuple):
    """What the host says; numpy on the way in, traced arrays inside.

    Attributes:
        slot: The sequence's slot, int32 scalar.
        pages: For each KV group, the slot's whole page table, int32 ``[layers, blocks]``.
        sources: Pages to copy, int32 ``[P]``, as many as one block of text has; padded with 0.
        targets: Where to, likewise.
    """

    slot: Any
    pages: tuple[Any, ...]
    sources: Any
    targets: Any


def no_reuse(layout: PagingLayout, blocks: tuple[int, ...]) -> ReuseArguments:
    """Arguments to be filled in.

    Args:
        layout: The model's layouts.
        blocks: Blocks of each group's table.
    """
    copied = layout.kv_pages(layout.block_tokens)
    return ReuseArguments(
        np.zeros((), np.int32),
        tuple(
            np.zeros((len(group.layers), most), np.int32)
            for group, most in zip(layout.kv_groups, blocks, strict=True)
        ),
        np.zeros(copied, np.int32),
        np.zeros(copied, np.int32),
    )


def fill_reuse(arguments: ReuseArguments, sequence: Sequence, copies: PageCopies) -> None:
    """Writes what a sequence has been given into the (numpy) arguments."""
    arguments.slot[...] = sequence.slot
    for table, held in zip(arguments.pages, sequence.pages, strict=True):
        for block, pages in enumerate(held):
            table[:, block] = pages
    arguments.sources[: len(copies.sources)] = copies.sources
    arguments.targets[: len(copies.targets)] = copies.targets


def copy_pages(
    pool: UInt32[Array, "pages words"], sources: Int32[Array, " P"], targets: Int32[Array, " P"]
) -> UInt32[Array, "pages words"]:
    """The pool of one device with pages copied; in place when it is donated."""
    return write_pages(pool, targets, pool[sources])


def reuse_pages(
    caches: Caches, arguments: ReuseArguments, copy: Callable[..., jax.Array]
) -> Caches:
    """The caches with a slot's page tables replaced and pages copied.

    Args:
        caches: Donated.
        arguments: What the host says.
        copy: :func:`copy_pages`, on each device.
    """
    tables = tuple(
        table.at[:, arguments.slot].set(pages)
        for table, pages in zip(caches.kv_pages, arguments.pages, strict=True)
    )
    return Caches(copy(caches.pool, arguments.sources, arguments.targets), tables)
