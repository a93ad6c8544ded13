"""The layouts that a factored layer can have on a mesh."""

from sharding.layouts.base import Layout
from sharding.layouts.dense import DenseLayout
from sharding.layouts.gathered import GatheredLayout
from sharding.layouts.naive import NaiveLayout
from sharding.layouts.sharded import ShardedLayout

LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (DenseLayout, NaiveLayout, GatheredLayout, ShardedLayout)
}


def make_layout(name: str, devices: int) -> Layout:
    """The layout of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is not one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name](devices)
