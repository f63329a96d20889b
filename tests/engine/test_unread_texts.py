"""Requests that the drafter does not read, and that it joins later: the same texts, pages and checkpoints, with drafts or without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_prefix_reuse as reuse
import test_same_text_models as same
import torch
from engine_rig import FIXTURES, Rig, every_rig, plain_rig
from known_texts import N_TEXT, known_texts

from pyspec.draft.chain import Chain
from pyspec.engine.policy.controller import MUTE, UNREAD
from pyspec.engine.policy.rests import DraftReading
from pyspec.slots.drafts import DraftRequest
from pyspec.slots.table import Slot

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
    for _ in range(12):
        r.loop.step()
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
    for _ in range(5 if r.loop.lookahead.on else 3):
        r.loop.step()
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
