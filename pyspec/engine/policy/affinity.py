"""Which replica gets a request: the one that knows its beginning, unless it is much busier. Arithmetic only: no torch here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pyspec.request import Request
from pyspec.slots.images import routed

BLOCK = 32  # tokens that are known or unknown together
WORTH = 512  # tokens to read that weigh as much as one more open request, while no request waits (tools/simulate_routing.py)
MOST = 4  # a known prefix weighs no more than this many times the slots


def chain(tokens: Sequence[int], salt: str = "") -> list[int]:
    """A key for each whole block of a text, which also depends on all blocks before it, and on the text's salt."""
    keys, key, tokens = [], hash(salt), tuple(tokens)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, tokens[end - BLOCK : end]))
        keys.append(key)
    return keys


def chain_of(request: Request) -> list[int]:
    """`chain` of a request's prompt; empty if it does not use the cache."""
    if not request.cache_prompt:
        return []
    return chain(routed(request.prompt, request.images), request.cache_salt)


class KnownTexts:
    """Blocks that one replica has read lately. As in its cache, the ends of old texts are forgotten first."""

    def __init__(self, n_block: int) -> None:
        self._n_block = n_block
        self._keys: OrderedDict[int, None] = OrderedDict()  # the next one to forget is the first

    def n_known(self, keys: Sequence[int]) -> int:
        """Tokens of the longest beginning that was read."""
        n = next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))
        return n * BLOCK

    def add(self, keys: Sequence[int]) -> None:
        """A text was read."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._n_block:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """The replica was replaced, and its cache is empty."""
        self._keys.clear()


class Affinity:
    """Orders replicas for each request by what they know and how busy they are.

    Where requests wait at all replicas, a token that is read twice delays all that wait there. So it weighs more, by the laps of the
    shortest queue: conversations leave their replicas for idle slots, and not for a queue that is shorter by one.

    n_block  blocks that one replica's cache holds
    n_slot   slots of one
    """

    def __init__(self, n_replica: int, n_block: int, n_slot: int) -> None:
        self.known = [KnownTexts(n_block) for _ in range(n_replica)]
        self.n_chosen = [0] * n_replica
        self._n_slot, self._most = n_slot, MOST * n_slot * WORTH

    def order(self, keys: Sequence[int], n_open: Sequence[int | None]) -> list[int]:
        """Replicas, the best first.

        keys    `chain` of the prompt; empty: only the load counts
        n_open  requests that each one has; None: it can not be chosen
        """

        least = min((n for n in n_open if n is not None), default=0)
        laps = 1 + max(0, least - self._n_slot) / self._n_slot

        def rank(i: int, n: int) -> tuple[float, int, int]:
            saved = min(laps * self.known[i].n_known(keys), self._most)
            return n * WORTH - saved, self.n_chosen[i], i

        ranks = [rank(i, n) for i, n in enumerate(n_open) if n is not None]
        return [i for *_, i in sorted(ranks)]

    def chose(self, i: int, keys: Sequence[int]) -> int:
        """A replica gets the request. Returns the tokens of it that it knew."""
        self.n_chosen[i] += 1
        n = self.known[i].n_known(keys)
        self.known[i].add(keys)
        return n
