"""Decisions under requests of every kind: they never fail, exceed no cap and starve nobody; and one that failed would cost its round's drafts alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from draft_fakes import Oracle, text_after
from engine_rig import fake_rig
from plans import choose
from sampling import slow

from pyspec.constrain.phrases import Offer
from pyspec.draft.blocks import BlockLength
from pyspec.draft.drafter import Drafter, DraftPlan
from pyspec.draft.suffix_draft import NO_DRAFT, Promise, SuffixDraft
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.draft.suffix_text import PlainTexts
from pyspec.engine.loop.round import pauses
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.engine.policy import plan as plans_of
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.plan import (
    FAILED,
    NO_DRAFTER,
    NO_OFFER,
    PAUSE_MS,
    Prompt,
    PromptRules,
    RoundPlan,
    RoundState,
)
from pyspec.errors import SlotError
from pyspec.request import SamplingParams
from pyspec.sample.sampler import SlotSampler
from pyspec.slots.arena import bucket_of
from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.table import Slot, SlotTable

CHUNK, LONG, FREE = (
    64,
    600,
    128,
)  # tokens of a prompt: in a forward, of a long one, and of those that do not rest
SAMPLED = SlotSampler(SamplingParams(temperature=0.8, seed=1), 300, frozenset(), ())
GREEDY = SlotSampler(SamplingParams(temperature=0.0), 300, frozenset(), ())


class Grammar:
    """Offers tokens, and refuses some, at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.book = rng, None

    def usable(self, drafts: Sequence[int]) -> list[int]:
        return list(drafts[: self.rng.choice([0, 1, 2, 9])])

    def offer(self, most: int, behind: Sequence[int] = ()) -> Offer:
        chances = [self.rng.choice([0.2, 0.6, 0.95])] * min(most, self.rng.choice([0, 0, 1, 3, 8]))
        return Offer(
            [7] * len(chances),
            chances,
            list(chances),
            [SimpleNamespace(add=lambda *a: None)] * len(chances),
        )  # type: ignore[list-item]


class Suffixes(SuffixDrafts):
    """Finds tokens at random."""

    def __init__(self, rng: random.Random, n_draft: int) -> None:
        super().__init__(n_draft, kind=PlainTexts())
        self.rng = rng

    def draft_all(self, wishes: Sequence[tuple[Slot, int, int]]) -> list[SuffixDraft]:
        found = [self.rng.choice([0, 0, 2, 5, 15]) for _ in wishes]
        p = self.rng.choice([0.1, 0.5, 0.9])
        lengths = [min(n, most) for n, (_, _, most) in zip(found, wishes, strict=True)]
        return [SuffixDraft([9] * n, [p] * n, Promise()) if n else NO_DRAFT for n in lengths]


