"""When the drafter stops reading requests, and when it reads them again: the controller's decisions over costs on paper."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pyspec.engine.loop.read_slots import ReadSlots
from pyspec.engine.policy import rests
from pyspec.engine.policy.controller import MUTE, UNREAD, Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.rests import DraftReading
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
        self.controller = Controller(n_slot, N_DRAFT, chained=True, costs=Costs(self.timer))
        self.table, self.drafter = SlotTable(n_slot, 40 * n_slot, 32), Joins()
        self.read = ReadSlots(SimpleNamespace(table=self.table, drafter=self.drafter), self.controller)  # type: ignore[arg-type]
        self.n_request, self.left = 0, [0] * n_slot
        self.picked: list[list[int]] = []
        self.mute: set[int] = set()
        self.refills = True
        for n in range(N_DRAFT + 1):
            for _ in range(4):
                self._timed(n_slot * (1 + n), n_slot if n else 0, n)
        for slot in self.table.slots:
            self._seat(slot, self.rng.randint(2, answer))

    def _timed(self, rows: int, live: int, n: int) -> None:
        busy = sum(s.busy for s in self.table.slots) or len(self.table.slots)
        verify = 12 + 0.125 * (bucket_of(rows, 256) or rows)
        self.controller.timed(rows, verify, live, n, n * (0.5 + 0.012 * busy) if live else 0.0)

    def _seat(self, slot: Slot, n: int) -> None:
        self.table.acquire(slot, 300)
        slot.tokens[:] = [1] * 20
        self.read.begin(slot, None, 0)
        self.controller.begin(slot.index)
        self.left[slot.index], self.n_request = n, self.n_request + 1

    def _may_draft(self, slot: Slot) -> bool:
        return slot.index not in self.read.unread | self.mute and self.read.may_draft(slot)

    def round(self) -> list[int]:
        """One round; the drafts of each slot."""
        for slot in self.read.due(self.mute):
            self.read.join(slot)
        slots = [s for s in self.table.slots if s.busy]
        caps = [(s.index, N_DRAFT if self._may_draft(s) else 0) for s in slots]
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
                if self.refills:
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


def test_it_rests_after_many_choices_and_wakes_after_a_few_that_pay() -> None:
    r = DraftReading()
    for _ in range(rests.REST_AFTER - 1):
        r.count(pays=False)
    assert not r.rests and r.wants(0, 0)
    r.count(pays=False)
    assert r.rests
    for _ in range(3):
        r.count(pays=True)
        assert r.rests, "a lucky text is no reason"
    r.count(pays=True)
    assert not r.rests


@pytest.mark.parametrize(("n_busy", "n_read"), [(7, 8), (8, 4), (36, 5), (63, 8), (99, 13)])
def test_it_reads_up_to_eight_requests_and_of_more_a_few(n_busy: int, n_read: int) -> None:
    r = DraftReading()
    r.n_idle = rests.REST_AFTER
    assert r.wants(n_read - 1, n_busy) and r.wants(n_read, n_busy) == (n_busy < 8)


@pytest.mark.parametrize(("n_slot", "chance"), [(10, 0.02), (37, 0.1), (64, 0.167)])
def test_where_drafts_are_hardly_ever_right_few_requests_are_read(n_slot: int, chance: float) -> None:
    """No request is ever joined, few are drafted for, and the others say why they have no drafts."""
    s = Served(n_slot, chance)
    for _ in range(900):
        s.round()
    n_read = max(4, -(-n_slot // 8))
    assert len(s.read.unread) == n_slot - n_read
    s.drafter.begun.clear()
    before = s.n_request
    for _ in range(900):
        s.round()
        assert len(s.read.unread) == n_slot - n_read
    begun = s.n_request - before
    assert len(s.drafter.begun) <= begun * n_read / n_slot + n_read and not s.drafter.hidden
    assert 0 < sum(map(sum, s.picked[-900:])) < 100
    assert {s.controller.lanes[slot].reason for slot in s.read.unread} == {UNREAD}


@pytest.mark.parametrize("n_slot", [10, 37, 64])
def test_drafts_come_back_when_they_are_right_again(n_slot: int) -> None:
    """Within two tries, and for the requests that run, too: those are joined where they stand."""
    s = Served(n_slot, 0.167)
    for _ in range(1500):
        s.round()
    unread, before = set(s.read.unread), s.n_request
    assert unread
    s.chance = 0.75
    n = s.until(lambda: not s.read.unread, 450)
    assert s.n_request - before < 450 * n_slot / 192 and n > 0
    joined = {slot for slot in unread if s.drafter.hidden.get(slot) == 20}
    assert joined
    for _ in range(40):
        s.round()
    assert sum(n > 0 for n in s.picked[-1]) > 0.8 * n_slot
    assert not any(s.read._joined)


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize(
    ("n_slot", "chance"), [(10, 0.35), (10, 0.75), (37, 0.45), (37, 0.75), (64, 0.6), (64, 0.75)]
)
def test_where_drafts_pay_nothing_changes(
    n_slot: int, chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafts, round for round, as of an engine that reads all requests."""
    picked = []
    for rest_after in (0, rests.REST_AFTER):
        monkeypatch.setattr(rests, "REST_AFTER", rest_after)
        s = Served(n_slot, chance)
        for _ in range(700):
            s.round()
            assert not s.read.unread
        picked.append(s.picked)
    assert picked[0] == picked[1]


