"""When the drafter stops reading requests, and when it reads them again: the controller's decisions over costs on paper."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from pyspec.engine.loop.read_slots import ReadSlots
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.timer import Timer, bucket
from pyspec.slots.arena import bucket_of
from pyspec.slots.table import Slot, SlotTable

N_DRAFT = 3


@dataclass
class Joins:
    """A drafter that can join: it notes what it is told."""

    begun: list[int] = field(default_factory=list)
    hidden: dict[int, int] = field(default_factory=dict)
    can_join: bool = True

    def begin(self, slot: Slot, saved: object | None) -> None:
        self.begun.append(slot.index)

    def hide(self, slot: Slot, n: int) -> None:
        self.hidden[slot.index] = n


class Served:
    """Requests that come and go in all slots, at the costs of 27B with its MTP block on one H100. chance: of a draft to be right"""

    def __init__(self, n_slot: int, chance: float, answer: int = 192) -> None:
        self.rng, self.chance, self.answer = random.Random(5), chance, answer
        self.timer = Timer(lambda n_row: bucket_of(n_row, 256) or bucket(n_row))
        self.controller = Controller(n_slot, N_DRAFT, chained=True, verify_ms=self.timer)
        self.table, self.drafter = SlotTable(n_slot, 40 * n_slot, 32), Joins()
        self.read = ReadSlots(SimpleNamespace(table=self.table, drafter=self.drafter), self.controller)  # type: ignore[arg-type]
        self.n_request, self.left = 0, [0] * n_slot
        self.picked: list[list[int]] = []
        for n in range(N_DRAFT + 1):
            for _ in range(4):
                self._timed(n_slot * (1 + n), n_slot if n else 0, n)
        for slot in self.table.slots:
            self._seat(slot, self.rng.randint(2, answer))

    def _timed(self, rows: int, live: int, n: int) -> None:
        busy = len(self.table.slots)
        verify = 12 + 0.125 * (bucket_of(rows, 256) or rows)
        self.controller.timed(rows, busy, verify, live, n, n * (0.5 + 0.012 * busy) if live else 0.0)

    def _seat(self, slot: Slot, n: int) -> None:
        self.table.acquire(slot, 300)
        slot.tokens[:] = [1] * 20
        self.read.begin(slot, None, 0)
        self.controller.begin(slot.index)
        self.left[slot.index], self.n_request = n, self.n_request + 1

    def round(self) -> list[int]:
        """One round; the drafts of each slot."""
        if self.read.is_due:
            for slot in self.read.unread_slots():
                self.read.join(slot)
        unread, slots = self.read.unread, self.table.slots
        caps = [
            (s.index, 0 if s.index in unread or not self.read.may_draft(s) else N_DRAFT) for s in slots
        ]
        picked = self.controller.choose(caps)
        for slot, n in zip(slots, picked, strict=True):
            n_right = next((i for i in range(n) if self.rng.random() >= self.chance), n)
            self.controller.record(slot.index, n, n_right)
            self.left[slot.index] -= 1 + n_right
        self._timed(len(slots) + sum(picked), sum(n > 0 for n in picked), max(picked))
        self.read.observed([SimpleNamespace(slot=s.index) for s in slots])  # type: ignore[misc]
        for slot in slots:
            if self.left[slot.index] <= 0:
                self.read.end(slot)
                self.table.release(slot)
                self._seat(slot, self.answer)
        self.picked.append(picked)
        return picked

    def until(self, is_so: Callable[[], bool], most: int) -> int:
        """Rounds until something is so."""
        for n in range(most):
            if is_so():
                return n
            self.round()
        raise AssertionError(f"not so after {most} rounds")
