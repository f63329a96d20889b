"""Host memory that a GPU's kernels read and write themselves, for the few numbers that go to and fro in each round.

A copy by the driver keeps a GPU waiting before it and after: between two rounds 6 to 10 us each on an H100, where a kernel takes 2 and a launch's
hop (docs/log.md). What is large is better left to the driver.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

SMALL = 1 << 18  # bytes that a kernel copies


class Pinned:
    """`n` whole numbers of one type (what else there is comes as a view of them), zero at first, page-locked for a GPU's sake.

    here    [n]  for the host
    there   [n]  the same memory as a tensor of `device`; None where its kernels do not reach it, and the driver copies
    """

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # it is written inside and outside of that mode
            self.here = torch.zeros(n, dtype=dtype, pin_memory=is_gpu)
            self.there = _as_seen_by(device, self.here) if is_gpu and n and _reaches(device) else None

    def send(self, to: Tensor) -> None:
        """Start the copy of its first numbers, as many as `to`, of any shape, on the device takes."""
        n = to.numel()
        if self.there is not None and _is_small(to):
            torch.mul(self.there[:n].view(to.shape), 1, out=to)
        else:
            to.copy_(self.here[:n].view(to.shape), non_blocking=True)

    def fetch(self, x: Tensor) -> Tensor:
        """Start the copy of x, of any shape, from the device into its first numbers; returns those for the host, in x's shape."""
        n, here = x.numel(), self.here[: x.numel()].view(x.shape)
        if self.there is not None and _is_small(x):
            torch.mul(x, 1, out=self.there[:n].view(x.shape))
        else:
            here.copy_(x, non_blocking=True)
        return here


def _is_small(x: Tensor) -> bool:
    return x.numel() * x.element_size() <= SMALL


class _Array:
    """Tells torch where a tensor's numbers lie, and keeps them."""

    def __init__(self, x: Tensor) -> None:
        self.kept = x
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(x.shape),
            "typestr": x.numpy().dtype.str,
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def _as_seen_by(device: torch.device, x: Tensor) -> Tensor | None:
    """Page-locked x as a tensor of the device, in the same memory; None if torch makes no such thing."""
    try:
        seen = torch.as_tensor(_Array(x), device=device)
    except (RuntimeError, TypeError):
        return None
    return seen if seen.data_ptr() == x.data_ptr() else None


@cache
def _reaches(device: torch.device) -> bool:
    """Whether its kernels read what the host wrote into page-locked memory, and the other way round."""
    here = torch.arange(64, dtype=torch.int64).pin_memory()
    there = _as_seen_by(device, here)
    if there is None:
        return False
    there.add_(1)
    torch.cuda.synchronize(device)
    if not torch.equal(here, torch.arange(1, 65)):
        return False
    here.mul_(2)
    return torch.equal(there.cpu(), here)
