"""Where a GPU spends the time of a step: kernel by kernel, and the gaps between them."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

LISTED = 24


def profile_steps(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Runs steps under the profiler.

    Args:
        step: Launches one step; may return before it has run.
        steps: How many.

    Returns:
        Microseconds a step: ``span`` from the first kernel's start to the last one's end, ``busy``
        while any kernel or copy ran, and by kernel the time and the launches, largest first.
        Kernels whose names differ in a number only are one.
    """
    options = ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the device's events only
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            results = [step() for _ in range(steps)]
            jax.block_until_ready(results)
        events = sorted(_device_events(Path(folder)))
    if not events:
        return {"span": None, "busy": None, "kernels": []}
    busy, reached = 0.0, events[0][0]
    times, launches = defaultdict(float), defaultdict(int)
    for start, end, name in events:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        times[name] += end - start
        launches[name] += 1
    order = sorted(times, key=lambda name: -times[name])
    return {
        "steps": steps,
        "span": round((reached - events[0][0]) / steps, 1),
        "busy": round(busy / steps, 1),
        "launches": round(len(events) / steps, 1),
        "kernels": [
            {
                "name": name,
                "us": round(times[name] / steps, 2),
                "launches": round(launches[name] / steps, 1),
            }
            for name in order[:LISTED]
        ],
    }


def _device_events(trace: Path) -> list[tuple[float, float, str]]:
    """Start and end in microseconds, and name, of every kernel and copy."""
    events = []
    for path in trace.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if (line.name or "").startswith("Stream"):
                    events += [
                        (e.start_ns / 1e3, (e.start_ns + e.duration_ns) / 1e3, _kind(e.name))
                        for e in line.events
                    ]
    return events


def _kind(name: str) -> str:
    return re.sub(r"[_.]\d+$", "", re.sub(r"[_.]\d+(?=[_.])", "", name))[:80]
