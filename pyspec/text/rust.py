"""The border to libraries in Rust: a panic in one is no Exception here, passes every handler and ends the thread that it meets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspec.errors import PyspecError
from pyspec.ranges import printable

PANIC = "PanicException"  # of pyo3, which makes one such class for each library
SAID = 200  # characters of its message


@contextmanager
def border(error: type[PyspecError], what: str) -> Iterator[None]:
    """Raise `error` for whatever a library fails with inside of the block, but for our own errors and what stops the program."""
    try:
        yield
    except (PyspecError, MemoryError):
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != PANIC:
            raise
        raise error(f"{what}: {printable(' '.join(str(e).split()), SAID) or type(e).__name__}") from None
