"""How processes of an engine are started: their link and their environment. Nothing heavy is imported here."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one link; the second one is for the engine process."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def child_environment() -> dict[str, str]:
    """The environment of a child process of this program: it imports from our search path, pyspec first."""
    ours = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([ours, *(p for p in sys.path if p)])),
    }
