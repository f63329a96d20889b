"""A pool of GPU memory for the short-lived tensors of a load.

torch's allocator cuts small tensors out of larger pieces that have been freed, and can not give back a piece while any part of it is
in use. A file's bytes and the intermediate layouts are as large as the weights themselves. If weights were cut out of their pieces,
gigabytes would be lost between. So the short-lived tensors have a pool of their own, which is freed as a whole.

torch ends the process if a pool is freed while any thread is within another one, or captures a graph. So they take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyspec.cuda.context import context_of


@contextmanager
def temporary(device: torch.device) -> Iterator[None]:
    """Tensors made inside come from the pool and must be freed before `release`. Allocate lasting tensors outside. Not nested."""
    context = context_of(device)
    if not context.is_gpu:
        yield
        return
    own = context.temporary.__dict__  # a pool serves one thread
    if "pool" not in own:
        with context.current():
            own["pool"] = torch.cuda.MemPool()
    with context.in_pool, context.outside(), torch.cuda.use_mem_pool(own["pool"], context.device.index):
        yield


def release(device: torch.device) -> None:
    """Give the memory of this thread's temporary tensors back to the device, and all unused memory that torch keeps."""
    context = context_of(device)
    with context.lock, context.in_pool, context.outside():  # graphs are captured with the first
        context.temporary.__dict__.pop("pool", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
