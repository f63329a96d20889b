"""What a process under limits does: it answers lines of its parent with lines, within memory of a size and a clock of its own.

The parent's side is sandbox_process.py.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator

OWN_CLOCK_S = 30  # ends the process by SIGALRM if the parent is no more there to do it


def serve(answers: Callable[[Iterator[str]], Iterator[dict[str, str]]], memory_bytes: int) -> None:
    """Until the parent is gone. answers: one for each line that comes; memory_bytes: of address space, the interpreter's own included."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ImportError, ValueError, OSError):
        pass  # not this system's: the clock still holds
    sys.stdout.write("{}\n")  # started: from here on the parent's shorter clock runs
    sys.stdout.flush()
    for answer in answers(_watched(iter(sys.stdin.readline, ""))):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _watched(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        signal.alarm(OWN_CLOCK_S)
        yield line
        signal.alarm(0)
