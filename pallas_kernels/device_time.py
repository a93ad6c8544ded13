"""Time that a GPU spends in the kernels of a call, out of the profiler."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

CALLS = 24


@dataclass(frozen=True)
class Time:
    """Microseconds a call: the median, and the 90th less the 10th percentile."""

    median: float
    spread: float


def kernel_times(trace: Path) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel and copy of a trace, in the order they ran."""
    [path] = trace.rglob("*.xplane.pb")
    events = [
        (event.start_ns, event.name, event.duration_ns / 1e3)
        for plane in ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if (line.name or "").startswith("Stream")
        for event in line.events
    ]
    return [(name, duration) for _, name, duration in sorted(events)]


def call_times(
    call: Callable[[int], object], *, calls: int, keep: bool = True
) -> list[list[tuple[str, float]]]:
    """Name and microseconds of each kernel of ``call(turn)``, call by call.

    Args:
        call: Runs a compiled program; every call launches as many kernels.
        calls: Calls in the trace, after two to warm up.
        keep: Wait for all results at the end; otherwise only the last is live (donated operands).

    Raises:
        RuntimeError: The trace holds fewer kernels than calls.
    """
    jax.block_until_ready([call(0), call(1)][-1])
    options = ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # the device's events only
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            results = []
            for turn in range(calls):
                result = call(turn)
                results = [*results, result] if keep else [result]
            jax.block_until_ready(results)
        times = kernel_times(Path(folder))
    if len(times) < calls:
        raise RuntimeError(f"the trace holds {len(times)} kernels of {calls} calls")
    ends = [round(len(times) * turn / calls) for turn in range(calls + 1)]
    return [times[start:end] for start, end in pairwise(ends)]


def device_time(call: Callable[[int], object], *, calls: int = CALLS, keep: bool = True) -> Time:
    """Time of all kernels of a call; see :func:`call_times`."""
    times = call_times(call, calls=calls, keep=keep)
    sums = [sum(duration for _, duration in one) for one in times]
    tenths = statistics.quantiles(sums, n=10)
    return Time(statistics.median(sums), tenths[-1] - tenths[0])
