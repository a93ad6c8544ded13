"""Who owns each page of the pool. Host side, plain numpy."""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from jaxtyping import Int32


class Owner(IntEnum):
    """What a page is used for.

    A page that is KEPT holds keys and values that nobody uses now and somebody may want again. It
    counts as free, and is given away when no other page is.
    """

    FREE = 0
    RESERVED = 1
    KV = 2
    WEIGHT = 3
    KEPT = 4


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than were asked for; nothing was taken."""


class PageAllocator:
    """A stack of free page ids, and the owner of every page.

    Page 0 is reserved: padding and masked writes go there.

    Attributes:
        evict: Gives up at least so many of the pages that are KEPT, by :meth:`give`; set by whoever
            keeps any.

    Args:
        pages: Pages of the pool, page 0 included.
    """

    def __init__(self, pages: int):
        self._owner = np.full(pages, Owner.FREE, np.int8)
        self._owner[0] = Owner.RESERVED
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)[:-1].copy()
        self._free = pages - 1
        self._owned = dict.fromkeys(Owner, 0) | {Owner.FREE: pages - 1, Owner.RESERVED: 1}
        self.evict: Callable[[int], None] | None = None

    @property
    def pages(self) -> int:
        """Pages of the pool, page 0 included."""
        return len(self._owner)

    @property
    def free(self) -> int:
        """Pages that can be taken: nobody's, and those that are only kept."""
        return self._free + self._owned[Owner.KEPT]

    def owned(self, owner: Owner) -> int:
        """Pages of an owner."""
        return self._owned[owner]

    def take(self, count: int, owner: Owner) -> Int32[np.ndarray, " count"]:
        """Takes pages.

        Raises:
            OutOfPagesError: Fewer than ``count`` pages are free.
        """
        if count > self.free:
            raise OutOfPagesError(f"{count} pages wanted, {self.free} free")
        if count > self._free and self.evict is not None:
            self.evict(count - self._free)
        ids = self._stack[self._free - count : self._free].copy()
        self._free -= count
        self._owner[ids] = owner
        self._count(owner, count)
        return ids

    def give(self, ids: Int32[np.ndarray, " count"], owner: Owner) -> None:
        """Returns pages.

        Raises:
            ValueError: A page does not belong to ``owner`` or is named twice: a leak or a double
                free, which would corrupt somebody's data if it passed.
        """
        self._check(ids, owner)
        self._owner[ids] = Owner.FREE
        self._stack[self._free : self._free + len(ids)] = ids
        self._free += len(ids)
        self._count(owner, -len(ids))

    def pass_on(self, ids: Int32[np.ndarray, " count"], owner: Owner, to: Owner) -> None:
        """Gives pages from one owner to another.

        Raises:
            ValueError: See :meth:`give`.
        """
        self._check(ids, owner)
        self._owner[ids] = to
        self._owned[owner] -= len(ids)
        self._owned[to] += len(ids)

    def owned_ids(self, owner: Owner) -> Int32[np.ndarray, " count"]:
        """The ids of an owner's pages, ascending."""
        return np.flatnonzero(self._owner == owner).astype(np.int32)

    def _check(self, ids: Int32[np.ndarray, " count"], owner: Owner) -> None:
        wrong = ids[self._owner[ids] != owner]
        if len(wrong) or len(set(ids.tolist())) != len(ids):
            raise ValueError(f"pages {wrong[:8].tolist()} are not {owner.name}, or given twice")

    def _count(self, owner: Owner, taken: int) -> None:
        self._owned[owner] += taken
        self._owned[Owner.FREE] -= taken
