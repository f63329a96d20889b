"""The state of a device that all engines of a process share: kernels, buffers of launches, the fault record, the lock.

Kernels, the lock and a load hold the context. It dies with the last engine on the device and frees its GPU memory, so no module of
`pyspec.cuda` keeps GPU tensors in a cache of its own; use `per_device`. Code stays loaded (`jit.compile_cubin`).

The CPU's context stays: it holds small tables only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch

Key = ParamSpec("Key")
Made = TypeVar("Made")


class GpuLock:
    """Lets one engine at a time launch on a GPU. Hold it while launching; `released` while waiting for the device or running the caller's code.

    Kernels of one process share buffers between launches (prepared rows, partial sums, tickets, the fault record), and a kernel that
    starts early relies on the wait of its predecessor in the stream. So no launch of another engine may come between the launches of
    a round.
    The thread that holds the lock has the device as its current one (`current` of the context, which lives as long as its locks).
    """

    def __init__(
        self,
        lock: threading.RLock | nullcontext[None],
        current: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.lock, self.current = lock, current
        self._entered: list[AbstractContextManager[object]] = []  # by the thread that holds the lock

    def __enter__(self) -> None:
        self.lock.__enter__()
        self._entered.append(self.current())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: object) -> None:
        self._entered.pop().__exit__(None, None, None)
        self.lock.__exit__(None, None, None)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let other threads launch. The caller must hold the lock exactly once."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class DeviceContext:
    """One device. Ask `context_of` for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.temporary = threading.local()  # a pool of memory for each thread (temporary.py)
        self.in_pool = threading.RLock()  # held within a pool, and while one is freed
        self.movable: Any = None  # a MovableMemory, of an engine that may be parked (movable.py)
        # A CPU's kernels share nothing
        self.lock = GpuLock(threading.RLock() if self.is_gpu else nullcontext(), self.current)
        self._made: dict[Hashable, object] = {}
        self._streams: dict[int, object] = {}
        self.wakes: list[Callable[[], None]] = []  # called before graphs that threads of the host serve
        self.copies: WeakSet[Any] = WeakSet()  # streams of copies; waited for before memory is freed

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def current(self) -> AbstractContextManager[object]:
        """To be within while something is allocated, loaded or launched here: torch and the driver ask the thread for its device."""
        return torch.cuda.device(self.device.index) if self.is_gpu else nullcontext()

    def outside(self) -> AbstractContextManager[None]:
        """To be within while something is allocated that does not move with a model."""
        return nullcontext() if self.movable is None else self.movable.within(None)

    def once(self, make: Callable[..., Made], *key: Hashable) -> Made:
        """make(device, *key), made at the first call with the device current, and kept here."""
        found = self._made.get((make, *key))
        if found is None:
            with self.current(), self.outside():  # other engines use it while a model is parked
                made = make(self.device, *key)
            # If two threads make it, both use the first
            found = self._made.setdefault((make, *key), made)
        return found  # type: ignore[return-value]  # of this key `make` gave it

    def stream(self) -> Any:
        """This thread's torch stream on the device, as an object of cuda.core; wrapped once, because wrapping takes microseconds."""
        handle = _current(self.device.index)
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = self._wrapped(handle)
        return found

    def _wrapped(self, handle: int) -> object:
        from cuda.core import Device

        with self.current():
            own = Device(self.device.index)
            own.set_current()
            return own.create_stream(_TorchStream(handle))


def _current(index: int | None) -> int:
    """The handle of the current stream. torch's own compiler gets it like this; making the object costs ten times as much."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


class _TorchStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


_living: WeakValueDictionary[torch.device, DeviceContext] = WeakValueDictionary()
_asking = threading.Lock()
_host = DeviceContext(torch.device("cpu"))


def context_of(device: torch.device) -> DeviceContext:
    """The device's living context, or a new one. A GPU without an index is the thread's current one."""
    if device.type != "cuda":
        return _host
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _asking:
        context = _living.get(device)
        if context is None:
            context = _living[device] = DeviceContext(device)
        return context


def gpu_lock(device: torch.device) -> GpuLock:
    """The device's lock."""
    return context_of(device).lock


def per_device(
    make: Callable[Concatenate[torch.device, Key], Made],
) -> Callable[Concatenate[torch.device, Key], Made]:
    """As functools.cache, for a function whose first argument is a device. The context owns the result and frees it."""

    @wraps(make)
    def made(device: torch.device, *key: Key.args, **named: Key.kwargs) -> Made:
        assert not named, "by position only: one key for one thing"
        return context_of(device).once(make, *key)

    return made
