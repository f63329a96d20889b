"""The border to Rust libraries. A Rust panic is not a Python Exception: it would pass every handler and end its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspec.errors import PyspecError
from pyspec.ranges import printable

PANIC = "PanicException"  # pyo3 makes one such class for each library
MESSAGE_CHARS = 200  # characters of its message to show


@contextmanager
def border(error: type[PyspecError], what: str) -> Iterator[None]:
    """Raise `error` for any failure of a library inside the block, except our own errors and those that stop the program."""
    try:
        yield
    except (PyspecError, MemoryError):
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != PANIC:
            raise
        message = printable(" ".join(str(e).split()), MESSAGE_CHARS)
        raise error(f"{what}: {message or type(e).__name__}") from None
