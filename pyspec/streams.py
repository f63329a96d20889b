"""Closed or full standard streams: a command and its child processes continue without them, or end with one line."""

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
STREAMS = (
    ("stdin", os.O_RDONLY),
    ("stdout", os.O_WRONLY),
    ("stderr", os.O_WRONLY),
)  # by file descriptor
STDERR = 2


class Lossy(io.FileIO):
    """A file that accepts every write: bytes that it cannot store, because the disk is full or the reader has ended, are dropped silently."""

    def write(self, data: Buffer, /) -> int:
        """Write all bytes, as a buffered file does. It has no buffer, because a buffered file refuses a write from within its own write."""
        rest = memoryview(data).cast("B")
        n = rest.nbytes
        try:
            # None: the reader is slow, and the stream is non-blocking
            while rest and (taken := super().write(rest)) is not None:
                rest = rest[taken:]
        except OSError as e:
            if e.errno not in LOST:
                raise
        return n


def fill_in() -> None:
    """Open `/dev/null` for each closed stream, under its number, so that no later file gets that number, here or in a child.

    Errors of stderr are ignored, so that a server does not end when the disk of its log is full.
    """
    for fd, (name, mode) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            if not _is_open(fd):
                _take(fd, mode)
            setattr(sys, name, open(fd, "r" if mode == os.O_RDONLY else "w", closefd=False))  # noqa: SIM115 - open until the process ends
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
        os.dup2(null, fd)  # children inherit it
        os.close(null)


def is_lost(error: OSError) -> bool:
    """True for a failed standard stream; the errors of files have a name."""
    return error.errno in LOST and error.filename is None


def flush() -> OSError | None:
    """Flush stdout. Data that cannot be written is dropped, and the error returned."""
    try:
        sys.stdout.flush()
    except OSError as e:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return e
    return None
