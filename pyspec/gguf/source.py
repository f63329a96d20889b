"""One open file, read by position.

The file is not mapped. If a mapped file becomes shorter, the next access kills the process with SIGBUS, and no check can prevent
that. A short read is an error with numbers. A file that is rewritten in place during a read still gives a mix of old and new
bytes, as in any program.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from pyspec.errors import BadGGUF, ModelError


class OpenFile:
    """A file that stays open until its last user is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._end = weakref.finalize(self, os.close, self._fd)
            self.size = os.fstat(self._fd).st_size
            os.pread(self._fd, 1, 0)  # directories and pipes open, but can not be read by position
        except OSError as error:
            raise ModelError(f"cannot open {path}: {(error.strerror or str(error)).lower()}") from None

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        self._end()

    def read(self, at: int, n: int) -> bytes:
        """`n` bytes from offset `at` on. Errors as in `read_into`."""
        assert self.is_open, f"{self.path} is closed"
        try:
            found = os.pread(self._fd, n, at)
        except OSError as error:
            raise self._lost(error) from None
        if len(found) == n:
            return found
        out = np.empty(n, np.uint8)  # pread returns less at the end of the file, and beyond 2 GiB
        self.read_into(at, out)
        return out.tobytes()

    def read_into(self, at: int, out: np.ndarray) -> None:
        """Fill all of `out` [n] uint8 from offset `at` on. Several threads may read at once.

        Errors: BadGGUF if the file has become too short, ModelError if it can not be read.
        """
        assert self.is_open, f"{self.path} is closed"
        view, done = out.data, 0
        while done < len(view):
            try:
                n = os.preadv(self._fd, [view[done:]], at + done)
            except OSError as error:
                raise self._lost(error) from None
            if n == 0:
                raise BadGGUF(
                    f"{self.path} was cut short while it was read: it had {self.size} bytes, "
                    f"now it ends at {os.fstat(self._fd).st_size}"
                )
            done += n

    def _lost(self, error: OSError) -> ModelError:
        return ModelError(f"cannot read {self.path}: {(error.strerror or str(error)).lower()}")
