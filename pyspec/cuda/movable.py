"""GPU memory that can leave its addresses and come back to them, so that a parked model's CUDA graphs and launches stay valid.

torch's allocator gets pieces of it from here: addresses that are reserved for good, with memory of the driver behind them. To park copies the
pieces of weights to locked pages of the host and takes the memory from behind all addresses; to wake puts new memory there and copies back,
which a link does at its rate. Weights are copied as the kernels have them, so nothing is converted.

What was allocated elsewhere stays on the GPU: graphs with their results, workspaces, the context of the process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyspec.cache import n_cores
from pyspec.cuda import pinned
from pyspec.cuda.context import context_of
from pyspec.cuda.pinned import PinnedPages, take_memory
from pyspec.errors import DeviceError, DoesNotFit
from pyspec.heap import pages_of
from pyspec.slots.mapped import of_pages

log = logging.getLogger(__name__)

KEPT, EMPTIED = "kept", "emptied"
"""Kinds of memory: its content survives a park (weights); or it is zero after a wake, as after a load (slots)."""
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(eq=False)
class MappedPiece:
    """Reserved addresses. handle: of the memory behind them, None while there is none; host: their content meanwhile"""

    address: int
    n_bytes: int
    kind: str
    handle: Any
    host: PinnedPages | None = None


class Driver:
    """The driver's calls for one GPU, from any thread. Every method but `register` raises DeviceError, `create` DoesNotFit where memory is short."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self.device = driver, device
        with_pages = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._done(self.api.cuDeviceGetAttribute(with_pages, device.index)):
            raise DeviceError(f"{device} has no memory that can be moved")
        self.prop = driver.CUmemAllocationProp()
        self.prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.prop.location.id = device.index
        self.access = driver.CUmemAccessDesc()
        self.access.location = self.prop.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    @property
    def api(self) -> Any:
        """The driver, for this thread: torch's allocator may be the first that calls it there."""
        pinned.enter(self.device)
        return self._driver

    def _done(self, result: tuple[Any, ...]) -> Any:
        codes = self._driver.CUresult
        if result[0] == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise DoesNotFit(f"{self.device} has no memory for a piece of a model")
        if result[0] != codes.CUDA_SUCCESS:
            raise DeviceError(f"memory of {self.device} can not be moved: {result[0].name}")
        return result[1] if len(result) > 1 else None

    def granularity(self) -> int:
        """Bytes of which pieces are multiples."""
        least = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._done(self.api.cuMemGetAllocationGranularity(self.prop, least)))

    def reserve(self, n_bytes: int) -> int:
        """Addresses with nothing behind them."""
        return int(self._done(self.api.cuMemAddressReserve(n_bytes, 0, 0, 0)))

    def create(self, n_bytes: int) -> Any:
        """Memory."""
        return self._done(self.api.cuMemCreate(n_bytes, self.prop, 0))

    def map(self, address: int, n_bytes: int, handle: Any) -> None:
        """Put memory behind addresses; nothing is behind them if that fails."""
        self._done(self.api.cuMemMap(address, n_bytes, 0, handle, 0))
        try:
            self._done(self.api.cuMemSetAccess(address, n_bytes, [self.access], 1))
        except BaseException:
            self.api.cuMemUnmap(address, n_bytes)
            raise

    def unmap(self, address: int, n_bytes: int, handle: Any) -> None:
        """Take the memory away, and give it back."""
        self._done(self.api.cuMemUnmap(address, n_bytes))
        self._done(self.api.cuMemRelease(handle))

    def release(self, handle: Any) -> None:
        """Give memory back that is behind no addresses."""
        self._done(self.api.cuMemRelease(handle))

    def free(self, address: int, n_bytes: int) -> None:
        """Give addresses back."""
        self._done(self.api.cuMemAddressFree(address, n_bytes))

    def to_host(self, host: int, address: int, n_bytes: int) -> None:
        """Begin a copy."""
        self._done(self.api.cuMemcpyDtoHAsync(host, address, n_bytes, self._stream))

    def to_device(self, address: int, host: int, n_bytes: int) -> None:
        """Begin a copy."""
        self._done(self.api.cuMemcpyHtoDAsync(address, host, n_bytes, self._stream))

    def zero(self, address: int, n_bytes: int) -> None:
        """Begin to write zeros."""
        self._done(self.api.cuMemsetD8Async(address, 0, n_bytes, self._stream))

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""
        self._done(self.api.cuCtxSynchronize())

    @property
    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def register(self, address: int, n_bytes: int) -> str:
        """Lock pages of the host. "" or, where that is not allowed, why not: copies are slower then."""
        return pinned.register(address, n_bytes, self.device)


