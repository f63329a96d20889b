"""A thread that reads a file's tensors before a load asks for them: while torch is imported, and beside the binding of others."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from weakref import WeakSet

import numpy as np

from pyspec.errors import ModelError
from pyspec.gguf.shard import TensorInfo
from pyspec.heap import own_pages

LEAST = 256 << 10  # bytes of a tensor that is read ahead; a load reads smaller ones as fast
MOST = 8 << 10  # tensors: a Linux process may have 65,530 mappings
_ALL: WeakSet[ReadAhead] = WeakSet()


class ReadAhead:
    """Reads tensors one after another, each into pages of its own, in the order of the file.

    read    (name, out [n] uint8) -> None: fills `out` with a tensor's bytes
    """

    def __init__(
        self, tensors: Mapping[str, TensorInfo], read: Callable[[str, np.ndarray], None]
    ) -> None:
        large = [t for t in tensors.values() if t.n_bytes >= LEAST]
        large.sort(key=lambda t: (t.shard, t.offset))
        self._left = {t.name: t.n_bytes for t in large[:MOST]}
        self._read, self._under_way = read, ""
        self._done: dict[str, mmap.mmap] = {}
        self._news = threading.Condition()
        _ALL.add(self)
        threading.Thread(target=self._run, name="pyspec-read-ahead", daemon=True).start()

    def take(self, name: str) -> mmap.mmap | None:
        """A tensor's bytes, once; waits while they are read. None: the caller has to read them."""
        with self._news:
            self._left.pop(name, None)
            while self._under_way == name:
                self._news.wait()
            return self._done.pop(name, None)

    def close(self) -> None:
        """Read nothing more, and free what was not taken."""
        with self._news:
            self._left.clear()
            while self._under_way:
                self._news.wait()
            self._done.clear()

    @property
    def n_held(self) -> int:
        """Bytes that were read and not taken yet."""
        with self._news:
            return sum(map(len, self._done.values()))

    def _run(self) -> None:
        with suppress(OSError, ModelError):  # the load reads the rest, and reports what is wrong
            while self._next():
                pass
        with self._news:
            self._left.clear()
            self._under_way = ""
            self._news.notify_all()

    def _next(self) -> bool:
        """Read a tensor. Returns False if none is left."""
        with self._news:
            if not self._left:
                return False
            name = self._under_way = next(iter(self._left))
            n_bytes = self._left.pop(name)
        pages = own_pages(n_bytes, huge=True)
        self._read(name, np.frombuffer(pages, np.uint8))
        with self._news:
            self._done[name], self._under_way = pages, ""
            self._news.notify_all()
        return True


def held_bytes() -> int:
    """Bytes of weights that this process has read ahead: memory that a plan counts, and the system no longer as free."""
    return sum(ahead.n_held for ahead in list(_ALL))
