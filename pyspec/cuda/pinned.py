"""Host memory that a GPU reads and writes: pages that are locked and mapped where they lie."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from pyspec.cuda.context import context_of


def enter(device: torch.device) -> None:
    """Have the driver's calls of this thread go to the device. A thread of whose own torch has called nothing yet has no context."""
    from cuda.bindings import driver

    torch.cuda.init()
    _, found = driver.cuCtxGetCurrent()
    if not int(found):
        _, number = driver.cuDeviceGet(device.index)
        _, context = driver.cuDevicePrimaryCtxRetain(number)
        driver.cuCtxSetCurrent(context)


def register(address: int, n_bytes: int, device: torch.device) -> str:
    """Lock these bytes of the host, from `address` on, and map them for every GPU of the process. "" or, where that is not allowed, why not."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        return str(e)
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    with context_of(device).current():
        enter(device)
        (error,) = driver.cuMemHostRegister(address, n_bytes, flags)
    return "" if error == driver.CUresult.CUDA_SUCCESS else error.name


def unregister(address: int) -> None:
    """Undo `register`."""
    from cuda.bindings import driver

    driver.cuMemHostUnregister(address)


class PinnedPages(mmap.mmap):
    """Pages that are unlocked before they go back to the system: the driver keeps what goes back locked."""

    address = 0  # where they are registered; 0: they are not

    def __del__(self) -> None:
        with suppress(ImportError):  # the interpreter ends
            if self.address:
                unregister(self.address)