class PieceTable:
    """The pieces of one device by address. torch's allocator calls it on any thread, and may do so for longer than an engine lives."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.pieces = driver, dict[int, MappedPiece]()
        self._granule = driver.granularity()

    def allocate(self, n_bytes: int, kind: str) -> int:
        """The address of a new piece; 0 if memory is short."""
        n_bytes = -(-n_bytes // self._granule) * self._granule
        try:
            address = self.driver.reserve(n_bytes)
            try:
                handle = self.mapped(address, n_bytes)
            except BaseException:
                self.driver.free(address, n_bytes)
                raise
        except (DoesNotFit, DeviceError) as e:
            log.log(logging.DEBUG if isinstance(e, DoesNotFit) else logging.ERROR, "%s", e)
            return 0
        self.pieces[address] = MappedPiece(address, n_bytes, kind, handle)
        return int(address)

    def free(self, address: int) -> None:
        """Give a piece back."""
        piece = self.pieces.pop(address)
        if piece.handle is not None:
            self.driver.unmap(address, piece.n_bytes, piece.handle)
        self.driver.free(address, piece.n_bytes)

    def mapped(self, address: int, n_bytes: int) -> Any:
        """The handle of new memory behind addresses."""
        handle = self.driver.create(n_bytes)
        try:
            self.driver.map(address, n_bytes, handle)
        except BaseException:
            self.driver.release(handle)
            raise
        return handle


class MovableMemory:
    """All pieces of one model on a device. Allocations come on any thread; `park` and `wake` while nothing runs.

    driver  its calls; None: the device's own
    """

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self.device, self.driver = device, driver or Driver(device)
        self.table = PieceTable(self.driver)
        self._pools: dict[str, Any] = {}
        self._refused = ""  # why pages of the host could not be locked
        self._own = (
            threading.local()
        )  # the kind that a thread is within: `entered`, and how to leave it: `stack`

    # -- for torch's allocator ---------------------------------------------------------------------------------------

    @property
    def pieces(self) -> dict[int, MappedPiece]:
        """All pieces, by address."""
        return self.table.pieces

    @contextmanager
    def within(self, kind: str | None) -> Iterator[None]:
        """What this thread allocates inside is of a kind; None: of torch's own. May be nested: the innermost counts."""
        outer = getattr(self._own, "entered", None)
        self._enter(kind)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, kind: str | None) -> None:
        """torch has pools that can not be nested, so the one before is left."""
        if (stack := getattr(self._own, "stack", None)) is not None:
            stack.close()
        self._own.entered, self._own.stack = kind, None
        if kind is not None:
            self._own.stack = ExitStack()
            self._own.stack.enter_context(self._using(kind))

    def _using(self, kind: str) -> AbstractContextManager[None]:
        if kind not in self._pools:
            _allow_python()
            table = self.table
            allocate = _ALLOCATE(lambda n_bytes, device, stream: table.allocate(n_bytes, kind) or None)
            free = _FREE(lambda address, n_bytes, device, stream: table.free(address))
            for called in (allocate, free):  # torch may call them until the process ends
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(called))
            at = [ctypes.cast(of, ctypes.c_void_p).value or 0 for of in (allocate, free)]
            self._pools[kind] = torch.cuda.MemPool(torch._C._cuda_customAllocator(*at))
        return torch.cuda.use_mem_pool(self._pools[kind], self.device.index)

    # -- moves -------------------------------------------------------------------------------------------------------

    def park(self) -> int:
        """Take all memory away; weights are copied to the host first. Returns the bytes that are free now. Raises DoesNotFit if the host has no room:
        all is as before."""
        self.driver.synchronize()
        own = [piece for piece in self.pieces.values() if piece.handle is not None]
        kept = [piece for piece in own if piece.kind == KEPT]
        try:
            for piece in kept:
                piece.host = pages_of(PinnedPages, piece.n_bytes, huge=True)
            take_memory([(_address(piece.host), piece.n_bytes) for piece in kept], min(8, n_cores()))
            for piece in kept:
                self._lock(piece.host)
                self.driver.to_host(_address(piece.host), piece.address, piece.n_bytes)
            self.driver.synchronize()
        except BaseException as e:
            self.driver.synchronize()
            for piece in own:
                piece.host = None
            if isinstance(e, OSError | MemoryError):
                raise DoesNotFit(f"the host has no memory to park a model: {e}") from e
            raise
        if self._refused:
            log.warning(
                "host memory can not be locked for the GPU (%s): a parked model wakes more slowly",
                self._refused,
            )
            self._refused = ""
        for piece in own:
            self.driver.unmap(piece.address, piece.n_bytes, piece.handle)
            piece.handle = None
        return sum(piece.n_bytes for piece in own)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in locked pages of the host. Raises OSError or MemoryError if the host has no room."""
        pages = pages_of(PinnedPages, tensor.nbytes, huge=True)
        self._lock(pages)
        return of_pages(pages).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _lock(self, pages: PinnedPages | None) -> None:
        assert pages is not None
        if why := self.driver.register(at := _address(pages), len(pages)):
            self._refused = why
        else:
            pages.address = at

    def wake(self) -> None:
        """Put memory behind all addresses again, with what was there before; zeros in place of slots' content. Raises DoesNotFit if it is taken: all is
        as before."""
        away = [piece for piece in self.pieces.values() if piece.handle is None]
        try:
            for piece in away:
                piece.handle = self.table.mapped(piece.address, piece.n_bytes)
        except BaseException:
            for piece in away:
                if piece.handle is not None:
                    self.driver.unmap(piece.address, piece.n_bytes, piece.handle)
                    piece.handle = None
            raise
        for piece in away:
            if piece.host is None:
                self.driver.zero(piece.address, piece.n_bytes)
            else:
                self.driver.to_device(piece.address, _address(piece.host), piece.n_bytes)
        self.driver.synchronize()
        held = [piece.host for piece in away]
        for piece in away:
            piece.host = None
        unlock(held)


def unlock(held: list[Any]) -> None:
    """Give back what is held in locked pages, and empty the list. That takes as long as the copies did, and nobody waits for it."""
    threading.Thread(target=held.clear, name="pyspec-unlock", daemon=True).start()


def _allow_python() -> None:
    """Have torch's allocator let its lock go while it calls us: a thread that has Python's lock may wait for it to free a tensor."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    with suppress(AttributeError, RuntimeError):  # a torch without it: that thread is seldom there
        torch._C._accelerator_setAllocatorSettings(
            ",".join(filter(None, (given, "release_lock_on_cudamalloc:True")))
        )


def movable(device: torch.device, kind: str) -> AbstractContextManager[None]:
    """`MovableMemory.within` of the device; nothing where it has no such memory."""
    found = context_of(device).movable if device.type == "cuda" else None
    return nullcontext() if found is None else found.within(kind)


def _address(pages: PinnedPages | None) -> int:
    assert pages is not None
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))
