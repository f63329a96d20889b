"""Requests that a drafter does not read: when, how they are joined, and that texts stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import test_prefix_reuse as reuse
import test_same_text_models as same
import torch
from engine_rig import FIXTURES, Rig, every_rig, plain_rig
from known_texts import N_TEXT, known_texts
from plans import choose

from pyspec.draft.chain import Chain
from pyspec.engine.loop.read_slots import ReadSlots
from pyspec.engine.policy import controller as policy
from pyspec.engine.policy.controller import Controller, DraftReading
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.plan import MUTE, UNREAD, RoundState
from pyspec.slots.arena import bucket_of
from pyspec.slots.drafts import DraftRequest
from pyspec.slots.table import Slot, SlotTable

N_DRAFT = 3


@dataclass
class Joins:
    """A drafter that can join: it notes all calls."""

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
        slots = [s for s in self.table.slots if s.busy]
        caps = [(s.index, N_DRAFT if self._may_draft(s) else 0) for s in slots]
        state = RoundState(
            self.controller, caps, busy=[s.index for s in slots], lost=self.mute - self.controller.mute
        )
        made = self.controller.plan(state)
        self.controller.take(state, made)
        for index in made.joins:
            self.read.join(self.table.slots[index])
        picked = [n for _, n in made.drafts]
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
    for _ in range(policy.REST_AFTER - 1):
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
    r.n_idle = policy.REST_AFTER
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
    for rest_after in (0, policy.REST_AFTER):
        monkeypatch.setattr(policy, "REST_AFTER", rest_after)
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
        picked = choose(s.controller, caps, offers)
        n_offered += any(picked)
        s._timed(16 + sum(picked), 0, 0)
    assert n_offered > 100 and s.controller.reading.rests


QWEN35 = FIXTURES / "qwen35.gguf"


class Scripted(DraftReading):
    """Rests while `resting`, and reads the requests that `reads` allows."""

    resting = False
    reads: Callable[[int], bool] = staticmethod(lambda n_read: False)

    @property
    def rests(self) -> bool:
        return self.resting

    def wants(self, n_read: int, n_busy: int) -> bool:
        return not self.rests or self.reads(n_read)


class Moody(Scripted):
    """Rests and reads at random."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    @property
    def rests(self) -> bool:
        return self.rng.random() < 0.8

    def wants(self, n_read: int, n_busy: int) -> bool:
        return self.rng.random() < 0.4


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def counts(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """Every rig's drafter reads requests at random, and joins others at random; how often."""
    found = {"unread": 0, "joined": 0}

    def moody(r: Rig) -> None:
        r.loop.controller.reading = Moody()
        read = r.loop.speculator.read
        begin, join = read.begin, read.join

        def begun(slot: Slot, saved: object | None, n_unread: int) -> None:
            begin(slot, saved, n_unread)
            found["unread"] += slot.index in read.unread

        def joined(slot: Slot) -> None:
            join(slot)
            found["joined"] += 1

        read.begin, read.join = begun, joined  # type: ignore[method-assign]
        if request.param:
            r.run_ahead()
            r.overwrite_results()

    with every_rig(moody):
        yield found


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    ("kind", "np"), [("mtp", 3), ("mtp", 5), ("mtp-suffix", 5), ("mtp3-deepseek4", 5), ("mtp", 10)]
)
def test_same_text_with_staggered_joins(kind: str, np: int, counts: dict[str, int]) -> None:
    same.test_same_text_with_staggered_joins(kind, np)
    assert counts["unread"] > 1 and counts["joined"] > 0


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("ubatch", [7, 512])
def test_prompts_with_a_common_part(ubatch: int, counts: dict[str, int]) -> None:
    reuse.test_prompts_with_a_common_part_keep_their_text_whichever_came_before("mtp", ubatch)
    assert counts["unread"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 69, 100])
def test_prompts_that_come_again(n: int, counts: dict[str, int]) -> None:
    reuse.test_a_prompt_that_comes_again_is_taken_from_the_cache_and_has_the_same_text("mtp", n)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_cancelled_requests(rounds: int, counts: dict[str, int]) -> None:
    reuse.test_a_cancelled_request_can_be_gone_on_from("mtp", rounds)


def scripted(np: int, kind: str = "mtp", **settings: object) -> tuple[Rig, Scripted]:
    r = reuse.make(kind, np=np, **({"page_size": 16} | settings))
    reading = Scripted()
    r.loop.controller.reading = reading
    return r, reading


