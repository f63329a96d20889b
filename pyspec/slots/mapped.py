"""Host memory that returns to the system as soon as its last tensor is freed.

The C library keeps freed memory for later. States are copied by the thousand between allocations that stay, so the kept memory grew
as large as all of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

LEAST = 256 << 10  # bytes of a piece; for smaller ones the C library wastes less than whole pages do
MOST = 16 << 10  # pieces: a Linux process may have 65,530 mappings, and needs some for other things
_PIECES: WeakSet[mmap.mmap] = WeakSet()


def mapped(n_bytes: int, *, huge: bool = False) -> Tensor:
    """[n_bytes] uint8 of zeros on the host. huge: in pages of two MiB where the system has them, for memory that is written as a whole."""
    if n_bytes < LEAST or len(_PIECES) >= MOST:
        return torch.zeros(n_bytes, dtype=torch.uint8)
    try:
        # shared ones would stay with a forked child
        piece = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # the system has no more mappings; use the C library's memory
        return torch.zeros(n_bytes, dtype=torch.uint8)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            piece.madvise(mmap.MADV_HUGEPAGE)
    _PIECES.add(piece)
    return torch.frombuffer(piece, dtype=torch.uint8)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[*shape] of zeros. On a CPU the system gives a page of it at the first write, so the content of slots takes what texts have used."""
    n_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not n_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return mapped(n_bytes).view(dtype).view(*shape)


def empty_like(live: Tensor, n_element: int) -> Tensor:
    """[n_element], uninitialised, with the dtype and device of `live`."""
    if live.device.type != "cpu":
        return live.new_empty(n_element)
    return mapped(n_element * live.element_size()).view(live.dtype)
