"""Memory of the system: pages of their own for large pieces, and freed memory that the C library keeps. No torch."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress


def own_pages(n_bytes: int, *, huge: bool = False) -> mmap.mmap:
    """`n_bytes` (not 0) of zeros that go back to the system with their last view. Raises OSError if it has no more mappings.

    huge: in pages of two MiB where the system has them, for memory that is written as a whole.
    """
    # shared ones would stay with a forked child
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def give_back_memory() -> None:
    """Return freed memory to the system: after megabytes of text, glibc keeps hundreds of megabytes. Does nothing without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