def rows_of(r: Rig) -> list[int]:
    """The slots of every row that the drafter's block computes from now on."""
    drafter, found = r.loop.drafter, []
    assert isinstance(drafter, Chain)
    lay_out = drafter._lay_out

    def watched(seqs: Any, arena: Any) -> Any:
        found.extend(seq.slot for seq in seqs for _ in seq.tokens)
        return lay_out(seqs, arena)

    drafter._lay_out = watched  # type: ignore[method-assign]
    return found


def test_of_ten_requests_the_drafter_reads_three() -> None:
    """It computes rows of those alone, and the others say why they have no drafts."""
    r, reading = scripted(10)
    reading.resting, reading.reads = True, lambda n_read: n_read < 3
    rows, texts = rows_of(r), known_texts(QWEN35)
    prompts = [*texts] * 3
    heard = [r.submit(p, N_TEXT) for p in prompts[:10]]
    r.steps(12)
    reading.reads = lambda n_read: False
    unread = {row.slot: row.draft_reason for row in r.loop.slot_rows(256)}
    assert [unread[i] == UNREAD for i in range(10)] == [False] * 3 + [True] * 7
    r.run()
    assert [h.tokens for h in heard] == [texts[p] for p in prompts[:10]]
    assert set(rows) == {0, 1, 2}
    assert [sum(h.job.drafted) > 0 for h in heard] == [h.slot < 3 for h in heard]
    assert not r.loop.controller.unread, "requests that ended are forgotten"


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_run_are_joined_where_they_stand(ahead: bool) -> None:
    """All of them draft again, from their next round but one on, and rows before that place are never computed. Ahead, counts come later."""
    r, reading = scripted(5)
    if ahead:
        r.run_ahead(defers=True)
        r.overwrite_results()
    reading.resting = True
    texts = known_texts(QWEN35)
    prompts = [*texts][:5]
    heard = [r.submit(p, N_TEXT) for p in prompts]
    while not all(len(h.tokens) > 3 for h in heard):
        r.loop.step()
    rows, reading.resting = rows_of(r), False
    began = [slot.n_past for slot in r.loop.table.slots]
    r.steps(5 if r.loop.lookahead.on else 3)
    assert all(sum(h.job.drafted) > 0 for h in heard)
    r.run()
    assert [h.tokens for h in heard] == [texts[p] for p in prompts]
    assert set(rows) == set(range(5)) and len(rows) < 5 * 4 * N_TEXT, began


def test_requests_that_forbid_drafts_are_never_joined() -> None:
    """Their reason names the request, and those beside them, joined in the middle of their prompts, draft."""
    r, reading = scripted(5, ubatch=7)
    reading.resting = True
    texts = known_texts(QWEN35)
    prompts = [*texts][:5]
    heard = [r.submit(p, N_TEXT, n_draft_max=0 if i in (1, 3) else None) for i, p in enumerate(prompts)]
    r.loop.step()
    silent = {heard[i].slot for i in (1, 3)}
    rows, reading.resting = rows_of(r), False
    reasons: dict[int, set[str]] = {i: set() for i in range(5)}
    while not all(len(h.tokens) > 2 for h in heard):
        r.loop.step()
        for row in r.loop.slot_rows(256):
            reasons[row.slot].add(row.draft_reason)
    assert {slot for slot, said in reasons.items() if MUTE in said} >= silent
    assert UNREAD not in set().union(*reasons.values())
    r.run()
    assert [h.tokens for h in heard] == [texts[p] for p in prompts]
    assert set(rows) == set(range(5)) - silent == {h.slot for h in heard if sum(h.job.drafted)}


def test_a_cached_prefix_that_was_not_read_is_hidden_from_drafts() -> None:
    """The text goes on from the cache as always; pages that it adds are read. Texts that were read before stay so."""
    r, reading = scripted(3)
    r.loop.controller.fixed = True
    cold = plain_rig(QWEN35)
    hidden: list[int] = []
    assert isinstance(r.loop.drafter, Chain)
    hide = r.loop.drafter.hide
    r.loop.drafter.hide = lambda slot, n: (hidden.append(n), hide(slot, n))[1]  # type: ignore[method-assign]
    old = reuse.random_ids(21, 85)
    first = [*old, *r.generate(old, 20).tokens]
    reading.resting = True
    new = reuse.random_ids(22, 90)
    second = [*new, *r.generate(new, 30).tokens]
    reading.resting = False
    assert not hidden
    for text, n_hidden in ((first, 0), (second, 119)):
        hidden.clear()
        turn = [*text, *reuse.random_ids(23, 9)]
        h = r.generate(turn, 20)
        assert h.timings.cache_n == len(text) - 1
        assert hidden == [n_hidden] * (n_hidden > 0)
        assert h.tokens == cold.generate(turn, 20).tokens
        nodes, _ = r.loop.table.tree.path([*turn, *h.tokens[:-1]])
        assert [node.n_unread > 0 for node in nodes] == [node.start < n_hidden for node in nodes]


