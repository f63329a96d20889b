"""Places to wait for a slot, and how clients share them when none is left."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pyspec.errors import QueueFull

SHORT = 512  # tokens of a short prompt, which has extra places


class Waiter(Protocol):
    """A waiting request, as eviction sees it."""

    @property
    def client(self) -> str: ...

    @property
    def wanted_slot(self) -> int: ...

    @property
    def cost(self) -> int:
        """Tokens to read before its first one."""
        ...


W = TypeVar("W", bound=Waiter)


def evict_for(
    item: Waiter, waiting: Sequence[W], limit: int, goes_on: Callable[[], bool] = lambda: False
) -> W | None:
    """Return the waiting request to evict, or None if there is room. waiting: in order of arrival.

    One client may use all `limit` places while no other asks; short prompts have half as many more. So have, on top, prompts that go on
    with a text that the cache holds (`goes_on`): their conversations had a place a moment ago, and would be read anew if they came back
    later. When none is left, the client with the most places gives up its newest one if the asking client would still have fewer (longest
    queue drop, McKenney 1991). So a newcomer always gets its share. Requests pinned to a slot wait in a second set of places, by the same
    rule.

    Raises QueueFull.
    """
    beside = item.wanted_slot >= 0
    own = [other for other in waiting if (other.wanted_slot >= 0) == beside]
    more = 0 if beside else limit // 2
    limit += more if item.cost <= SHORT else 0
    if len(own) < limit or (len(own) < limit + more and goes_on()):
        return None
    count = Counter(other.client for other in own)
    most = max(count.values(), default=0)
    if count[item.client] + 1 >= most:
        raise QueueFull(len(own))
    return next(other for other in reversed(own) if count[other.client] == most)


class LeftTexts:
    """Texts that a cache probably holds because their last requests ended lately: requests that go on with them (`evict_for`).

    Remembers prompts by the key of their last whole block (`affinity.chain`), as many tokens as a cache holds.

    n_token  tokens that the cache holds
    """

    def __init__(self, n_token: int) -> None:
        self._n_token, self._n = n_token, 0
        self._texts: OrderedDict[int, int] = OrderedDict()  # tokens by key; the first is the oldest

    def leave(self, key: int, n_token: int) -> None:
        """A request ended. n_token: of its prompt and answer."""
        self._n += n_token - self._texts.pop(key, 0)
        self._texts[key] = n_token
        while self._n > self._n_token:
            self._n -= self._texts.popitem(last=False)[1]

    def goes_on(self, keys: Sequence[int]) -> bool:
        """True if a prompt with these keys begins with a remembered one."""
        return any(key in self._texts for key in keys)
