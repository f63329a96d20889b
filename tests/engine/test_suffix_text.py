"""Suffix drafts in the loop: the text of plain decoding, drafts that are counted by source, and lengths that pay."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import draft_fakes
import pytest
from draft_fakes import FAKES, text_after
from engine_rig import FIXTURES, Heard, Rig, fake_rig, rig
from plans import choose

from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.load import warmup
from pyspec.engine.loop.suffix_source import SuffixSource
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import NO_OFFER, preferred
from pyspec.slots.table import Slot

LONGEST = 9


@pytest.fixture(autouse=True)
def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's next token depends on the last two, of few: its text soon repeats what stood before."""

    def next_of(tokens: Sequence[int]) -> int:
        return 100 + zlib.crc32(bytes(t % 256 for t in tokens[-2:])) % 12

    monkeypatch.setattr(draft_fakes, "next_of", next_of)


def make(kind: str, np: int, *, shared: bool = False, **options: int) -> Rig:
    """A loop over the fake target with suffix drafts beside the drafter. The drafter's are of five tokens."""
    made = fake_rig(np, None if kind == "none" else FAKES[kind](5), **options)
    loop = made.loop
    loop.speculator.controller.__init__(np, LONGEST, n_own=0 if kind == "none" else 5, fixed=True)  # type: ignore[misc]
    loop.worker.n_suffix = loop.stats.n_max = LONGEST
    loop.stats.reset()
    loop.worker.__init__(loop.target, loop.memory, loop.table, loop.drafter, None, LONGEST)  # type: ignore[misc]
    drafts = SuffixDrafts(LONGEST, answer_bytes=1 << 20, shared=shared)
    loop.speculator.suffixes = SuffixSource(drafts, has_device=False)
    loop.speculator.raises_bugs = loop.speculator.suffixes.raises_bugs = True
    return made


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def assert_own_text(heard: Heard, n: int) -> None:
    assert heard.tokens == text_after(heard.request.prompt, n), heard.job.id


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain loop", "ahead"])
@pytest.mark.parametrize("np", [1, 2, 5, 8, 10])
@pytest.mark.parametrize("kind", ["none", *FAKES])
def test_same_text_with_staggered_joins_and_cancels(kind: str, np: int, is_ahead: bool) -> None:
    rig = make(kind, np, ubatch=48)
    if is_ahead:
        rig.run_ahead()
    heard, gone = [], []
    for i in range(2 * np + 1):
        heard.append(
            rig.submit(
                prompt(i, (1, 5, 15, 16, 17, 70, 100)[i % 7]), 20 + 3 * i, client=f"client {i % 3}"
            )
        )
        rig.steps(2)
        if i % 4 == 3:
            gone.append(heard.pop(-2))
            rig.loop.cancel(gone[-1].job)
    rig.run()
    for h in heard:
        assert_own_text(h, h.request.max_tokens)
    for h in gone:
        assert h.tokens == text_after(h.request.prompt, len(h.tokens))
    assert kind == "oracle" or rig.loop.metrics().suffix_accepted_tokens > 0
    assert kind == "none" or rig.loop.drafter.open == {}  # type: ignore[union-attr]


def test_of_a_text_that_repeats_more_tokens_come_a_round() -> None:
    n = 121
    plain, made = make("liar", 1), make("liar", 1)
    plain.loop.speculator.suffixes.drafts = None
    was, now = plain.generate(prompt(1, 9), n).timings, made.generate(prompt(1, 9), n).timings
    assert was.mean_len == 1.0 and now.mean_len > 3
    assert 0 < now.suffix_n_accepted == now.draft_n_accepted <= now.suffix_n < now.draft_n
    metrics = made.loop.metrics()
    assert metrics.suffix_draft_tokens == now.suffix_n
    assert metrics.suffix_accepted_tokens == now.suffix_n_accepted
    assert 0 < metrics.suffix_drafts <= metrics.drafts and metrics.suffix_bytes > 0
    assert plain.loop.metrics().suffix_drafts == 0


def test_a_slots_reason_names_the_source_of_its_draft() -> None:
    made, reasons = make("liar", 1), []
    made.submit(prompt(1, 9), 60)
    while not made.loop.is_idle:
        made.loop.step()
        reasons += [slot.draft_reason for slot in made.loop.slot_rows(256)]
    assert any(reason.startswith("suffix draft; ") for reason in reasons)
    assert not all(reason.startswith("suffix draft; ") for reason in reasons)


def test_drafts_may_be_longer_than_the_drafters() -> None:
    made = make("oracle", 1)
    made.loop.controller.texts.add(0, 5, 0)  # the drafter was wrong
    made.generate(prompt(1, 9), 200)
    assert max(n for widths in made.loop.target.widths[1:] for n in widths) == LONGEST + 1


def test_a_drafter_that_is_right_goes_before_a_match_of_two_tokens() -> None:
    made = make("oracle", 1)
    texts = made.loop.controller.texts
    for _ in range(60):
        texts.add(0, 5, 5)
        texts.learn()
    assert not preferred(made.loop.controller, [(0, 5)], {0: [0.5, 0.3, 0.2]})
    assert preferred(made.loop.controller, [(0, 5)], {0: [0.99] * LONGEST})


