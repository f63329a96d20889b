"""A file's bytes in host memory, where a CPU multiplies with them and a GPU fetches them."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import torch
from torch import Tensor

from pyspec.cuda import pinned
from pyspec.cuda.pinned import PinnedPages
from pyspec.errors import DeviceError
from pyspec.heap import pages_of
from pyspec.models.upload import Read

log = logging.getLogger(__name__)

PART = 32 << 20  # bytes that one thread reads at once


class HostBytes:
    """Brings tensors' bytes into memory of their own: huge pages where the system has them, locked and mapped for `device` if that is a GPU.

    Where locking is not allowed (a limit of locked memory, WSL) the memory stays pageable, a warning says so once, and copies to the GPU go
    through a buffer.

    is_pinned  all tensors so far are locked; False on a CPU
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_pinned = device, device.type == "cuda"
        self._readers: ThreadPoolExecutor | None = None

    def of(self, n_bytes: int, read: Read) -> Tensor:
        """[n_bytes] uint8 on the host, filled by `read`, which several threads call at once: each byte of the file is read once.
        Raises OSError if the system has no more mappings."""
        pages = pages_of(PinnedPages, max(n_bytes, 1), huge=True)
        whole = torch.frombuffer(pages, dtype=torch.uint8)[:n_bytes]
        if self._readers is None:
            self._readers = ThreadPoolExecutor(min(8, cpu_count() or 1), "host-bytes")
        out = whole.numpy()
        parts = range(0, n_bytes, PART)
        list(self._readers.map(lambda at: read(out[at : at + PART], at), parts))
        if self.is_pinned:
            self._pin(pages, whole)
        return whole

    def on_device(self, host: Tensor, name: str) -> Tensor:
        """Memory that `of` gave, for kernels of the device, which read it where it lies. name: of the tensor
        Raises DeviceError if it could not be locked."""
        if self.device.type != "cuda":
            return host
        if not self.is_pinned:
            raise DeviceError(
                f"host memory can not be locked for the GPU, which reads rows of {name} there: `ulimit -l unlimited` allows it, and -ot {name}=CUDA0 "
                "keeps the table on the GPU"
            )
        return pinned.on_device(host, self.device)

    def _pin(self, pages: PinnedPages, whole: Tensor) -> None:
        """After the read, which is when the system gives it pages."""
        why = pinned.register(whole.data_ptr(), len(pages), self.device)
        if not why:
            pages.address = whole.data_ptr()
            return
        self.is_pinned = False
        log.warning(
            "host memory can not be locked for the GPU (%s): experts are copied there through a buffer, which is slower; `ulimit -l unlimited` allows it",
            why,
        )
