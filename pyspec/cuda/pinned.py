"""Host memory that a GPU reads and writes: pages that are locked and mapped where they lie."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from pyspec.cuda.context import context_of
from pyspec.errors import DeviceError

POPULATE = 23  # MADV_POPULATE_WRITE, which `mmap` has no name for
PART = 64 << 20  # bytes that one thread asks for at once


def enter(device: torch.device) -> None:
    """Have the driver's calls of this thread go to the device. A thread of whose own torch has called nothing yet has no context."""
    from cuda.bindings import driver

    torch.cuda.init()
    _, found = driver.cuCtxGetCurrent()
    if not int(found):
        _, number = driver.cuDeviceGet(device.index)
        _, context = driver.cuDevicePrimaryCtxRetain(number)
        driver.cuCtxSetCurrent(context)


def take_memory(areas: Iterable[tuple[int, int]], n_thread: int) -> None:
    """Have the system put memory behind pages now, by several threads: one thread waits for it longer than for a copy from a GPU. A system that can not be
    asked (Linux before 5.14) does it as they are written. Raises MemoryError if it has not as much.

    areas: (address, bytes) of whole pages
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def take(part: tuple[int, int]) -> int:
        ctypes.set_errno(0)
        libc.madvise(ctypes.c_void_p(part[0]), ctypes.c_size_t(part[1]), POPULATE)
        return ctypes.get_errno()

    parts = [(at + i, min(PART, n - i)) for at, n in areas for i in range(0, n, PART)]
    with ThreadPoolExecutor(n_thread, "pyspec-pages") as pool:
        if errno.ENOMEM in set(pool.map(take, parts)):
            raise MemoryError("the system has no memory for new pages")


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


class _Lent:
    """Registered memory in the words by which torch takes another library's memory of a GPU. host: kept as long as it is used"""

    def __init__(self, host: Tensor, address: int) -> None:
        self.host = host
        shape, data = tuple(host.shape), (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 2}


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """The same bytes as a tensor of the GPU, whose kernels read them over the link. host: contiguous uint8 in registered memory. Raises DeviceError if it is
    not registered there."""
    from cuda.bindings import driver

    with context_of(device).current():
        enter(device)
        error, address = driver.cuMemHostGetDevicePointer(host.data_ptr(), 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{device} can not read host memory: {error.name}")
        # torch asks the driver for the device of an address; another one would mean a copy
        made = torch.as_tensor(_Lent(host, int(address)), device=device)
    assert made.data_ptr() == int(address)
    return made


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
