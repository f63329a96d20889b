"""Host memory that returns to the system as soon as its last tensor is freed.

The C library keeps freed memory for later. States are copied by the thousand between allocations that stay, so the kept memory grew
as large as all of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor

from pyspec.heap import give_back_pages, own_pages

LEAST = 256 << 10  # bytes of a piece; for smaller ones the C library wastes less than whole pages do
MOST = 16 << 10  # pieces: a Linux process may have 65,530 mappings, and needs some for other things
_PIECES: WeakSet[mmap.mmap] = WeakSet()


def mapped(n_bytes: int, *, huge: bool = False) -> Tensor:
    """[n_bytes] uint8 of zeros on the host. huge: as of `own_pages`."""
    if n_bytes < LEAST or len(_PIECES) >= MOST:
        return _small(n_bytes)
    try:
        return of_pages(own_pages(n_bytes, huge=huge))
    except OSError:  # the system has no more mappings; use the C library's memory
        return _small(n_bytes)


def of_pages(piece: mmap.mmap) -> Tensor:
    """[n] uint8 over all of `own_pages`, which counts as one of the pieces from now on."""
    _PIECES.add(piece)
    return torch.frombuffer(piece, dtype=torch.uint8)


def _small(n_bytes: int) -> Tensor:
    """Zeros from the C library. numpy writes them, because torch would wake all its threads for 32 KiB."""
    made = torch.empty(n_bytes, dtype=torch.uint8)
    made.numpy().fill(0)
    return made


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[*shape] of zeros. On a CPU the system gives a page of it at the first write, so the content of slots takes what texts have used."""
    n_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not n_bytes:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return mapped(n_bytes).view(dtype).view(*shape)


def empty(tensor: Tensor) -> None:
    """Write zeros into a tensor. On a CPU its whole pages go back to the system, until they are written again."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor.zero_()
        return
    whole = tensor.view(-1).view(torch.uint8)
    first, end = give_back_pages(whole.data_ptr(), whole.numel())
    whole[:first].zero_()
    whole[end:].zero_()


def empty_like(live: Tensor, n_element: int) -> Tensor:
    """[n_element], uninitialised, with the dtype and device of `live`."""
    if live.device.type != "cpu":
        return live.new_empty(n_element)
    return mapped(n_element * live.element_size()).view(live.dtype)
