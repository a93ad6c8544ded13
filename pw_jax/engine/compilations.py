"""Counts what JAX compiles, because a running engine must compile nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Gives a list that grows by the name of an event whenever JAX traces, lowers or compiles."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if "compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
