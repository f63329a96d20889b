"""GPU memory for what a load needs only for a moment, apart from what stays.

torch's allocator cuts small tensors out of larger pieces that have been freed, and can not give a piece back of which
anything is in use. A file's bytes and what is computed on the way to a kernel's layout are as large as the weights themselves:
were these cut out of them, gigabytes would be lost between. So the short-lived ones have a pool of their own, which goes as
a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_own = threading.local()  # a pool takes what one thread allocates


@contextmanager
def temporary(device: torch.device) -> Iterator[None]:
    """Tensors made inside lie apart; they are to be gone by `release`. What stays is allocated before, outside. Not nested."""
    if device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    pools: dict[int, torch.cuda.MemPool] = _own.__dict__.setdefault("pools", {})
    if index not in pools:
        pools[index] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pools[index], index):
        yield


def release() -> None:
    """All that this thread's temporary tensors had is the device's again, and whatever else torch keeps of it unused."""
    _own.__dict__.pop("pools", None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
