"""The child's side of a sandbox: it answers each line of its parent with a line, under limits of memory and time.

The parent's side is sandbox_process.py.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator

OWN_CLOCK_S = 30  # SIGALRM then ends the process, if the parent is gone and can not kill it


def serve(answers: Callable[[Iterator[str]], Iterator[dict[str, str]]], memory_bytes: int) -> None:
    """Answer until the parent is gone. answers: yields one for each line; memory_bytes: of address space, the interpreter included."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limit; the clock still applies
    sys.stdout.write("{}\n")  # started: the parent's shorter clock runs from here on
    sys.stdout.flush()
    for answer in answers(_watched(iter(sys.stdin.readline, ""))):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _watched(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        signal.alarm(OWN_CLOCK_S)
        yield line
        signal.alarm(0)
