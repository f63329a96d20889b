"""The fair, bounded queue, and the places where prompts are cut for checkpoints. Arithmetic only: no torch here."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pyspec.slots.images import ImageSpan
from pyspec.slots.prefix import NOT_KNOWN, Known, Owner
from pyspec.slots.table import SlotTable


class Waiting(Protocol):
    """A queued request, as admission sees it."""

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
    def owner(self) -> Owner: ...

    @property
    def group(self) -> str: ...

    @property
    def cost(self) -> int:
        """Tokens to read before its first one, if none are cached."""
        ...

    @property
    def n_left(self) -> int:
        """Tokens it may generate."""
        ...

    @property
    def n_to_read(self) -> int:
        """Rows of its prompt that are not read yet, once it is seated."""
        ...

    @property
    def work(self) -> int:
        """Tokens it was given so far: rows of its prompt that were not cached, and those it generated."""
        ...

    charged: int  # tokens that count as given to its client for it


W = TypeVar("W", bound=Waiting)

ANSWER = 512  # most tokens an answer counts: one without a limit rarely fills its context
KEPT = 2  # tokens by which a cached token of its own puts a request forward: while it waits, others evict it
MOST_AWAY = 1000  # clients without a request whose tokens are remembered
LAPS = 3  # most times its size that a request is put forward, and laps of its client's requests after which one is passed no more
CUT_TAIL = 4  # least tokens after the cut
CUT_GAP = 64  # tokens that a checkpoint has to save to be worth its forward, so also of the shortest prompt that is cut
GPU_WORTH = 512  # uncached tokens of a prompt that is cut on a GPU, where a forward of few rows takes as long as one of hundreds


@dataclass(slots=True)
class _Place(Generic[W]):
    """A waiting request. tag: orders the requests of its client. size: tokens that it asks for. number: of its arrival. forward: put forward
    by what is cached; n_passed: so many of those came later and were seated before it."""

    item: W
    tag: float
    size: int
    number: int
    forward: bool = False
    n_passed: int = 0


class Queue(Generic[W]):
    """Orders waiting requests. Clients take turns by the tokens they were given so far, uncached rows and answers: a request counts what it is
    expected to take when it is seated, more as soon as it takes more, and at its end what it took (`seated`, `leave`). A client's own requests are ordered by arrival
    and by their tokens to read and to generate: a short one does not wait for many long ones, and a long one does not starve (fair
    queueing by virtual finish times, Demers, Keshav and Shenker 1989). A request with pages of its own text in the cache goes forward,
    within a limit, because it costs more once they are evicted (tools/simulate_load.py). Requests of one group follow each other.

    A request pinned to a slot waits for it outside this order.

    limit    places, enforced by the caller (evict.py)
    running  gives the seated requests
    may_sit  False for a request that waits for something else: others pass it
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: Callable[[], Iterable[W]] = tuple
        self.may_sit: Callable[[W], bool] = lambda item: True
        self._places: list[_Place[W]] = []
        self._shared = 0.0  # of the requests that have ended, see `_share`
        # by client: tokens it was given, by all its requests; after an absence, at least the minimum of the others
        self._given: dict[str, float] = {}
        self._clock: dict[str, float] = {}  # by client: tokens it was given, per waiting request
        self._groups: dict[tuple[str, str], float] = {}  # by client and group: tag of its last request
        self._is_sorted = True
        self._numbers = itertools.count()
        self._refused: tuple[
            object, ...
        ] = ()  # state of the table in which the first request found no pages

    def __len__(self) -> int:
        return len(self._places)

    def push(self, item: W, known: Known = NOT_KNOWN) -> None:
        """Add a request. known: what the cache has of its prompt now."""
        size = _size(item, known)
        forward = min(KEPT * known.n_own, LAPS * size)
        self._add(item, self._tag(item, size) - forward, size, forward > 0)

    def put_back(self, item: W) -> None:
        """Add a suspended request again, before all others of its client."""
        self._add(item, -math.inf, _size(item, NOT_KNOWN))

    def _tag(self, item: W, size: int) -> float:
        """The request's finish in its client's time."""
        here = {p.item.client for p in self._places}
        # A client that was idle starts at the current minimum, so it gains no credit, or at an equal share. Only the latter rises with
        # every request that is served, so those that come pass those that wait for a bounded time
        if item.client not in here:
            took = self._taken()
            least = min((took[client] for client in here), default=max(took.values(), default=0.0))
            self._given[item.client] = max(self._given.get(item.client, 0.0), least, self._share())
            self._forget(here | {item.client})
        start = self._clock.setdefault(item.client, 0.0)
        group = item.client, item.group
        if item.group:
            start = max(start, self._groups.get(group, 0.0))
        tag = start + size
        if item.group:
            if group not in self._groups:
                self._forget_groups()
            self._groups[group] = tag
        return tag

    def _forget_groups(self) -> None:
        """Forget groups without a request here."""
        items = itertools.chain(self.running(), (p.item for p in self._places))
        here = {(item.client, item.group) for item in items}
        for group in self._groups.keys() - here:
            del self._groups[group]

    def _taken(self) -> dict[str, float]:
        """By client: tokens that it was given, without those that its requests are only expected to take."""
        took = dict(self._given)
        for item in itertools.chain(self.running(), (p.item for p in self._places)):
            took[item.client] = took.get(item.client, 0.0) - max(0, item.charged - item.work)
        return took

    def _share(self) -> float:
        """Tokens that a client was given which was always here, if all had equal shares (virtual time, Parekh and Gallager 1993)."""
        return self._shared + sum(item.work for item in self.running()) / max(1, len(self._clients()))

    def _clients(self) -> set[str]:
        """Clients with requests that run or wait."""
        return {p.item.client for p in self._places} | {item.client for item in self.running()}

    def _forget(self, here: set[str]) -> None:
        """Forget clients that have no request here, but not at once those that were given more than their share."""
        gone = self._given.keys() - here - {item.client for item in self.running()}
        share = self._share()
        more = sorted((-self._given[client], client) for client in gone if self._given[client] > share)
        kept = [client for _, client in more[:MOST_AWAY]]
        for client in gone.difference(kept):
            del self._given[client]
        for client in self._clock.keys() - here:
            del self._clock[client]
        for group in [group for group in self._groups if group[0] not in here]:
            del self._groups[group]

    def _add(self, item: W, tag: float, size: int, forward: bool = False) -> None:
        self._given.setdefault(item.client, 0.0)
        self._places.append(_Place(item, tag, size, next(self._numbers), forward))
        self._is_sorted = False

    def waiting(self) -> list[W]:
        """Waiting requests in order."""
        if not self._is_sorted:
            most = Counter(p.item.client for p in self._places)

            def place(p: _Place[W]) -> tuple[float, float, int]:
                tag = p.tag if p.n_passed < LAPS * most[p.item.client] else -math.inf
                return self._given[p.item.client], tag, p.number

            self._places.sort(key=place)
            self._is_sorted = True
        return [p.item for p in self._places]

    def remove(self, item: W) -> None:
        """Remove a waiting request."""
        self._places = [p for p in self._places if p.item is not item]

    def first(self, table: SlotTable) -> W | None:
        """The next request, if it can be seated now. Cheap to call again while nothing changes."""
        if not self._places or all(slot.busy for slot in table.slots):
            return None
        for item in self.running():
            if item.work > item.charged:
                self._charge(item, item.work)
        for item in self.waiting():
            pinned = item.wanted_slot
            if (pinned >= 0 and table.slots[pinned].busy) or not self.may_sit(item):
                continue
            now = (
                id(item),
                table.n_page_used,
                table.n_page_cached,
                *(slot.generation * slot.busy for slot in table.slots),
            )
            if now == self._refused:
                return None
            if table.can_admit(item.n_rows, item.reusable, item.owner):
                return item
            self._refused = now
            return None
        return None

    def next(self, table: SlotTable) -> W | None:
        """Remove and return the next request that can be seated now."""
        item = self.first(table)
        if item is not None:
            own = [p for p in self._places if p.item.client == item.client]
            seated = next(p for p in own if p.item is item)
            for p in own if seated.forward else ():
                p.n_passed += p.number < seated.number
            self._clock[item.client] = self._clock.get(item.client, 0.0) + seated.size / len(own)
            self._charge(item, max(item.charged, item.work + seated.size))
            self.remove(item)
        return item

    def seated(self, item: W) -> None:
        """A request has its slot: what it will take is known better, because the cached part of its prompt is."""
        self._charge(item, item.work + item.n_to_read + min(item.n_left, ANSWER))

    def leave(self, item: W) -> None:
        """A request has ended, in a slot that still has its tokens or without one: it was given what it took."""
        self._charge(item, item.work)
        self._shared += item.work / len(self._clients() | {item.client})

    def _charge(self, item: W, n_token: int) -> None:
        """A request counts so many tokens from now on."""
        self._given[item.client] = self._given.get(item.client, 0.0) + n_token - item.charged
        item.charged, self._is_sorted = n_token, False

    def drain(self) -> list[W]:
        """Remove and return all requests."""
        items = self.waiting()
        self._places.clear()
        return items


