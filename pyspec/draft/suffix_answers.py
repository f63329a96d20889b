"""Finished answers, by client, for drafts of later ones: bounded memory, and no client sees another's.

Each client has two automata. The young one grows until it has half of the memory, then it becomes the old one, and what was old
goes. If all clients together have too much, those that asked longest ago go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from pyspec.draft.suffix_text import GrowingText, SuffixKind

LEAST_ANSWER = 4  # tokens of an answer that is worth keeping
MOST_SHELVES = 64  # clients
MOST_QUEUED = 1 << 20  # tokens of answers that wait to be read


class Shelf:
    """One client's answers."""

    def __init__(self, kind: SuffixKind) -> None:
        self.young, self.old = kind.automaton(), kind.automaton()
        self.automata: tuple[GrowingText, ...] = ()  # those with text

    @property
    def n_bytes(self) -> int:
        return self.young.n_bytes + self.old.n_bytes

    def find_automata(self) -> None:
        """Call it when one of them was changed."""
        self.automata = tuple(each for each in (self.young, self.old) if each.n_token)


class Answers:
    """Answers of the latest clients.

    most_bytes  of all of them; 0: none is kept
    shared      clients see one another's
    kind        makes automata
    """

    def __init__(self, most_bytes: int, *, shared: bool = False, kind: SuffixKind) -> None:
        self.most_bytes, self.shared, self.kind = most_bytes, shared, kind
        self.shelves: OrderedDict[str, Shelf] = OrderedDict()
        self.queue: deque[tuple[str, Sequence[int], int]] = (
            deque()
        )  # client, answer, and tokens of it that were read
        self._n_queued = 0

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts."""
        return sum(shelf.n_bytes for shelf in list(self.shelves.values()))

    def automata(self, client: str) -> tuple[GrowingText, ...]:
        """Automata with answers that this client may see."""
        shelf = self.shelves.get("" if self.shared else client)
        return () if shelf is None else shelf.automata

    def add(self, client: str, answer: Sequence[int]) -> None:
        """Add a finished answer. `read` enters it later."""
        if (
            self.most_bytes
            and len(answer) >= LEAST_ANSWER
            and self._n_queued + len(answer) <= MOST_QUEUED
        ):
            self.queue.append(("" if self.shared else client, answer, 0))
            self._n_queued += len(answer)

    def read(self, n: int) -> int:
        """Enter up to n tokens of waiting answers. Returns how many are left of n."""
        while n > 0 and self.queue:
            client, answer, done = self.queue.popleft()
            shelf = self.shelves.get(client) or self.shelves.setdefault(client, Shelf(self.kind))
            self.shelves.move_to_end(client)
            if not done:
                shelf.young.begin()
            piece = answer[done : done + n]
            shelf.young.extend(piece)
            n -= len(piece)
            self._n_queued -= len(piece)
            if done + len(piece) < len(answer):
                self.queue.appendleft((client, answer, done + len(piece)))
            self._make_room(shelf)
        return n

    def _make_room(self, shelf: Shelf) -> None:
        if shelf.young.n_bytes > self.most_bytes // 2:
            shelf.young, shelf.old = self.kind.automaton(), shelf.young
        shelf.find_automata()
        while len(self.shelves) > 1 and (
            len(self.shelves) > MOST_SHELVES or self.n_bytes > self.most_bytes
        ):
            self.shelves.popitem(last=False)

    def clear(self) -> None:
        """Forget every answer."""
        self.shelves.clear()
        self.queue.clear()
        self._n_queued = 0
