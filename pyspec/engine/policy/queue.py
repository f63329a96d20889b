"""The bounded queue, which is fair, and where prompts are cut for checkpoints. Arithmetic only: no torch here."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pyspec.slots.table import SlotTable


class Waiting(Protocol):
    """What admission looks at in a queued request."""

    @property
    def n_rows(self) -> int:
        """Most KV rows it will need."""
        ...

    @property
    def wanted_slot(self) -> int: ...

    @property
    def reusable(self) -> Sequence[int]:
        """The prompt, if it may share pages with other requests."""
        ...

    @property
    def client(self) -> str: ...

    @property
    def group(self) -> str: ...

    @property
    def cost(self) -> int:
        """Tokens that have to be read before its first one."""
        ...

    @property
    def n_left(self) -> int:
        """Tokens it may generate."""
        ...


W = TypeVar("W", bound=Waiting)

ANSWER = 512  # tokens an answer counts at most: one without a limit hardly ever takes all that its context holds
CUT_MIN = 64  # a prompt is cut for a checkpoint from this length on
CUT_TAIL = 4  # at least so many tokens stand after the cut
CUT_GAP = 64  # a checkpoint is worth its forward if it saves so many tokens
GPU_WORTH = 512  # on a GPU a forward of few rows takes as long as one of hundreds, so a prompt that has no more to be read is not cut


@dataclass(slots=True)
class _Place(Generic[W]):
    """One that waits. `tag`: by which its client's requests are ordered."""

    item: W
    tag: float


class Queue(Generic[W]):
    """Who is seated next. Clients take turns by the tokens they were given so far; a client's own requests by when they came and
    how much they ask, to be read and to be said, so that a short one does not wait for many long ones, and a long one not for ever (fair
    queueing by virtual finish times, Demers, Keshav and Shenker 1989). Requests that were asked together come one after the other.

    Who is pinned to a slot waits for that beside the queue. limit: places, which is for whoever lets requests in (room.py).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._places: list[_Place[W]] = []
        self._given: dict[
            str, float
        ] = {}  # by client: tokens of those that were seated, and of the time it was not here
        self._clock: dict[str, float] = {}  # by client: tokens it was given, for each of its requests that waited
        self._groups: dict[tuple[str, str], float] = {}  # tag of the last one that came
        self._is_sorted = True
        self._refused: tuple[object, ...] = ()  # the state of the table in which the first in line found no pages

    def __len__(self) -> int:
        return len(self._places)

    def push(self, item: W) -> None:
        """Line up."""
        self._add(item, self._tag(item))

    def put_back(self, item: W) -> None:
        """Line up again, before all others of its client: it was seated, and made room."""
        self._add(item, -1.0)

    def _tag(self, item: W) -> float:
        here = {p.item.client for p in self._places}
        if item.client not in here:  # who was away has not saved up turns
            least = min((self._given[client] for client in here), default=max(self._given.values(), default=0.0))
            self._given[item.client] = max(self._given.get(item.client, 0.0), least)
            self._forget(here | {item.client})
        start = self._clock.setdefault(item.client, 0.0)
        group = item.client, item.group
        if item.group:
            start = max(start, self._groups.get(group, 0.0))
        tag = start + _size(item)
        if item.group:
            self._groups[group] = tag
        return tag

    def _forget(self, here: set[str]) -> None:
        """What is known of clients that are not here any more: a newcomer could not be told from them."""
        for known in (self._given, self._clock):
            for client in known.keys() - here:
                del known[client]
        for group in [group for group in self._groups if group[0] not in here]:
            del self._groups[group]

    def _add(self, item: W, tag: float) -> None:
        self._given.setdefault(item.client, 0.0)
        self._places.append(_Place(item, tag))
        self._is_sorted = False

    def waiting(self) -> list[W]:
        """Who waits, the first in line first."""
        if not self._is_sorted:  # equal tags stay in order of arrival
            self._places.sort(key=lambda p: (self._given[p.item.client], p.tag))
            self._is_sorted = True
        return [p.item for p in self._places]

    def remove(self, item: W) -> None:
        """Take out one that waits."""
        self._places = [p for p in self._places if p.item is not item]

    def first(self, table: SlotTable) -> W | None:
        """The next request, if it can be seated now. Cheap to ask again while nothing changes."""
        if not self._places or all(slot.busy for slot in table.slots):
            return None
        for item in self.waiting():
            pinned = item.wanted_slot
            if pinned >= 0 and table.slots[pinned].busy:
                continue
            now = (
                id(item),
                table.n_page_used,
                table.n_page_cached,
                *(slot.generation * slot.busy for slot in table.slots),
            )
            if now == self._refused:
                return None
            if table.can_admit(item.n_rows, item.reusable):
                return item
            self._refused = now
            return None
        return None

    def next(self, table: SlotTable) -> W | None:
        """Take out the next request that can be seated now."""
        item = self.first(table)
        if item is not None:
            n = sum(p.item.client == item.client for p in self._places)
            self._clock[item.client] = self._clock.get(item.client, 0.0) + _size(item) / n
            self._given[item.client] += max(item.cost, 1)
            self._is_sorted = False
            self.remove(item)
        return item

    def drain(self) -> list[W]:
        """Take out all."""
        items = self.waiting()
        self._places.clear()
        return items


def _size(item: Waiting) -> int:
    """How much a request asks, in tokens."""
    return max(item.cost, 1) + min(item.n_left, ANSWER)


def worth_on(device: str) -> int:
    """Tokens to be read from which on a prompt is cut, on a device of this type."""
    return GPU_WORTH if device == "cuda" else CUT_MIN


def cut_of(n_prompt: int, page_size: int, worth: int = CUT_MIN) -> int:
    """Where a prompt's prefill is cut so that a checkpoint can be taken: near its end, on a page border; 0: nowhere."""
    return 0 if n_prompt < worth else (n_prompt - CUT_TAIL) // page_size * page_size


def cuts_of(
    n_prompt: int, page_size: int, n_cached: int, special: Set[int], every: int, worth: int = CUT_MIN
) -> tuple[int, ...]:
    """Where a prompt's prefill is cut for checkpoints, in order: at `special` places, near its end, and every so often.

    All on page borders, behind what is cached, and CUT_GAP apart. Of special places that are too close the later one stays, and they go
    before the end: the next prompt of a conversation may have another end, as agents put reminders there, and the state before those would
    be a whole turn back; where the end is the same, no more than CUT_GAP tokens are read again.

    worth  a prompt that has fewer tokens than this to be read is not cut, if that is more than CUT_MIN
    """
    if worth > CUT_MIN and n_prompt - n_cached < worth:
        return ()
    end = cut_of(n_prompt, page_size)
    often = range(every, end, every) if every else ()
    least = n_cached + CUT_GAP if n_cached else 1
    cuts: list[int] = []
    for places in (special, (end,), often):
        for at in sorted({p // page_size * page_size for p in places}, reverse=True):
            if least <= at <= end and all(abs(at - cut) >= CUT_GAP for cut in cuts):
                cuts.append(at)
    return tuple(sorted(cuts))
