"""Calls of the C++ kernels. A call runs at once, or is only put on the tape of this thread's recording.

A kernel takes one block of arguments, eight bytes each: addresses and whole numbers ("q"), and f64 numbers ("d"). `CpuKernel("name", "qqd")`
packs them; native/NAME.cpp reads them as a struct in the same order.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pyspec.cpu.build import NO_COMPILER, CannotBuild, build, compiler, find, isas, sets
from pyspec.heap import own_pages

log = logging.getLogger(__name__)

# Bytes of an output that the C library may give back to the system, page by page, as soon as it is free
LARGE = 4 << 20


@cache
def compiled() -> ctypes.CDLL | str:
    """The library for this CPU, compiled if it has to be; or the reason why there is none."""
    isa = isas()[0]
    try:
        return _opened(str(find(isa) or build(isa)))
    except (CannotBuild, OSError) as e:
        log.warning(
            "CPU kernels cannot be built: %s; torch runs in their place, several times slower", e
        )
        return f"cannot be built: {e}"


def _opened(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.pyspec_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64]
    lib.pyspec_replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    lib.pyspec_run.restype = lib.pyspec_replay.restype = None
    lib.pyspec_isa.restype = ctypes.c_char_p
    return lib


class _Planning(threading.local):
    on: bool = False


_planning = _Planning()


@contextmanager
def planning() -> Iterator[None]:
    """Within the block this thread compiles nothing: where there is no library yet, kernels are those that a load would compile."""
    before, _planning.on = _planning.on, True
    try:
        yield
    finally:
        _planning.on = before


def is_foretold() -> bool:
    """Whether kernels are planned with that can not be called, because no library has been compiled."""
    return _planning.on and not any(map(find, sets()))


def missing() -> str | None:
    """Why there are no CPU kernels; None if there are."""
    if is_foretold():
        return None if compiler() else NO_COMPILER
    found = compiled()
    return found if isinstance(found, str) else None


def described() -> str:
    """The build that runs here, or why there is none."""
    found = compiled()
    return f"none: {found}" if isinstance(found, str) else found.pyspec_isa().decode()


class GivesMemory(Protocol):
    """Where a recording takes memory from."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def owns(self, x: Tensor) -> bool: ...


class Tape:
    """Calls in order. `replay` runs them again over the same memory, with the arguments of the recording.

    kept  tensors that the calls read and that are not of the pool: weights, fields of the batch, states
    """

    def __init__(self, pool: GivesMemory) -> None:
        self.pool = pool
        self.calls: list[tuple[int, bytes]] = []
        self.kept: dict[int, Tensor] = {}
        self._steps: Any = None

    def add(self, kernel: int, packed: bytes, args: tuple[object, ...]) -> None:
        self.calls.append((kernel, packed))
        for x in args:
            if isinstance(x, Tensor) and not self.pool.owns(x):
                self.kept[x.data_ptr()] = x

    def seal(self) -> None:
        """Make the list that the library walks."""
        flat = [
            x
            for kernel, packed in self.calls
            for x in (kernel, ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value)
        ]
        self._steps = (ctypes.c_void_p * len(flat))(*flat)

    def replay(self) -> None:
        lib = compiled()
        assert isinstance(lib, ctypes.CDLL), "a tape has calls of its kernels"
        lib.pyspec_replay(self._steps, len(self.calls), n_thread())


class _Recording(threading.local):
    """kept: memory of large outputs that are gone, for the next ones: the system takes longer to make 20 MiB of new pages than 32 threads to
    write them. It goes back while the engine rests."""

    tape: Tape | None = None
    n_first: int = 0  # recordings of shapes that were new

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []


here = _Recording()


class _Threads(threading.local):
    n = 0


_threads = _Threads()


def n_thread() -> int:
    """Threads of a kernel's call: torch's number on this thread, or that before `torch_alone`."""
    return _threads.n or torch.get_num_threads()


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Within the block kernels run on so many threads."""
    kept, _threads.n = _threads.n, n
    try:
        yield
    finally:
        _threads.n = kept


@contextmanager
def torch_alone() -> Iterator[None]:
    """Within the block torch's ops run on this thread alone, and kernels on as many threads as before.

    For small ops while other programs need the cores: torch's threads spin for each other, and a load took five times as long.
    """
    before = torch.get_num_threads()
    with threads(n_thread()):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class CpuKernel:
    """A kernel of the library: kernel(*args) in the order of `args`, tensors by their address (None: 0)."""

    def __init__(self, name: str, args: str) -> None:
        self.name, self.layout = name, struct.Struct("<" + args)

    @cached_property
    def address(self) -> int:
        lib = compiled()
        assert isinstance(lib, ctypes.CDLL), f"{self.name}: {lib}"
        self._run = lib.pyspec_run
        found = ctypes.cast(getattr(lib, self.name), ctypes.c_void_p).value
        assert found is not None
        return found

    def packed(self, *args: Tensor | float | None) -> bytes:
        """The block of arguments."""
        return self.layout.pack(*[a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in args])

    def __call__(self, *args: Tensor | float | None) -> None:
        address, packed = self.address, self.packed(*args)
        if here.tape is not None:
            here.tape.add(address, packed, args)
            return
        self._run(address, packed, n_thread())


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """New memory for a kernel's output, from the pool of a recording where one runs."""
    if here.tape is not None:
        return here.tape.pool.empty(shape, dtype)
    n_byte = prod(shape) * dtype.itemsize
    return torch.empty(shape, dtype=dtype) if n_byte < LARGE else _large(n_byte).view(dtype).view(shape)


def _large(n_byte: int) -> Tensor:
    """[n_byte] uint8, of the smallest kept piece that has them, or of a new one in place of one that is too small."""
    kept = here.kept
    kept.sort(key=len)
    at = next((i for i, piece in enumerate(kept) if len(piece) >= n_byte), None)
    if at is None:
        del kept[-1:]
        piece = np.frombuffer(own_pages(n_byte, huge=True), np.uint8)
    else:
        piece = kept.pop(at)
    handed = piece[:n_byte]
    # Torch keeps it while it keeps the memory
    weakref.finalize(handed, kept.append, piece).atexit = False
    return torch.from_numpy(handed)
