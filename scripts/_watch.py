"""A live view of a generation: who holds the pages, and at which widths the experts are."""

from collections.abc import Iterator
from itertools import pairwise

from rich.console import Console
from rich.live import Live
from rich.table import Table

from pw_jax.engine.engine import Engine
from pw_jax.engine.sequence import TokenEvent
from pw_jax.engine.trace import StepRecord

BAR = 40
RECENT = 32


def watched(engine: Engine, console: Console | None = None) -> Iterator[TokenEvent]:
    """Runs an engine until idle, like `Engine.run`, and shows where it stands beside it."""
    console = console or Console(stderr=True)
    with Live(console=console, refresh_per_second=8) as live:
        while not engine.idle:
            yield from engine.step()
            live.update(view(engine.trace))


def view(trace: list[StepRecord]) -> Table:
    """The latest step as a table."""
    last = trace[-1]
    table = Table.grid(padding=(0, 2))
    total = last.weight_pages + last.kv_pages + last.free_pages
    for name, pages in (
        ("expert pages", last.weight_pages),
        ("KV pages", last.kv_pages),
        ("free pages", last.free_pages),
    ):
        table.add_row(name, f"{pages}", _bar(pages, total))
    widths = last.bits or {}
    for bits, blocks in widths.items():
        table.add_row(f"blocks at {bits} bits", f"{blocks}", _bar(blocks, sum(widths.values())))
    if last.mean_bits is not None:
        table.add_row("bits a weight", f"{last.mean_bits:.2f}")
        table.add_row("lowered, raised, failed", f"{last.lowered}, {last.raised}, {last.failed}")
        table.add_row("copied", f"{last.bytes_moved / (1 << 20):.1f} MiB")
    table.add_row("running, waiting", f"{last.running}, {last.waiting}")
    table.add_row("preemptions", f"{last.preemptions}")
    recent = trace[-RECENT:]
    times = [after.seconds - before.seconds for before, after in pairwise(recent)]
    if times:
        tokens = sum(record.decoded_tokens for record in recent[1:])
        table.add_row("tokens a second", f"{tokens / max(sum(times), 1e-9):.1f}")
    return table


def _bar(part: int, whole: int) -> str:
    return "█" * round(BAR * part / max(whole, 1))
