"""Standard streams that are closed or full: a command goes on without them, or ends in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

LOST = (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF)
STREAMS = (
    ("stdin", "r"),
    ("stdout", "w"),
    ("stderr", "w"),
)  # by their numbers: what is opened next has the lowest free one


def fill_in() -> None:
    """Where a stream is closed, `/dev/null` takes its place and its number, which no file opened later may have."""
    for name, mode in STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives


def is_lost(error: OSError) -> bool:
    """Whether this is a stream that takes no more, and not a file: those are named."""
    return error.errno in LOST and error.filename is None


def flush() -> OSError | None:
    """Write out what waits in stdout; what it does not take is dropped, and the reason returned."""
    try:
        sys.stdout.flush()
    except OSError as e:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return e
    return None
