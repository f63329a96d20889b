"""Memory that leaves its addresses and comes back, over a driver that keeps it in this process. It shows the order of calls and what a failure
leaves; that graphs stay valid is a matter of a GPU."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pyspec.cuda.context import DeviceContext
from pyspec.cuda.movable import EMPTIED, KEPT, MovableMemory
from pyspec.errors import DeviceError, DoesNotFit

GRANULE = 2 << 20


@dataclass
class FakeDriver:
    """Memory with a limit. Addresses mean something only while memory is behind them."""

    room: int
    n_next: int = 1 << 40
    reserved: dict[int, int] = field(default_factory=dict)
    handles: dict[int, mmap.mmap] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)  # handle by address
    fails_map: int = 0  # at the map after so many
    n_copied: int = 0
    under_way: list = field(default_factory=list)

    def granularity(self) -> int:
        return GRANULE

    def reserve(self, n_bytes: int) -> int:
        self.n_next += 1 << 30
        self.reserved[self.n_next] = n_bytes
        return self.n_next

    def create(self, n_bytes: int) -> int:
        if sum(len(memory) for memory in self.handles.values()) + n_bytes > self.room:
            raise DoesNotFit("no memory")
        handle = len(self.handles) + int(time.monotonic_ns())
        self.handles[handle] = mmap.mmap(-1, n_bytes)
        self.handles[handle][:8] = b"rubbish!"
        return handle

    def map(self, address: int, n_bytes: int, handle: int) -> None:
        assert address not in self.behind and self.reserved[address] == n_bytes
        if self.fails_map and len(self.behind) >= self.fails_map:
            raise DeviceError("planted")
        self.behind[address] = handle

    def unmap(self, address: int, n_bytes: int, handle: int) -> None:
        assert not self.under_way and self.behind.pop(address) == handle
        del self.handles[handle]

    def release(self, handle: int) -> None:
        del self.handles[handle]

    def free(self, address: int, n_bytes: int) -> None:
        assert address not in self.behind and self.reserved.pop(address) == n_bytes

    def to_host(self, host: int, address: int, n_bytes: int) -> None:
        memory = self.handles[self.behind[address]]
        self.under_way.append(lambda: ctypes.memmove(host, memory[:n_bytes], n_bytes))
        self.n_copied += n_bytes

    def to_device(self, address: int, host: int, n_bytes: int) -> None:
        memory = self.handles[self.behind[address]]
        self.under_way.append(
            lambda: memory.__setitem__(slice(0, n_bytes), ctypes.string_at(host, n_bytes))
        )
        self.n_copied += n_bytes

    def zero(self, address: int, n_bytes: int) -> None:
        self.handles[self.behind[address]][:n_bytes] = bytes(n_bytes)

    def synchronize(self) -> None:
        while self.under_way:
            self.under_way.pop(0)()

    def register(self, address: int, n_bytes: int) -> str:
        return "not in a test"

    def content(self, address: int) -> bytes:
        return self.handles[self.behind[address]][:]


def filled(room: int = 64 << 20) -> tuple[MovableMemory, FakeDriver, dict[str, int]]:
    driver = FakeDriver(room)
    memory = MovableMemory(torch.device("cuda", 0), driver)
    at = {name: memory.table.allocate(n, kind) for name, n, kind in
          (("w1", 3 << 20, KEPT), ("w2", 777, KEPT), ("kv", 5 << 20, EMPTIED))}  # fmt: skip
    for i, address in enumerate(at.values()):
        held = driver.handles[driver.behind[address]]
        held[:] = bytes([i + 1]) * len(held)
    return memory, driver, at


def test_weights_come_back_where_they_were_and_slots_are_empty() -> None:
    memory, driver, at = filled()
    for _ in range(3):
        assert memory.park() == 12 << 20, "whole granules"
        assert not driver.handles and set(at.values()) == set(driver.reserved)
        memory.wake()
        assert driver.content(at["w1"]) == b"\1" * (4 << 20)
        assert driver.content(at["w2"]) == b"\2" * GRANULE
        assert driver.content(at["kv"]) == bytes(6 << 20)
        assert all(piece.host is None for piece in memory.pieces.values())
    assert driver.n_copied == 3 * 2 * (6 << 20), "a wake is one copy of the weights, and nothing else"


def test_a_wake_without_memory_leaves_all_parked() -> None:
    memory, driver, at = filled()
    memory.park()
    driver.room = 5 << 20
    with pytest.raises(DoesNotFit):
        memory.wake()
    assert not driver.handles and not driver.behind
    driver.room, driver.fails_map = 64 << 20, 2
    with pytest.raises(DeviceError):
        memory.wake()
    assert not driver.handles and not driver.behind
    driver.fails_map = 0
    memory.wake()
    assert driver.content(at["w1"])[:3] == b"\1\1\1"


def test_a_park_without_host_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, driver, at = filled()

    def none(*args: object, **more: object) -> None:
        raise OSError("no more mappings")

    monkeypatch.setattr("pyspec.cuda.movable.pages_of", none)
    with pytest.raises(DoesNotFit, match="no memory to park"):
        memory.park()
    assert driver.content(at["kv"])[:2] == b"\3\3" and all(
        p.host is None for p in memory.pieces.values()
    )


def test_pieces_are_given_back_also_while_they_are_parked() -> None:
    memory, driver, at = filled()
    memory.table.free(at["w2"])
    memory.park()
    memory.table.free(at["kv"])
    memory.wake()
    memory.table.free(at["w1"])
    assert not driver.reserved and not driver.handles and not memory.pieces
    assert memory.table.allocate(65 << 20, KEPT) == 0 and not driver.reserved, (
        "torch hears of too little memory"
    )


DRIVER = ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute",
          "cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease",
          "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async",
          "cuCtxSynchronize", "cuMemHostRegister", "cuMemHostUnregister")  # fmt: skip


@dataclass
class Library:
    """In place of the driver's library: which calls came, in order, on which threads' contexts, and which of them fail."""

    names: type
    fails: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    bound: set[int] = field(default_factory=set)
    without: list[str] = field(default_factory=list)
    can_move: int = 1

    def call(self, name: str, *given: object) -> tuple[object, ...]:
        thread, codes = threading.get_ident(), self.names
        if name == "cuCtxGetCurrent":
            return codes.CUDA_SUCCESS, 7 if thread in self.bound else 0
        self.calls.append(name)
        if name == "cuCtxSetCurrent":
            self.bound.add(thread)
        elif name not in ("cuDeviceGet", "cuDevicePrimaryCtxRetain") and thread not in self.bound:
            self.without.append(name)
        if name in self.fails:
            return (getattr(codes, self.fails[name]), None)
        found = {"cuMemGetAllocationGranularity": GRANULE, "cuMemAddressReserve": 1 << 40, "cuMemCreate": 5,
                 "cuDeviceGet": 0, "cuDevicePrimaryCtxRetain": 7, "cuDeviceGetAttribute": self.can_move}  # fmt: skip
        return (codes.CUDA_SUCCESS, found[name]) if name in found else (codes.CUDA_SUCCESS,)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    driver = pytest.importorskip("cuda.bindings.driver")
    found = Library(driver.CUresult)
    for name in DRIVER:
        monkeypatch.setattr(driver, name, partial(found.call, name))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return found


def test_every_call_of_the_driver_has_a_context_on_any_thread(library: Library) -> None:
    memory = MovableMemory(torch.device("cuda", 0))
    threads = [
        threading.Thread(target=memory.table.allocate, args=(3 << 20, kind)) for kind in (KEPT, EMPTIED)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    address = next(iter(memory.pieces))
    memory.driver.to_host(0, address, 8)
    memory.driver.zero(address, 8)
    memory.driver.synchronize()
    end = threading.Thread(target=memory.table.free, args=(address,))
    end.start()
    end.join()
    assert not library.without and not memory.pieces
    assert library.calls[-3:] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


def test_a_piece_that_can_not_be_accessed_leaves_nothing_behind(library: Library) -> None:
    memory = MovableMemory(torch.device("cuda", 0))
    library.fails = {"cuMemSetAccess": "CUDA_ERROR_NOT_SUPPORTED"}
    assert memory.table.allocate(1, KEPT) == 0 and not memory.pieces
    assert library.calls[-6:] == [
        "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree",
    ]  # fmt: skip
    library.fails = {"cuMemCreate": "CUDA_ERROR_OUT_OF_MEMORY"}
    assert memory.table.allocate(1, KEPT) == 0
    assert library.calls[-2:] == ["cuMemCreate", "cuMemAddressFree"]


def test_a_device_without_movable_memory_is_told(library: Library) -> None:
    library.can_move = 0
    with pytest.raises(DeviceError, match="can be moved"):
        MovableMemory(torch.device("cuda", 0))


def test_what_is_kept_is_a_copy_in_pages_of_its_own() -> None:
    memory = filled()[0]
    for dtype in (torch.float16, torch.int8, torch.float32):
        one = torch.arange(77).to(dtype).view(7, 11)
        copy = memory.keep(one[::2])
        one += 1
        assert copy.equal(torch.arange(77).to(dtype).view(7, 11)[::2]) and copy.dtype is dtype


def test_what_engines_share_stays_when_a_model_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets of kernels lay among the weights of the engine that was loaded first: when it was parked, the next one's launches failed."""
    context = DeviceContext(torch.device("cpu"))
    context.movable = MovableMemory(torch.device("cpu"), FakeDriver(1 << 30))
    within: list[str] = []

    @contextmanager
    def using(kind: str) -> Iterator[None]:
        within.append(kind)
        yield
        within.remove(kind)

    monkeypatch.setattr(context.movable, "_using", using)
    with context.movable.within(KEPT):
        assert context.once(lambda device: tuple(within)) == ()
        assert within == [KEPT], "and weights go on"