def test_up_to_eight_requests_are_all_read() -> None:
    s = Served(7, 0.0)
    for _ in range(900):
        s.round()
        assert not s.read.unread
    assert s.controller.reading.rests


def resting(n_slot: int) -> Served:
    """The drafter reads a few of long requests, and no more come."""
    s = Served(n_slot, 0.05)
    s.until(lambda: len(s.read.unread) == n_slot - 4, 5000)
    s.left, s.refills = [10_000] * n_slot, False
    return s


def test_requests_that_are_left_are_read_once_few_run() -> None:
    """All that were read end: the others draft, though none of those that told of texts is left."""
    s = resting(16)
    for slot in s.table.slots:
        if slot.index not in s.read.unread:
            s.left[slot.index] = 0
    s.round()
    assert len(s.read.unread) == sum(slot.busy for slot in s.table.slots) == 12
    s.round()
    assert s.controller.reading.rests and len(s.read.unread) == 8, "four of twelve are read"
    for slot in [slot for slot in s.table.slots if slot.busy][1:]:
        s.left[slot.index] = 0
    s.round()
    s.chance = 1.0
    s.round()
    assert not s.read.unread and sum(slot.busy for slot in s.table.slots) == 1
    s.until(lambda: any(s.picked[-1]), 1500)


def test_requests_that_can_not_draft_do_not_count_as_read() -> None:
    s = resting(16)
    read = {slot.index for slot in s.table.slots} - s.read.unread
    unread = sorted(s.read.unread)
    s.mute = {*read, unread[0]}
    s.round()
    assert s.read.unread == {unread[0], *unread[5:]}


def test_requests_that_forbid_drafts_are_not_joined(caplog: pytest.LogCaptureFixture) -> None:
    """They stay unread when drafts pay again, change no choice of the others, and their reason names themselves."""
    caplog.set_level("INFO", "pyspec.engine.loop.read_slots")
    s = resting(16)
    silent = set(sorted(s.read.unread)[:3])
    s.controller.mute |= silent
    s.mute, s.chance = silent, 0.9
    s.round()
    assert s.controller.reading.rests
    assert {s.controller.lanes[slot].reason for slot in s.read.unread} == {MUTE, UNREAD}
    s.until(lambda: s.read.unread == silent, 3000)
    assert not silent & set(s.drafter.hidden) and "pay again" in caplog.text
    s.until(lambda: sum(n > 0 for n in s.picked[-1]) == 13, 400)
    for _ in range(200):
        s.round()
        assert s.read.unread == silent and not s.controller.reading.rests
        assert not s.controller.reading._tried, "what could wake it is not asked"
    assert {s.controller.lanes[slot].reason for slot in silent} == {MUTE}


def test_drafts_that_are_offered_do_not_wake_the_drafter() -> None:
    """Offers of suffixes pay, its own drafts never do."""
    s = Served(16, 0.0)
    s.until(lambda: bool(s.read.unread), 3000)
    n_offered = 0
    for _ in range(200):
        able = [slot.index for slot in s.table.slots if s._may_draft(slot)]
        caps = [(slot.index, N_DRAFT if slot.index in able else 0) for slot in s.table.slots]
        offers = {slot.index: (0.95, 0.9, 0.9) for slot in s.table.slots}
        picked = s.controller.choose(caps, offers)
        n_offered += any(picked)
        s._timed(16 + sum(picked), 0, 0)
    assert n_offered > 100 and s.controller.reading.rests
