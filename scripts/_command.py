"""What all command lines share: one line for an error, and progress only on a terminal."""

import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from pw_jax.errors import UserError

BAD_INPUT = 2
INTERRUPTED = 130


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        main: parses the arguments and does the work.
        argv: arguments; default those of the process.

    Returns:
        The exit code: 2 after a UserError, told in one line; 130 after Ctrl-C.
    """
    try:
        main(argv)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def progress_console() -> Console:
    """A console on stderr for progress; silent unless it is a terminal."""
    return Console(stderr=True, quiet=not sys.stderr.isatty())