@dataclass
class Erratic(Drafter):
    """Drafts what it is asked for, sometimes less, and sometimes fails. It can join requests."""

    rng: random.Random
    plan: DraftPlan
    on_host: bool  # type: ignore[misc]
    asked: list[DraftRequest] = field(default_factory=list)
    has_windows: ClassVar[bool] = True

    @property
    def can_join(self) -> bool:
        return True

    def draft(self, asks: Sequence[DraftRequest]) -> list[Drafts]:
        self.asked = list(asks)
        if self.rng.random() < 0.002:
            raise SlotError("a wild id")
        lengths = [self.rng.choice([a.n_draft, a.n_draft, a.n_draft // 2]) for a in asks]
        tells = self.plan.tells and asks[0].tells
        return [
            Drafts([5] * n, sure=[self.rng.random() for _ in range(n)] if tells else None)
            for n in lengths
        ]


@dataclass
class Request:
    """A request in a slot, as the policies see it."""

    slot: Slot
    n_left: int
    n_prefill: int
    request: Any
    constraint: Any
    sampler: SlotSampler
    started: float
    anchor: int | None = None
    n_cached: int = 0
    images: tuple[()] = ()

    @property
    def is_decoding(self) -> bool:
        return self.anchor is not None

    @property
    def id(self) -> str:
        return str(id(self))

    @property
    def todo(self) -> tuple[int, int]:
        return self.n_prefill - self.slot.n_past, 0

    @property
    def is_unread(self) -> bool:
        return not self.slot.n_past


class Play:
    """A server on paper: the true speculator and controller, random requests, and a clock."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        n_slot, n_suffix = rng.choice([1, 2, 5, 8, 10, 16, 24]), rng.choice([0, 0, 6, 15])
        n_own = rng.choice([0, 1, 2, 3, 7]) if n_suffix else rng.choice([1, 3, 7])
        chained, tells = rng.random() < 0.6, rng.random() < 0.3
        block = None if chained or rng.random() < 0.5 else BlockLength(n_own + 1)
        on_host = rng.random() < 0.2
        self.plan = DraftPlan(
            kind="erratic", n_draft=n_own, n_waiting=int(chained), block=block, tells=tells and not chained,
            n_ctx=rng.choice([0, 0, 120]), draws=rng.choice(["argmax", "coupled"]),
        )  # fmt: skip
        self.table = SlotTable(n_slot, 64 * n_slot, 32)
        self.drafter = Erratic(rng, self.plan, on_host) if n_own else None
        graphs = rng.random() < 0.5
        costs = Costs(Timer((lambda n: bucket_of(n, 256) or bucket(n)) if graphs else bucket))
        self.controller = Controller(
            n_slot, max(n_own, n_suffix), n_own=n_own, chained=chained, block=block,
            fixed=rng.random() < 0.1, costs=costs,
        )  # fmt: skip
        worker = SimpleNamespace(
            device=torch.device("cpu"), plan=self.plan, table=self.table, drafter=self.drafter
        )
        self.now = 0.0
        suffixes = Suffixes(rng, n_suffix) if n_suffix else None
        self.speculator = Speculator(
            worker, self.controller, Stats(self.controller.n_max), suffixes, lambda: self.now  # type: ignore[arg-type]
        )  # fmt: skip
        tpot, ttft = rng.choice([(0.0, 0.0), (30.0, 400.0)])
        graph_of = rng.choice([plans_of.no_graph, lambda n: n if n <= 96 else None])
        self.controller.rules = PromptRules(CHUNK, 2 * CHUNK, tpot, ttft, n_free=FREE, graph_of=graph_of)
        self.controller.plan = self.planned  # type: ignore[method-assign]
        self.jobs: dict[int, Request] = {}
        self.row_ms, self.pass_ms = rng.choice([0.02, 0.2, 2.0]), rng.choice([0.3, 3.0])
        self.phase()

    def planned(self, state: RoundState) -> RoundPlan:
        """The plan, which asking again does not change."""
        state = replace(state, offers=cache(state.offers))
        made = plans_of.plan(state)
        assert plans_of.plan(state) == made
        return made

    def phase(self) -> None:
        """From now on requests and texts are of other kinds."""
        rng = self.rng
        self.mute, self.held, self.long = (rng.choice([0.0, 0.0, 0.2, 1.0]) for _ in range(3))
        self.chance, self.load = rng.choice([0.01, 0.1, 0.5, 0.9]), rng.choice([0.1, 0.5, 1.0])
        self.long *= 0.2
        if rng.random() < 0.2:
            for job in list(self.jobs.values()):
                self.end(job)

    def seat(self) -> None:
        rng, slot = self.rng, self.table.pick()
        if slot is None:
            return
        n_prompt = rng.randint(LONG + 1, 1500) if rng.random() < self.long else rng.randint(1, 200)
        self.table.acquire(slot, 2048)
        n_max = 0 if rng.random() < self.mute else rng.choice([None, None, None, 1, 5])
        self.jobs[slot.index] = job = Request(
            slot, rng.choice([1, 2, 30, 200]), n_prompt, SimpleNamespace(n_draft_max=n_max),
            Grammar(rng) if rng.random() < self.held else None, rng.choice([GREEDY, SAMPLED]), self.now,
        )  # fmt: skip
        grammar = rng.choice(["", "a", "b"]) if job.constraint is not None else ""
        self.speculator.begin(slot, None, grammar=grammar, may_draft=n_max != 0)

    def end(self, job: Request) -> None:
        self.speculator.end(job.slot)
        del self.jobs[job.slot.index]
        self.table.release(job.slot)
        job.slot.tokens.clear()

    def cap(self, job: Request) -> int:
        """Most tokens that the drafter may draft."""
        speculator, index, most = self.speculator, job.slot.index, job.request.n_draft_max
        if not speculator.follows(index) or not speculator.read.may_draft(job.slot):
            return 0
        n = min(self.plan.n_draft, job.n_left - 1, self.plan.n_draft if most is None else most)
        return max(0, min(n, self.plan.n_ctx - job.slot.n_past) if self.plan.n_ctx else n)

    def round(self) -> None:
        rng, speculator = self.rng, self.speculator
        if rng.random() < 0.01:
            self.phase()
        while len(self.jobs) < self.load * len(self.table.slots) and rng.random() < 0.7:
            self.seat()
        jobs = list(self.jobs.values())
        decoding = [job for job in jobs if job.is_decoding]
        if rng.random() < 0.3:  # a round that was to be launched ahead: it is, or it waits
            if not speculator.has_offers(decoding) and len(decoding) == len(jobs):
                speculator.plan_ahead(decoding, [1] * len(decoding))
            speculator.planned = speculator.planned if rng.random() < 0.5 else None
        if rng.random() < 0.003 and decoding:
            speculator.lose_track([rng.choice(decoding).slot], SlotError("a guard"))
        made, awake = speculator.plan(jobs, self.now)
        prompts = [job for job in awake if not job.is_decoding]
        if made.alone is not None:
            self.alone(*prompts)
            return
        assert len(prompts) + len(made.paused) + len(decoding) == len(jobs)
        rows = made.rows if decoding and prompts else 2 * CHUNK
        assert 1 <= rows <= 2 * CHUNK
        chunks = [min(job.n_prefill - job.slot.n_past, max(rows // len(prompts), 1)) for job in prompts]
        if self.drafter is not None:
            self.drafter.asked = []
        drafts = speculator.draft(decoding, made) if decoding else {}  # type: ignore[arg-type]
        self.check(decoding, drafts)
        self.run(decoding, prompts, chunks, drafts)

    def alone(self, job: Request) -> None:
        """A prompt is read by itself."""
        ms = 3.0 + self.row_ms * job.n_prefill
        self.now += 1e-3 * ms
        job.slot.tokens.extend([3] * job.n_prefill)
        job.anchor = 3
        self.controller.landed_alone(job.n_prefill, ms, others=len(self.jobs) > 1)
        self.controller.timed_beside(ms)

    def check(self, decoding: Sequence[Request], drafts: dict[int, Drafts]) -> None:
        caps = {job.slot.index: self.cap(job) for job in decoding}
        for ask in self.drafter.asked if self.drafter is not None else ():
            assert ask.n_draft <= caps[ask.slot.index], "beyond a slot's cap"
        for job in decoding:
            n, most = len(drafts.get(job.slot.index, Drafts()).tokens), job.request.n_draft_max
            assert n <= job.n_left - 1 and (most is None or n <= most)
        assert not getattr(speculator := self.speculator, "failed", ()), speculator.failed

    def run(
        self,
        decoding: Sequence[Request],
        prompts: Sequence[Request],
        chunks: Sequence[int],
        drafts: dict[int, Drafts],
    ) -> None:
        """The forward, its verdicts, and what the policies are told."""
        rng, c = self.rng, self.controller
        lengths = {job.slot.index: len(drafts.get(job.slot.index, Drafts()).tokens) for job in decoding}
        n_row, n_read = len(decoding) + sum(lengths.values()), sum(chunks)
        live = [a.n_draft for a in self.drafter.asked if a.n_draft] if self.drafter is not None else []
        draft_ms = self.pass_ms * (max(live, default=0) if c.chained else bool(live))
        ms = (5.0 + self.row_ms * (n_row + n_read)) * (1 + 0.1 * rng.random())
        pause = 10_000.0 if rng.random() < (0.03 if prompts else 0.003) else 0.0
        self.now += 1e-3 * (ms + draft_ms + pause)
        n_long = sum(pauses(job, c.rules) for job in prompts)  # type: ignore[arg-type]
        c.landed(n_row + n_read, ms + pause, n_read, len(decoding), n_long)
        usual = max(PAUSE_MS, 2 * (10.0 + self.row_ms * (3 * CHUNK + 16 * len(self.jobs))))
        assert c.owed <= usual * len(decoding) or not decoding, (
            "a prompt waits for a pause of the machine"
        )
        for job, n in zip(prompts, chunks, strict=True):
            job.slot.tokens.extend([3] * n)
            if job.slot.n_past >= job.n_prefill:
                job.anchor = 3
        self.speculator.read.observed([SimpleNamespace(slot=job.slot.index) for job in decoding])  # type: ignore[misc]
        for job in decoding:
            n = lengths[job.slot.index]
            n_right = next((i for i in range(n) if rng.random() >= self.chance), n)
            self.speculator.judge(job.slot.index, n, n_right)
            job.slot.tokens.extend([3] * (1 + n_right))
            job.n_left -= 1 + n_right
            if job.n_left <= 0 or rng.random() < 0.003 or job.slot.n_past > 2000:
                self.end(job)
        if prompts:
            c.timed_beside(ms)
        elif decoding:
            c.timed(n_row, ms + pause, len(live), max(live, default=0), draft_ms)


@pytest.mark.parametrize("seed", [*range(12), *(slow(seed) for seed in range(12, 300))])
def test_random_requests_never_break_a_decision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mute, unread, sampled, under grammars, long, joined, ended, cut and lost requests; drafters of all kinds; pauses of ten seconds."""
    monkeypatch.setattr(plans_of, "LONG", LONG)
    play = Play(seed)
    for _ in range(1200):
        play.round()


def test_requests_that_all_forbid_drafts_beside_a_drafter_that_rests() -> None:
    c = Controller(16, 3, chained=True)
    for slot in range(16):
        c.begin(slot, may_draft=False)
    c.unread.update(range(4, 16))
    c.reading.n_idle = 1000
    assert c.reading.rests
    for _ in range(100):
        assert choose(c, [(slot, 0) for slot in range(16)]) == [0] * 16
        c.timed(16, 5.0, 0, 0, 0.0)


def test_an_offer_that_is_taken_back_is_not_drafted_beyond_the_slot_s_cap() -> None:
    c = Controller(1, 3, n_own=2, chained=True)
    for _ in range(300):
        picked = choose(c, [(0, 0)], {0: [0.9, 0.8, 0.7]})
        assert 0 in c.offered or picked == [0]
        c.timed(1 + picked[0], 5.0, 0, 0, 0.0)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_long_prompt_does_not_wait_for_a_pause_of_the_machine(at: int) -> None:
    """Sixty-four streams, chunks of 100 ms, and a pause of ten seconds in one of them."""

    def read(pause_at: int) -> float:
        c, now, n_chunk = Controller(64, 0, rules=PromptRules(CHUNK, CHUNK, n_free=FREE)), 0.0, 0
        assert c.rules.pauses(90_000, 20_000)
        while n_chunk < 5:
            state = RoundState(c, [(slot, 0) for slot in range(64)], [Prompt(70_000, pauses=True)])
            made = c.plan(state)
            c.take(state, made)
            n = 1 - len(made.paused)
            ms = 10.0 + n * (100.0 + 10_000.0 * (n_chunk == pause_at))
            now, n_chunk = now + 1e-3 * ms, n_chunk + n
            c.landed(64 + n * CHUNK, ms, n * CHUNK, 64, n)
            if not n:
                c.timed(64, ms, 0, 0, 0.0)
        return now

    assert read(-1) < 30.0 and read(at) < 2 * read(-1) + 10.0


DECISIONS = """controller.plan controller.take controller.begin controller.record controller.timed controller.timed_beside
controller.landed controller.gave turns.awake speculator._find_offers speculator.take speculator.most speculator._requests
speculator._cut"""


@pytest.mark.parametrize("name", DECISIONS.split())
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_decision_that_fails_costs_drafts_and_no_request(
    name: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a process of its own, where a bug ends the engine. It is logged once."""
    r, rng = fake_rig(3, Oracle(5), ubatch=8), random.Random(name)
    r.loop.raises_bugs = True
    if is_ahead:
        r.run_ahead()
    *path, last = name.split(".")
    owner, n_failed = reduce(getattr, path, r.loop), 0
    decide = getattr(owner, last)

    def fails(*args: object, **kwargs: object) -> object:
        nonlocal n_failed
        if rng.random() < 0.5:
            n_failed += 1
            raise IndexError("a bug")
        return decide(*args, **kwargs)

    monkeypatch.setattr(owner, last, fails)
    prompts = [[i, *range(2, 4 + 9 * i)] for i in range(9)]
    heard = [r.submit(prompt, 20, n_draft_max=0 if i == 4 else None) for i, prompt in enumerate(prompts)]
    r.run()
    assert [h.tokens for h in heard] == [text_after(prompt, 20) for prompt in prompts]
    lines = [line for line in caplog.records if line.exc_info]
    assert 1 <= len(lines) <= 2 and r.loop.stats.guard_trips == n_failed
    assert sum(h.timings.draft_n for h in heard) > 0 and not heard[4].timings.draft_n


def test_a_broken_grammar_offers_nothing_and_the_choice_for_others_stands() -> None:
    """What is wrong with one request's grammar does not make the estimates of others start anew."""
    play = Play(3)
    while not any(job.is_decoding for job in play.jobs.values()):
        play.round()
    texts = play.controller.texts
    job = next(job for job in play.jobs.values() if job.is_decoding)
    job.constraint, job.n_left, job.request.n_draft_max = SimpleNamespace(), 50, None
    made, _ = play.speculator.plan([job], 0.0)  # type: ignore[list-item]
    play.speculator.draft([job], made)  # type: ignore[list-item]
    assert play.speculator.failed == {("a grammar's offer", "AttributeError")}
    assert play.controller.texts is texts


def test_reasons_name_what_is_the_case() -> None:
    for n_max, reason in ((0, NO_DRAFTER), (6, NO_OFFER)):
        c = Controller(1, n_max, n_own=0)
        choose(c, [(0, 0)])
        assert c.lanes[0].reason == reason
    play = Play(0)
    play.speculator.decide("it", lambda: [][0], None)
    assert {lane.reason for lane in play.controller.lanes} == {FAILED}
