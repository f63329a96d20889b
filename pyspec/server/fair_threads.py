"""Fair order of text work: clients take turns by the thread time they have used."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class FairThreads:
    """A fixed number of text threads and their waiting clients. The client with the least used time goes next; its requests keep their order.

    A client that was idle starts at the current minimum, so it gains no credit, or at an equal share, which rises with all work: however
    many come, those that wait get their turn. Lives on one event loop.
    """

    def __init__(self, n: int) -> None:
        self._n_free = n
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._here: Counter[str] = Counter()  # waiting or running requests by client
        self._had_s: dict[str, float] = {}  # used time of these clients, in seconds
        self._share_s = 0.0  # of a client that was always here, if all had used the same

    async def take(self, client: str) -> None:
        """Wait for a thread. The caller must call `give` afterwards, unless this is cancelled."""
        if client not in self._had_s:
            self._had_s[client] = max(min(self._had_s.values(), default=0.0), self._share_s)
        self._here[client] += 1
        if self._n_free:
            self._n_free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            # the thread was assigned before the cancellation
            if mine.done() and not mine.cancelled():
                self._next()
            else:
                self._remove(client, mine)
            self._leave(client)
            raise

    def give(self, client: str, seconds: float) -> None:
        """Return a thread after `seconds` of work for a client."""
        self._had_s[client] += seconds
        self._share_s += seconds / len(self._here)
        self._leave(client)
        self._next()

    def _next(self) -> None:
        while self._waiting:
            client = min(self._waiting, key=self._had_s.__getitem__)
            mine = self._waiting[client][0]
            self._remove(client, mine)
            if not mine.done():
                mine.set_result(None)
                return
        self._n_free += 1

    def _remove(self, client: str, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(client, deque())
        if mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[client]

    def _leave(self, client: str) -> None:
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client], self._had_s[client]
