"""A file's bytes to a device: threads read into pinned memory while the piece before is on its way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import numpy as np
import torch
from torch import Tensor

from pyspec.slots.mapped import mapped

PIECE = 64 << 20  # bytes under way at once
SMALL = 1 << 20  # below, one plain copy is as fast
N_BUFFER = 3
# (out [n] uint8, first): the n bytes from byte `first` on into `out`
Read = Callable[[np.ndarray, int], None]


class Upload:
    """Copies bytes to `device`. One thread reads a file at 2 to 5 GB/s; a GPU takes 50."""

    def __init__(self, device: torch.device, piece: int = PIECE, small: int = SMALL) -> None:
        self.device, self.piece, self.small = device, piece, small
        self.is_cuda = device.type == "cuda"
        self._buffers: list[Tensor] = []
        # When the device has read a buffer
        self._taken: list[torch.cuda.Event | None] = [None] * N_BUFFER
        self._readers: ThreadPoolExecutor | None = None
        self._at = 0

    def __call__(self, n_bytes: int, read: Read) -> Tensor:
        """[n] uint8 on the device; ordered with the work on its current stream."""
        if n_bytes <= self.small or not self.is_cuda:
            whole = mapped(n_bytes, huge=True)
            read(whole.numpy(), 0)
            return whole.to(self.device)
        out = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        self.pieces(read, out)
        return out

    def pieces(self, read: Read, out: Tensor) -> None:
        """All bytes into out [n], piece by piece."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(8, cpu_count() or 1), "upload")
            self._buffers = [
                torch.empty(self.piece, dtype=torch.uint8, pin_memory=self.is_cuda) for _ in self._taken
            ]
        n = out.numel()
        for first in range(0, n, self.piece):
            buffer, taken = self._buffers[self._at][: min(self.piece, n - first)], self._taken[self._at]
            if taken is not None:
                taken.synchronize()
            self._read(read, buffer.numpy(), first)
            out[first : first + buffer.numel()].copy_(buffer, non_blocking=True)
            if self.is_cuda:
                self._taken[self._at] = event = torch.cuda.Event()
                event.record()
            self._at = (self._at + 1) % N_BUFFER

    def _read(self, read: Read, to: np.ndarray, first: int) -> None:
        assert self._readers is not None
        step = -(-to.size // 8)
        list(self._readers.map(lambda at: read(to[at : at + step], first + at), range(0, to.size, step)))
