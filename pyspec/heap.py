"""Memory of the system: pages of their own for large pieces, freed memory that the C library keeps, and libraries' pages. No torch."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

MAPS = Path("/proc/self/smaps")
LEAST_KIB = 256  # of a library's mapping that is worth a call
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)")


Pages = TypeVar("Pages", bound=mmap.mmap)


def own_pages(n_bytes: int, *, huge: bool = False) -> mmap.mmap:
    """`n_bytes` (not 0) of zeros that go back to the system with their last view. Raises OSError if it has no more mappings.

    huge: in pages of two MiB where the system has them, for memory that is written as a whole.
    """
    return pages_of(mmap.mmap, n_bytes, huge=huge)


def pages_of(kind: type[Pages], n_bytes: int, *, huge: bool = False) -> Pages:
    """`own_pages` as another kind of object."""
    # shared ones would stay with a forked child
    pages = kind(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def give_back_memory() -> None:
    """Return freed memory to the system: after megabytes of text, glibc keeps hundreds of megabytes. Does nothing without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_pages(address: int, n_bytes: int) -> tuple[int, int]:
    """Have the system take the whole pages of this memory of our own, which then reads as zeros. Returns the part of it that it took, as (begin, end):
    the rest is as before."""
    page = mmap.PAGESIZE
    first = min(-address % page, n_bytes)
    end = first + (n_bytes - first) // page * page
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if sys.platform != "linux" or advice is None or end == first:
        return 0, 0
    libc = ctypes.CDLL(None)
    failed = libc.madvise(ctypes.c_void_p(address + first), ctypes.c_size_t(end - first), advice)
    return (0, 0) if failed else (first, end)


def unmap_idle_pages() -> int:
    """Take libraries' unwritten pages out of this process, after a load or while it rests. Returns their KiB.

    They stay in the system's cache of files, and those in use come back one fault for 16 pages. Importing torch touches 70 MiB, of
    which rounds use a tenth. Does nothing where there is no /proc.
    """
    n_kib = 0
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for begin, end, kib in _unwritten(MAPS.read_text()):
            failed = libc.madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
            )
            n_kib += 0 if failed else kib
    return n_kib


def _unwritten(maps: str) -> Iterator[tuple[int, int, int]]:
    """(begin, end, KiB in memory) of the mappings of libraries' files, of which this process has no page of its own.

    maps: text in the form of /proc/PID/smaps. A library that is being loaded has no page yet, so LEAST_KIB leaves it alone.
    """
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        found = _MAPPING.match(entry)
        if found is None:
            continue
        begin, end, mode, inode, path = found.groups()
        is_library = inode != "0" and re.search(r"\.so(\.[\d.]+)?$", path.strip()) is not None
        if not is_library or mode not in ("r--p", "r-xp"):
            continue
        sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", entry, re.MULTILINE))
        kib = int(sizes.get("Rss", 0))
        if kib >= LEAST_KIB and sizes.get("Anonymous") == "0":
            yield int(begin, 16), int(end, 16), kib
