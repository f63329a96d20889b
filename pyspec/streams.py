"""Standard streams that are closed or full: a command, and a process that it starts, goes on without them, or ends in one line."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

LOST = (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF, errno.EDQUOT, errno.EFBIG)
STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))  # by their numbers
STDERR = 2


class Lossy(io.FileIO):
    """A file that takes everything: what it can not keep, because it is full or its reader is gone, is lost. Said of that is nothing, there is no place."""

    def write(self, data: Buffer, /) -> int:
        """All of it, as a buffered file does. None stands around this one: it would refuse a line that is written in the middle of another."""
        rest = memoryview(data).cast("B")
        n = rest.nbytes
        try:
            while (
                rest and (taken := super().write(rest)) is not None
            ):  # None: the reader is slow, and the stream does not wait
                rest = rest[taken:]
        except OSError as e:
            if e.errno not in LOST:
                raise
        return n


def fill_in() -> None:
    """Where a stream is closed, `/dev/null` takes its place and its number, which no file opened later may have, here or in a child.

    And stderr, which only tells of the work, ends none: not a server that runs for weeks, when the disk of its log is full.
    """
    for fd, (name, mode) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            if not _is_open(fd):
                _take(fd, mode)
            setattr(sys, name, open(fd, "r" if mode == os.O_RDONLY else "w", closefd=False))  # noqa: SIM115 - for as long as the process lives
    stderr = sys.__stderr__
    if stderr is not None and sys.stderr is stderr and stderr.fileno() == STDERR:
        sys.stderr = io.TextIOWrapper(
            Lossy(STDERR, "w", closefd=False),
            stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _take(fd: int, mode: int) -> None:
    null = os.open(os.devnull, mode)
    if null == fd:
        os.set_inheritable(fd, True)
    else:
        os.dup2(null, fd)  # which children inherit
        os.close(null)


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
