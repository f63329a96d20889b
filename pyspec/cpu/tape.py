"""Recordings: the calls of a forward, replayed as one native call over the same memory.

While a recording runs, `kernels.empty` takes memory from a pool that is the recording's own. Memory that the forward lets go of serves its
later calls again, as it will in each replay. A forward can be recorded if nothing but kernels computes: a torch operation that reads or
writes values would not be replayed, so it ends the recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyspec.cpu.kernels import Tape, here

Out = TypeVar("Out")
LINE = 64  # bytes that pieces are aligned to
BLOCK = 1 << 20  # bytes of a block at least
NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}
_MAKE_MEMORY = ("aten::empty", "aten::detach", "aten::alias", "aten::lift_fresh")


class CannotRecord(Exception):
    """A torch operation computes in the forward; its name."""


class TapeMemory:
    """Memory of recordings that never run at the same time: each begins at its start, so all take as much as the largest.

    A replay overwrites the results of every other recording, and of itself.
    """

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        # Their addresses; numpy takes a microsecond to tell one
        self._ranges: list[tuple[int, int]] = []
        self.begin()

    def begin(self) -> None:
        """Before a recording."""
        self._free: dict[int, list[np.ndarray]] = {}  # pieces that it has let go of, by size
        self._block, self._at = 0, 0

    @property
    def n_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = -(-max(prod(shape) * dtype.itemsize, 1) // LINE) * LINE
        found = self._free.setdefault(size, [])
        piece = found.pop() if found else self._cut(size)
        as_numpy = NUMPY_TYPES.get(dtype)
        if as_numpy is None:
            handed = piece[:]
            made = torch.from_numpy(handed)[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        else:  # numpy's views are no calls that the recording looks at
            handed = np.ndarray(shape, as_numpy, piece)
            made = torch.from_numpy(handed)
        # Torch keeps it while it keeps the memory
        weakref.finalize(handed, found.append, piece).atexit = False
        return made

    def _cut(self, size: int) -> np.ndarray:
        """The next piece; what is left of a block that is too small stays unused."""
        while self._block < len(self.blocks) and self._at + size > self.blocks[self._block].nbytes:
            self._block, self._at = self._block + 1, 0
        if self._block == len(self.blocks):
            whole = np.empty(max(size, BLOCK) + LINE, np.uint8)
            at = -whole.ctypes.data % LINE
            self.blocks.append(whole[at : at + max(size, BLOCK)])
            begin = self.blocks[-1].ctypes.data
            self._ranges.append((begin, begin + self.blocks[-1].nbytes))
        self._at += size
        return self.blocks[self._block][self._at - size : self._at]

    def owns(self, x: Tensor) -> bool:
        at = x.data_ptr()
        return any(first <= at < end for first, end in self._ranges)


class _OnlyKernels(TorchDispatchMode):
    """Lets views and new memory pass, and nothing that computes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, because torch then imports its compiler at the first call: 800 modules, a second and 90 MiB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(_MAKE_MEMORY):
            raise CannotRecord(func.name())
        made = func(*args, **(kwargs or {}))
        if func.is_view and _is_elsewhere(made, args[0]):  # a reshape that copies says so, too
            raise CannotRecord(func.name())
        return made


def _is_elsewhere(made: Any, x: Any) -> bool:
    """Whether what a view gave lies in other memory than its tensor."""
    views = made if isinstance(made, list | tuple) else (made,)
    at = x.untyped_storage().data_ptr()
    return any(view.untyped_storage().data_ptr() != at for view in views)


@contextmanager
def _recording(tape: Tape) -> Iterator[None]:
    here.tape = tape
    try:
        with _OnlyKernels():
            yield
    finally:
        here.tape = None


class Recorded(Generic[Out]):
    """A forward's tape and its result, which every replay over the same memory overwrites."""

    def __init__(self, fn: Callable[[], Out], pool: TapeMemory) -> None:
        """Record fn, whose kernels do not run. Raises CannotRecord."""
        pool.begin()
        self.tape = Tape(pool)
        with _recording(self.tape):
            self.out = fn()
        self.tape.seal()

    def replay(self) -> Out:
        self.tape.replay()
        return self.out
