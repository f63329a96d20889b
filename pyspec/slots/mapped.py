"""Host memory that returns to the system as soon as its last tensor is freed.

The C library keeps freed memory for later. States are copied by the thousand between allocations that stay, so the kept memory grew
as large as all of them.
"""

from __future__ import annotations

import mmap
from weakref import WeakSet

import torch
from torch import Tensor

LEAST = 256 << 10  # bytes of a piece; for smaller ones the C library wastes less than whole pages do
MOST = 16 << 10  # pieces: a Linux process may have 65,530 mappings, and needs some for other things
_PIECES: WeakSet[mmap.mmap] = WeakSet()


def mapped(n_bytes: int) -> Tensor:
    """[n_bytes] uint8 of zeros on the host."""
    if n_bytes < LEAST or len(_PIECES) >= MOST:
        return torch.zeros(n_bytes, dtype=torch.uint8)
    try:
        # shared ones would stay with a forked child
        piece = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # the system has no more mappings; use the C library's memory
        return torch.zeros(n_bytes, dtype=torch.uint8)
    _PIECES.add(piece)
    return torch.frombuffer(piece, dtype=torch.uint8)


def empty_like(live: Tensor, n_element: int) -> Tensor:
    """[n_element], uninitialised, with the dtype and device of `live`."""
    if live.device.type != "cpu":
        return live.new_empty(n_element)
    return mapped(n_element * live.element_size()).view(live.dtype)
