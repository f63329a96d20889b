"""GPU memory for what a load needs only for a moment, apart from what stays.

torch's allocator cuts small tensors out of larger pieces that have been freed, and can not give a piece back of which
anything is in use. A file's bytes and what is computed on the way to a kernel's layout are as large as the weights themselves:
were these cut out of them, gigabytes would be lost between. So the short-lived ones have a pool of their own, which goes as
a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyspec.cuda.context import context_of


@contextmanager
def temporary(device: torch.device) -> Iterator[None]:
    """Tensors made inside lie apart; they are to be gone by `release`. What stays is allocated before, outside. Not nested."""
    context = context_of(device)
    if not context.is_gpu:
        yield
        return
    own = context.temporary.__dict__  # a pool takes what one thread allocates
    if "pool" not in own:
        with context.current():
            own["pool"] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(own["pool"], context.device.index):
        yield


def release(device: torch.device) -> None:
    """All that this thread's temporary tensors had is the device's again, and whatever else torch keeps of it unused."""
    context_of(device).temporary.__dict__.pop("pool", None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
