"""Drafts that the host makes stop where its time is worth more, with all work for them, and go on where they pay. By a clock of the test's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from draft_fakes import N_VOCAB, text_after
from engine_rig import Heard, Rig, fake_rig
from plans import timed
from sampling import slow
from waiting import Clock

from pyspec.draft.drafter import OnHost
from pyspec.draft.ngram import NGram
from pyspec.draft.suffix_draft import NO_DRAFT, Promise, SuffixDraft
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.draft.suffix_text import PlainTexts
from pyspec.engine.loop.suffix_source import SuffixSource
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import LIMIT, SHARE
from pyspec.engine.policy.plan import RESTS
from pyspec.slots.drafts import Drafts
from pyspec.slots.table import Slot

ROUND_MS, ROW_MS, LONGEST = 10.0, 0.05, 5


@dataclass
class Work:
    """Work of the host for drafts, by round.

    host_ms  of a lookup for all slots, and entering a piece of texts
    """

    clock: Clock
    host_ms: float
    right: Callable[
        [int], int
    ]  # by slot: tokens of the next draft that are right, of LONGEST; negative: no draft
    texts: dict[int, list[int]] = field(default_factory=dict)  # by slot: the text to its end
    lookups: list[int] = field(default_factory=list)
    n_piece: int = 0


class Oracle(SuffixDrafts):
    """Suffix drafts that are right as often as the test says, at set costs."""

    def __init__(self, work: Work) -> None:
        super().__init__(LONGEST, kind=PlainTexts())
        self.work = work

    def draft_all(self, wishes: Sequence[tuple[Slot, int, int]]) -> list[SuffixDraft]:
        self.work.clock.now += 1e-3 * self.work.host_ms * len(wishes) / len(self.work.texts)
        self.work.lookups.append(len(wishes))
        return [self._one(slot, most) for slot, _, most in wishes]

    def _one(self, slot: Slot, most: int) -> SuffixDraft:
        n_right = self.work.right(slot.index)
        if n_right < 0:
            return NO_DRAFT
        behind = self.work.texts[slot.index][slot.n_past + 1 :][: min(most, n_right + 1)]
        tokens = [t if i < n_right else (t + 1) % N_VOCAB for i, t in enumerate(behind)]
        return SuffixDraft(
            tokens,
            [0.8] * len(tokens),
            Promise(),
            ([0.8**i for i in range(1, len(tokens) + 1)], n_right or 0.8),
        )

    def advance(self, n: int) -> bool:
        self.work.n_piece += 1
        return super().advance(n)


def make(
    np: int, host_ms: float, right: Callable[[int], int], *, ahead: bool = False
) -> tuple[Rig, Work]:
    made = fake_rig(np, None, ctx=1600)
    work, loop = Work(timed(made.loop, ROUND_MS, ROW_MS), host_ms, right), made.loop
    loop.controller.__init__(np, LONGEST, n_own=0)  # type: ignore[misc]
    loop.worker.__init__(loop.target, loop.memory, loop.table, loop.drafter, None, LONGEST)  # type: ignore[misc]
    loop.stats.n_max = LONGEST
    loop.stats.reset()
    loop.speculator.suffixes = SuffixSource(Oracle(work), has_device=False)
    loop.speculator.raises_bugs = loop.speculator.suffixes.raises_bugs = True
    if ahead:
        made.run_ahead()
    return made, work


def submit(made: Rig, work: Work, n: int, seed: int = 0) -> list[Heard]:
    heard = []
    for i in range(made.loop.n_slot):
        prompt = random.Random(seed + i).choices(range(256), k=9)
        heard.append(made.submit(prompt, n))
        work.texts[i] = [*prompt, *text_after(prompt, n + LONGEST + 2)]
    return heard


def finish(made: Rig, heard: Sequence[Heard], work: Work, n: int) -> None:
    made.run()
    for i, h in enumerate(heard):
        assert h.tokens == work.texts[i][9 : 9 + n], "the text is the target's"


@pytest.mark.parametrize("np", [3, slow(1), slow(10)])
def test_at_1_05_tokens_a_round_and_half_a_round_of_the_hosts_time_drafting_stops_and_its_work_too(
    np: int,
) -> None:
    rng, n = random.Random(3), 700
    made, work = make(np, 0.5 * ROUND_MS, lambda slot: 1 if rng.random() < 0.05 else 0)
    heard = submit(made, work, n)
    finish(made, heard, work, n)
    n_round, stats = made.loop.stats.rounds, made.loop.stats
    assert 0 < len(work.lookups) < 0.03 * n_round
    assert work.n_piece < 0.03 * n_round + 20 * np
    late = stats.draft_ms / (stats.draft_ms + stats.verify_ms)
    assert late < 0.02, "share of the host's time"
    assert stats.suffix_drafts < 0.03 * n_round * np


@pytest.mark.parametrize("np", [3, slow(1), slow(10)])
def test_at_3_tokens_a_round_it_continues(np: int) -> None:
    n = 400
    made, work = make(np, 0.5 * ROUND_MS, lambda slot: 2)
    heard = submit(made, work, n)
    finish(made, heard, work, n)
    stats = made.loop.stats
    assert len(work.lookups) > 0.9 * stats.rounds
    assert stats.rounds < n / 2.5
    assert n * np / (1e3 * work.clock.now) > 1.6 * np / (ROUND_MS + ROW_MS * np), "of plain decoding"


def test_it_tries_again_and_continues_if_texts_have_changed() -> None:
    good = [False]
    made, work = make(3, 0.5 * ROUND_MS, lambda slot: 4 if good[0] else -1)
    heard = submit(made, work, 1200)
    loop = made.loop
    while loop.stats.rounds < 60:
        loop.step()
    assert not loop.controller.looks_up
    assert {slot.draft_reason for slot in loop.slot_rows(256)} == {RESTS}
    good[0], n = True, len(work.lookups)
    while len(work.lookups) < n + 20:
        loop.step()
    rounds = loop.stats.rounds
    assert rounds < 60 + 1.5 * LIMIT / SHARE + 40, "within the time that pays the debt"
    finish(made, heard, work, 1200)
    assert len(work.lookups) - n > 0.8 * (loop.stats.rounds - rounds)


def test_rounds_run_ahead_while_it_rests() -> None:
    rng, launched = random.Random(1), list[int]()
    made, work = make(3, 0.5 * ROUND_MS, lambda slot: 0 if rng.random() < 0.5 else -1, ahead=True)
    made.watch_launches(launched)
    heard = submit(made, work, 400)
    finish(made, heard, work, 400)
    assert len(work.lookups) < 60 and len(launched) > 300


def test_time_that_the_device_hides_is_no_cost() -> None:
    """A lookup beside a forward that still runs when the next one is launched."""
    made, work = make(1, 0.5 * ROUND_MS, lambda slot: -1)
    heard, host = submit(made, work, 60), made.loop.controller.host

    class Running:
        is_over = False

    class Over:
        is_over = True

    while made.loop.stats.rounds < 4:
        made.loop.step()
    before = host.debt
    for launched, costs in ((Running(), False), (Over(), True)):
        made.loop.speculator.beside = 3.0
        made.loop.speculator.count_beside(launched, 1)  # type: ignore[arg-type]
        assert (host.debt > before + 2.5) == costs
    finish(made, heard, work, 60)


def test_fixed_lengths_and_rounds_without_times_are_never_refused() -> None:
    c = Controller(3, 5, n_own=0)
    c.looked_up(1e6, 3)
    assert c.looks_up, "nothing is known of rounds"
    for _ in range(2):
        c.costs.verify.add(3, 10.0)
    c.looked_up(30.0, 3)
    assert not c.looks_up
    c.fixed = True
    assert c.looks_up
    c.fixed = False
    assert not c.looks_up
    c.timed_beside(30.0 / SHARE)
    assert c.looks_up


# -- n-grams ---------------------------------------------------------------------------------------------------------


class Slow(NGram):
    """N-grams with a set cost, which the controller pays for finding nothing, too."""

    def __init__(self, work: Work) -> None:
        super().__init__(3, LONGEST)
        self.work = work

    def draft(self, requests: Sequence[object]) -> list[Drafts]:
        self.work.clock.now += 1e-3 * self.work.host_ms
        self.work.lookups.append(len(requests))
        found = []
        for request in requests:
            n_right, slot = self.work.right(request.slot.index), request.slot  # type: ignore[attr-defined]
            behind = self.work.texts[slot.index][slot.n_past + 1 :][: request.n_draft]  # type: ignore[attr-defined]
            found.append(Drafts([] if n_right < 0 else behind))
        return found


@pytest.mark.parametrize(("share", "goes_on"), [(0.05, False), (1.0, True)])
def test_n_grams_that_find_nothing_are_asked_rarely(share: float, goes_on: bool) -> None:
    rng, n = random.Random(3), 600
    work = Work(Clock(), 0.5 * ROUND_MS, lambda slot: 0 if rng.random() < share else -1)
    made = fake_rig(3, OnHost("ngram", Slow(work)), ctx=1600)
    work.clock = timed(made.loop, ROUND_MS, ROW_MS)
    made.loop.controller.__init__(3, LONGEST, n_own=LONGEST)  # type: ignore[misc]
    heard = submit(made, work, n)
    finish(made, heard, work, n)
    share_asked = len(work.lookups) / made.loop.stats.rounds
    assert share_asked > 0.8 if goes_on else share_asked < 0.15
