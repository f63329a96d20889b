"""How processes of an engine are started, and end: their link and their environment. Nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

Started = tuple["subprocess.Popen[bytes]", socket.socket]  # a process, and our end of its link


def start(command: Sequence[str]) -> Started:
    """A new process, which gets the descriptor of its end as its last argument. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, which lets running requests finish
        )
    return process, ours


def child_environment() -> dict[str, str]:
    """The environment of a child process of this program: it imports from our search path, pyspec first."""
    ours = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *(p for p in sys.path if p)])),
    }


def is_stopped(pid: int) -> bool:
    """The process was stopped by SIGSTOP; tracing is another state."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def how_ended(code: int) -> str:
    """An exit status in words."""
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit status {code}"
