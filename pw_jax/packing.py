"""Several small arrays as one: every host array that a step takes costs a transfer of its own."""

from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

WORD_BYTES = 4


class Packing[TreeT]:
    """Where the arrays of a tree lie in one int32 vector.

    Attributes:
        defaults: The tree, as views of the vector that each call of :meth:`fill` starts from: what
            is written here holds for all later calls.

    Args:
        blank: A tree of numpy arrays of 32-bit types, as a call is to find them.

    Raises:
        ValueError: An array of another size of type.
    """

    def __init__(self, blank: TreeT):
        leaves, self._tree = jax.tree.flatten(blank)
        wide = [leaf.dtype for leaf in leaves if leaf.dtype.itemsize != WORD_BYTES]
        if wide:
            raise ValueError(f"only 32-bit arrays are packed, not {wide[0]}")
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
        self._vector = self.pack(blank)
        self.defaults = self.view(self._vector)

    @property
    def vector(self) -> Int32[np.ndarray, " words"]:
        """The defaults, packed."""
        return self._vector

    def fill(self) -> tuple[Int32[np.ndarray, " words"], TreeT]:
        """A vector of its own with the defaults, and the tree as views of it, to be filled in.

        It is new each time: a device may read the last one late.
        """
        vector = self._vector.copy()
        return vector, self.view(vector)

    @staticmethod
    def pack(tree: Any) -> Int32[np.ndarray, " words"]:
        """A vector of a tree of arrays like those of ``blank``."""
        leaves = [leaf.reshape(-1).view(np.int32) for leaf in jax.tree.leaves(tree)]
        return np.concatenate([np.zeros(0, np.int32), *leaves])

    def unpack(self, vector: Int32[Array, " words"]) -> TreeT:
        """The tree inside a traced function."""
        parts = zip(self._slices(), self._shapes, strict=True)
        return jax.tree.unflatten(
            self._tree,
            [
                jax.lax.bitcast_convert_type(vector[part], dtype).reshape(shape)
                for part, (shape, dtype) in parts
            ],
        )

    def view(self, vector: np.ndarray) -> TreeT:
        """The tree as views of a vector on the host."""
        parts = zip(self._slices(), self._shapes, strict=True)
        return jax.tree.unflatten(
            self._tree, [vector[part].view(dtype).reshape(shape) for part, (shape, dtype) in parts]
        )

    def _slices(self) -> list[slice]:
        return [slice(*ends) for ends in pairwise([0, *self._ends])]
