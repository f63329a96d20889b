"""Host memory for what is kept between requests: the system has it again as soon as its last tensor goes.

The C library keeps what is freed for later. Copies of states come and go by the thousand, between allocations that stay, so that
what it keeps became as much as all of them.
"""

from __future__ import annotations

import mmap
from weakref import WeakSet

import torch
from torch import Tensor

LEAST = 256 << 10  # bytes of a piece; of less the C library wastes less than the system's pages do
MOST = 16 << 10  # pieces: a process may have 65,530 mappings on Linux, and needs some for other things
_PIECES: WeakSet[mmap.mmap] = WeakSet()


def mapped(n_bytes: int) -> Tensor:
    """[n_bytes] uint8 of zeros on the host."""
    if n_bytes < LEAST or len(_PIECES) >= MOST:
        return torch.zeros(n_bytes, dtype=torch.uint8)
    try:
        piece = mmap.mmap(
            -1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # shared ones would stay with a forked child
    except OSError:  # the system has no more mappings; what the C library has may do
        return torch.zeros(n_bytes, dtype=torch.uint8)
    _PIECES.add(piece)
    return torch.frombuffer(piece, dtype=torch.uint8)


def empty_like(live: Tensor, n_element: int) -> Tensor:
    """[n_element] of the type of `live`, and where that is. What stands in it is to be written before it is read."""
    if live.device.type != "cpu":
        return live.new_empty(n_element)
    return mapped(n_element * live.element_size()).view(live.dtype)
