"""One engine at a time tells a GPU what to do.

Kernels of one process share what they write between two launches (prepared rows, shares of sums, tickets, the record of
faults), and a kernel that starts early counts on what its predecessor in the stream waited for. So what an engine launches for a
round has to lie in the stream in one piece, whatever other engines' threads do meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class GpuLock:
    """To be held while launching; `released` while waiting for the device, or for the caller's code.

    Who holds it has the device as the thread's current one (`current`, of its context, which lives as long as its locks).
    """

    def __init__(
        self,
        lock: threading.RLock | nullcontext[None],
        current: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.lock, self.current = lock, current
        self._entered: list[AbstractContextManager[object]] = []  # by who holds the lock

    def __enter__(self) -> None:
        self.lock.__enter__()
        self._entered.append(self.current())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: object) -> None:
        self._entered.pop().__exit__(None, None, None)
        self.lock.__exit__(None, None, None)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Others may launch; for whoever holds it once."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()