def test_an_image_of_a_text_that_was_not_read_is_put_back_as_such() -> None:
    """It has the pages of an engine without a drafter; one of a text that was read has the drafter's shares."""
    r, reading = scripted(3)
    cold = plain_rig(QWEN35)
    for resting, seed in ((False, 61), (True, 62)):
        reading.resting = resting
        h = r.generate(reuse.random_ids(seed, 90), 20)
        text = [*h.request.prompt, *h.tokens]
        imager = r.loop.imager()
        image = imager.take(h.slot)
        assert any(head.has_share for head in image.states) is not resting
        imager.erase(h.slot)
        imager.put(h.slot, image)
        nodes, n = r.loop.table.tree.path(text)
        assert n == image.n_token == 109
        assert [node.n_unread for node in nodes] == [node.end * resting for node in nodes]
        reading.resting = False
        turn = [*text, 7, 8]
        again = r.generate(turn, 20)
        assert again.timings.cache_n == 109 and again.tokens == cold.generate(turn, 20).tokens


def test_pages_of_an_unread_twin_are_hidden_once_they_are_shared() -> None:
    """Two requests have one prompt, and the first one, which was not read, files its pages first."""
    r, reading = scripted(2, ubatch=512)
    prompt, cold = reuse.random_ids(31, 70), plain_rig(QWEN35)
    reading.resting, reading.reads = True, lambda n_read: r.loop.table.slots[1].busy and not n_read
    drafter, hidden = r.loop.drafter, []
    assert isinstance(drafter, Chain)
    hide = drafter.hide
    drafter.hide = lambda slot, n: (hidden.append((slot.index, n)), hide(slot, n))[1]  # type: ignore[method-assign]
    twins = [r.submit(prompt, 40, slot=i) for i in range(2)]
    r.loop.step()
    assert r.loop.controller.unread == {0}
    r.run()
    assert [t.tokens for t in twins] == [cold.generate(prompt, 40).tokens] * 2
    nodes, _ = r.loop.table.tree.path(prompt)
    assert [node.n_unread for node in nodes[:4]] == [16, 32, 48, 64]
    if r.loop.lookahead.on:  # counts come later
        assert any(slot == 1 and n >= 64 for slot, n in hidden), hidden
    else:
        assert (1, 64) in hidden


@pytest.mark.parametrize(("kind", "n"), [("mtp", 17), ("mtp", 40), ("mtp-deepseek4", 33)])
def test_what_is_hidden_changes_no_draft(kind: str, n: int) -> None:
    """The block's keys and values before the place where it joined may be anything."""
    drafts = []
    for noise in (0.0, 50.0):
        r, reading = scripted(1, kind)
        r.loop.lookahead.on = False  # every draft passes through `draft`
        reading.resting = True
        prompt = reuse.random_ids(41, n)
        h = r.submit(prompt, 60)
        while len(h.tokens) < 9:
            r.loop.step()
        drafter = r.loop.drafter
        assert isinstance(drafter, Chain)
        for pool in drafter.pools():
            for t in pool.tensors():
                t.copy_(noise * torch.randn(t.shape, generator=torch.Generator().manual_seed(7)))
        reading.resting = False
        asked: list[list[int]] = []
        draft = drafter.draft

        def watched(asks: list[DraftRequest], draft: Any = draft, asked: Any = asked) -> Any:
            found = draft(asks)
            asked.append([list(d.tokens) for d in found])
            return found

        drafter.draft = watched  # type: ignore[method-assign]
        r.run()
        assert len(asked) > 9
        drafts.append(asked)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("kind", "can"), [("mtp", True), ("mtp-deepseek4", True), ("dflash", False), ("ngram-llama", False)]
)
def test_which_drafters_can_join(kind: str, can: bool) -> None:
    """Others read every request: a block drafter does it in the target's graph."""
    r, reading = scripted(2, kind)
    reading.resting = True
    r.submit(reuse.random_ids(51, 20), 9)
    r.loop.step()
    assert bool(r.loop.controller.unread) == can
    r.run()


def test_with_a_cache_on_disk_all_requests_are_read() -> None:
    """Entries there have no marks."""
    r, reading = scripted(2)
    r.loop.speculator.read.disk, reading.resting = object(), True
    r.submit(reuse.random_ids(52, 20), 9)
    r.loop.step()
    assert not r.loop.controller.unread