def test_clients_do_not_see_one_anothers_answers() -> None:
    """The second client's request is drafted as if it were the first one there."""

    def drafted(client: str, *, shared: bool = False) -> tuple[int, int]:
        made = make("none", 1, shared=shared)
        made.generate(prompt(1, 40), 60, client="ann")
        for _ in range(8):
            made.loop.speculator.suffixes.observe(64)
        t = made.generate(
            [*prompt(2, 9), *text_after(prompt(1, 40), 60)[:12]], 40, client=client
        ).timings
        return t.suffix_n, t.n_rounds

    alone = make("none", 1).generate([*prompt(2, 9), *text_after(prompt(1, 40), 60)[:12]], 40).timings
    assert drafted("bob")[1] == pytest.approx(alone.n_rounds, abs=3)
    assert drafted("ann")[1] <= alone.n_rounds and drafted("bob", shared=True) == drafted("ann")


def test_no_drafts_are_made_where_a_request_wants_none() -> None:
    made = make("none", 2)
    heard = [made.submit(prompt(1, 9), 60, n_draft_max=0), made.submit(prompt(1, 9), 60, n_draft_max=2)]
    made.run()
    assert heard[0].timings.draft_n == 0 < heard[1].timings.draft_n
    assert len(heard[1].timings.n_draft_used) <= 3
    for h in heard:
        assert_own_text(h, 60)


def test_if_suffix_drafts_fail_only_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make("oracle", 1)
    made.loop.speculator.suffixes.raises_bugs = False
    monkeypatch.setattr(SuffixDrafts, "draft_all", lambda *args: 1 / 0)
    assert_own_text(made.generate(prompt(1, 9), 60), 60)
    assert not made.loop.speculator.suffixes.is_on and made.loop.metrics().drafts > 0


def test_a_warm_up_teaches_nothing_and_times_the_longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    timed = Controller.timed
    monkeypatch.setattr(warmup, "BUDGET_S", 60.0)
    monkeypatch.setattr(
        Controller, "timed", lambda self, n_row, *rest: (rows.append(n_row), timed(self, n_row, *rest))
    )
    made = rig(FIXTURES / "qwen35.gguf", spec_type="mtp,suffix", suffix_n_max=12, ctx=512)
    warmup.warm_up(made.loop, made.tokenizer, made.info.n_overhang, 0)
    suffixes = made.loop.speculator.suffixes.drafts
    assert suffixes is not None and not suffixes.texts and suffixes.n_bytes == 0
    assert not any(suffixes.learned.of_text.seen)
    assert max(rows) == 13
    assert made.info.n_draft_max == 12 and "mtp, up to 3" in made.info.draft_note
    assert "suffix, up to 12 tokens" in made.info.draft_note


# -- the controller --------------------------------------------------------------------------------------------------


def timed(n_own: int, row_ms: float) -> Controller:
    """A controller that knows its times: 10 ms a round, and so much for each further row."""
    c = Controller(2, 12, n_own=n_own)
    for rows in range(1, 30):
        for _ in range(5):
            c.costs.verify.add(rows, 10 + row_ms * (rows - 1))
    for live in (1, 2):
        for _ in range(5):
            c.costs.draft.add(live, 1.0)
    return c


def test_likely_offers_are_taken_as_far_as_their_rows_pay() -> None:
    offer = [0.9**i for i in range(1, 13)]
    caps = [(0, 0), (1, 0)]
    assert choose(timed(0, 0.1), caps, {0: offer})[0] == 12
    assert 0 < choose(timed(0, 4.0), caps, {0: offer})[0] < 12
    assert choose(timed(0, 20.0), caps, {0: offer}) == [0, 0]
    assert choose(timed(0, 0.1), caps, {0: [0.01]}) == [0, 0]
    c = timed(0, 0.1)
    choose(c, [(0, 0)])
    assert c.lanes[0].reason == NO_OFFER


def test_offers_longer_than_the_drafters_stand_beside_its_drafts() -> None:
    c = timed(3, 0.05)
    n = choose(c, [(0, 3), (1, 3)], {1: [0.95**i for i in range(1, 13)]})
    assert n[1] == 12 and n[0] <= 3 and set(c.offered) == {1}


def test_declined_offers_let_rounds_run_ahead() -> None:
    """Each row costs as much as a round: no offer is taken, and rounds are launched ahead as without suffix drafts."""
    made, launched = make("none", 2), []
    made.run_ahead()
    made.watch_launches(launched)
    made.loop.controller.fixed = False
    for rows in range(1, 40):
        for _ in range(3):
            made.loop.controller.costs.verify.add(rows, 10.0 * rows)
    heard = [made.submit(prompt(i, 9), 150) for i in range(2)]
    made.run()
    for h in heard:
        assert_own_text(h, 150)
        assert h.timings.draft_n == 0
    assert len(launched) > 100


def test_a_slot_number_of_another_request_is_not_drafted_for() -> None:
    drafts = SuffixDrafts(8)
    drafts.begin(Slot(0), [1, 2, 1, 2])
    assert drafts.draft(Slot(0), 1, 4).tokens == [] and drafts.draft(Slot(3), 1, 4).tokens == []
