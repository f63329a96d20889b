"""An engine process that starts before it is asked for, so that it imports while the program prepares. Nothing heavy is imported here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from pyspec.engine.children import Started, start

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.process.engine_main")
END_S = 5.0  # seconds to wait for a killed process; one that hangs in the driver may take longer

_ahead: list[tuple[tuple[str, ...], Started]] = []  # by their commands


def start_ahead() -> None:
    """Start an engine process early, if none is there.

    Call it on the main thread: Linux ends a child with the thread that started it.
    """
    if not _ahead:
        with suppress(OSError):
            _ahead.append((COMMAND, start(COMMAND)))


def end_ahead() -> None:
    """End the early processes that were not used."""
    while _ahead:
        process, ours = _ahead.pop()[1]
        ours.close()
        process.kill()
        process.wait(END_S)


def started(command: Sequence[str]) -> Started:
    """The process that was started early, if it still runs, else a new one. Raises OSError."""
    while _ahead and _ahead[0][0] == tuple(command):
        process, ours = _ahead.pop()[1]
        if process.poll() is None:
            return process, ours
        ours.close()
    return start(command)