def _size(item: Waiting, known: Known) -> int:
    """Tokens that a request asks for."""
    return max(item.cost - known.n, 1) + min(item.n_left, ANSWER)


def worth_on(device: str) -> int:
    """Least uncached tokens of a prompt that is cut, on a device of this type."""
    return GPU_WORTH if device == "cuda" else CUT_GAP


def cut_of(n_prompt: int, page_size: int, worth: int = CUT_GAP) -> int:
    """The cut near a prompt's end, on a page border, for a checkpoint; 0: none."""
    return 0 if n_prompt < worth else (n_prompt - CUT_TAIL) // page_size * page_size


def cuts_of(
    n_prompt: int,
    page_size: int,
    n_cached: int,
    special: Set[int],
    every: int,
    worth: int = CUT_GAP,
    images: Sequence[ImageSpan] = (),
) -> tuple[int, ...]:
    """Cuts of a prompt's prefill for checkpoints, in order: behind its pictures, at `special` places, near its end, and at a regular distance.

    All are on page borders, behind the cached part, and CUT_GAP apart. Of special places that are too close, the later one stays. Special
    places win over the end: the next prompt of a conversation may have another end, because agents add reminders there, and the checkpoint
    before would be a whole turn back. If the end is the same, at most CUT_GAP tokens are read again. Cuts behind pictures win over all, and are
    exactly there, on a page border or not: the next prompt may have another question. No cut is within a picture.

    worth  least uncached tokens of a prompt that is cut, if above CUT_GAP
    """
    if worth > CUT_GAP and n_prompt - n_cached < worth:
        return ()
    end = cut_of(n_prompt, page_size)
    often = range(every, end, every) if every else ()
    least = n_cached + CUT_GAP if n_cached else 1
    groups = [{p // page_size * page_size for p in places} for places in (special, (end,), often)]
    groups = [{at for at in places if at <= end} for places in groups]
    behind = {i.end for i in images if end and i.end <= n_prompt - CUT_TAIL}
    cuts: list[int] = []
    for places in (behind, *groups):
        for at in sorted(places, reverse=True):
            is_within = any(i.first < at < i.end for i in images)
            if at >= least and not is_within and all(abs(at - cut) >= CUT_GAP for cut in cuts):
                cuts.append(at)
    return tuple(sorted(cuts))
