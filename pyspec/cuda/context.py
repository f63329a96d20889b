"""What a device has once, however many engines use it: kernels, buffers that launches share, the record of faults, the lock.

A context lives as long as somebody holds it: kernels, the lock and a load do. So what it holds of a GPU's memory goes with the
last engine there, and nothing in `pyspec.cuda` holds tensors of a GPU in a cache of its own (`per_device` is for that). Code
stays loaded (`jit.compile_cubin`).

The CPU's context stays: it holds small tables only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from pyspec.cuda.gpu_lock import GpuLock

Key = ParamSpec("Key")
Made = TypeVar("Made")


class DeviceContext:
    """One device. Ask `context_of` for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.temporary = threading.local()  # a pool of memory for each thread (temporary.py)
        self.lock = GpuLock(
            threading.RLock() if self.is_gpu else nullcontext(), self.current
        )  # a CPU's kernels share nothing
        self._made: dict[Hashable, object] = {}
        self._streams: dict[int, object] = {}

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def current(self) -> AbstractContextManager[object]:
        """To be within while something is allocated, loaded or launched here: torch and the driver ask the thread for its device."""
        return torch.cuda.device(self.device.index) if self.is_gpu else nullcontext()

    def once(self, make: Callable[..., Made], *key: Hashable) -> Made:
        """make(device, *key), made at the first call with the device current, and kept here."""
        found = self._made.get((make, *key))
        if found is None:
            with self.current():
                made = make(self.device, *key)
            found = self._made.setdefault((make, *key), made)  # of two threads the first one's is everybody's
        return found  # type: ignore[return-value]  # of this key `make` gave it

    def stream(self) -> Any:
        """torch's stream of this thread and device as cuda.core wants it; wrapped once, because wrapping costs microseconds."""
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
    """The handle of the stream. torch's own compiler asks for it like this, at a tenth of what making the object costs."""
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
    """The device's lock: see gpu_lock.py."""
    return context_of(device).lock


def per_device(
    make: Callable[Concatenate[torch.device, Key], Made],
) -> Callable[Concatenate[torch.device, Key], Made]:
    """As functools.cache, for a function of a device and more; what it makes is the context's, and goes with it."""

    @wraps(make)
    def made(device: torch.device, *key: Key.args, **named: Key.kwargs) -> Made:
        assert not named, "by position only: one key for one thing"
        return context_of(device).once(make, *key)

    return made
