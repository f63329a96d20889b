"""The bounded queue, and where prompts are cut for checkpoints. Arithmetic only: no torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from typing import Generic, Protocol, TypeVar

from pyspec.errors import QueueFull
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


W = TypeVar("W", bound=Waiting)

CUT_MIN = 64  # a prompt is cut for a checkpoint from this length on
CUT_TAIL = 4  # at least so many tokens stand after the cut
CUT_GAP = 64  # a checkpoint is worth its forward if it saves so many tokens


class Queue(Generic[W]):
    """First come, first served, except that a request pinned to a busy slot does not hold up those behind it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: deque[W] = deque()
        self._refused: tuple[object, ...] = ()  # the state of the table in which the first in line found no pages

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: W) -> None:
        """Line up; raises QueueFull."""
        if len(self._waiting) >= self.limit:
            raise QueueFull(len(self._waiting))
        self._waiting.append(item)

    def waiting(self) -> list[W]:
        """Who waits, the first in line first."""
        return list(self._waiting)

    def remove(self, item: W) -> None:
        """Take out one that waits."""
        self._waiting.remove(item)

    def first(self, table: SlotTable) -> W | None:
        """The next request, if it can be seated now. Cheap to ask again while nothing changes."""
        if not self._waiting or all(slot.busy for slot in table.slots):
            return None
        for item in self._waiting:
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
            self._waiting.remove(item)
        return item

    def drain(self) -> list[W]:
        """Take out all."""
        items = list(self._waiting)
        self._waiting.clear()
        return items


def cut_of(n_prompt: int, page_size: int) -> int:
    """Where a prompt's prefill is cut so that a checkpoint can be taken: near its end, on a page border; 0: nowhere."""
    return 0 if n_prompt < CUT_MIN else (n_prompt - CUT_TAIL) // page_size * page_size


def cuts_of(n_prompt: int, page_size: int, n_cached: int, special: Set[int], every: int) -> tuple[int, ...]:
    """Where a prompt's prefill is cut for checkpoints, in order: at `special` places, near its end, and every so often.

    All on page borders, behind what is cached, and CUT_GAP apart. Of special places that are too close the later one stays, and they go
    before the end: the next prompt of a conversation may have another end, as agents put reminders there, and the state before those would
    be a whole turn back; where the end is the same, no more than CUT_GAP tokens are read again.
    """
    end = cut_of(n_prompt, page_size)
    often = range(every, end, every) if every else ()
    least = n_cached + CUT_GAP if n_cached else 1
    cuts: list[int] = []
    for places in (special, (end,), often):
        for at in sorted({p // page_size * page_size for p in places}, reverse=True):
            if least <= at <= end and all(abs(at - cut) >= CUT_GAP for cut in cuts):
                cuts.append(at)
    return tuple(sorted(cuts))
