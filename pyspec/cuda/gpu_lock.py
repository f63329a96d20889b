"""One engine at a time tells a GPU what to do.

Kernels of one process share what they write between two launches (prepared rows, shares of sums, tickets, the record of
faults), and a kernel that starts early counts on what its predecessor in the stream waited for. So what an engine launches for a
round has to lie in the stream in one piece, whatever other engines' threads do meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch


class Turn:
    """To be held while launching; `away` while waiting for the device, or for the caller's code."""

    def __init__(self, lock: threading.RLock | nullcontext[None]) -> None:  # type: ignore[valid-type]
        self.lock = lock

    def __enter__(self) -> None:
        self.lock.__enter__()

    def __exit__(self, *raised: object) -> None:
        self.lock.__exit__(None, None, None)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Others may launch; for whoever holds it once."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


def turn(device: torch.device) -> Turn:
    """The device's. Nobody waits for a CPU's: its kernels share nothing."""
    if device.type != "cuda":
        return Turn(nullcontext())
    return _turn(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _turn(index: int) -> Turn:
    return Turn(threading.RLock())
