"""Who may wait for a slot: as many as there are places, and where there are none left clients share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pyspec.errors import QueueFull

SHORT = 512  # a prompt of so many tokens is short: it finds room where longer ones do not any more


class Waiter(Protocol):
    """What the room looks at in a request."""

    @property
    def client(self) -> str: ...

    @property
    def wanted_slot(self) -> int: ...

    @property
    def cost(self) -> int:
        """Tokens that have to be read before its first one."""
        ...


W = TypeVar("W", bound=Waiter)


def evict_for(item: Waiter, waiting: Sequence[W], limit: int) -> W | None:
    """Whose place a request takes: None while there are some left. waiting: in the order in which they came.

    Of `limit` places anybody may have all while nobody else asks, and short prompts have half as many more. Where none is left the client
    with the most gives up its newest one, if who asks would still have fewer (longest queue drop, McKenney 1991), so that any number
    of clients that fill the room leave each newcomer the share that they have. Who is pinned to a slot waits beside the others,
    in as many places, by the same rule.

    Raises QueueFull.
    """
    beside = item.wanted_slot >= 0
    own = [other for other in waiting if (other.wanted_slot >= 0) == beside]
    if len(own) < limit + (limit // 2 if item.cost <= SHORT and not beside else 0):
        return None
    count = Counter(other.client for other in own)
    most = max(count.values(), default=0)
    if count[item.client] + 1 >= most:
        raise QueueFull(len(own))
    return next(other for other in reversed(own) if count[other.client] == most)
