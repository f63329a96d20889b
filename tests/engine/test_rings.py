"""Windows keep only their window: texts are those of whole pages (`--swa-full`), and no key behind a window is read.

Rings are spoilt before every forward: all rows but those that the window of the forward's first row may see become NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_fakes import FAKES
from engine_rig import FIXTURES, GREEDY, Heard, Rig, rig, rig_for
from rewrite import rewrite

from pyspec.config import EngineSettings
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.memory_plan import checkpoint_bytes
from pyspec.engine.plan.planned_bytes import device_checkpoints, plan_memory, start_bytes
from pyspec.errors import OutOfBounds, PairError
from pyspec.models.target import Out
from pyspec.request import Delta, SamplingParams
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.parts import CacheSizes
from pyspec.slots.ring_pool import RingPool
from pyspec.slots.round import plan_round
from pyspec.slots.table import SlotTable

GEMMA3, GPT_OSS = FIXTURES / "gemma3.gguf", FIXTURES / "gpt-oss.gguf"
NAMES = ("gemma3", "gpt-oss", "gemma4-dense", "gemma4-moe", "gemma4-e")
N, CHANCES = 40, replace(GREEDY, logprobs=9)
NGRAM: dict[str, object] = {"spec_type": "ngram", "ngram_match": 1, "n_draft_fixed": True}
SMALL: dict[str, object] = {"ctx": 700, "batch": 37, "ubatch": 23, "page_size": 16}


def rings_of(r: Rig) -> list[RingPool]:
    found = [part for part in r.loop.worker.memory.parts if isinstance(part, RingPool)]
    assert found, "this is a test of rings"
    return found


def spoilt(r: Rig) -> Rig:
    """Make NaN of all rows of rings that no row of a forward may see, before each forward."""
    target, pools = r.loop.target, rings_of(r)
    run = target.run

    def spoil(batch: Batch, taps: Any = ()) -> Out:
        for pool in pools:
            for i, seq in enumerate(batch.seqs):
                at = int(batch.positions[batch.starts[i]])
                seen = pool.rows(seq.slot, max(0, at - pool.window + 1), at)
                for plane in pool.planes:
                    held = [plane[rows].clone() for rows in seen]
                    plane[seq.slot * pool.n_seat :][: pool.n_seat] = torch.nan
                    for rows, x in zip(seen, held, strict=True):
                        plane[rows] = x
        return run(batch, taps)

    target.run = spoil  # type: ignore[method-assign]
    return r.call_by_call()


def prompts() -> list[tuple[int, ...]]:
    """Of odd lengths, from less than a window to many rings; the second half repeats, so that n-grams draft."""
    rng = random.Random(3)
    found = []
    for length in (3, 8, 9, 61, 100, 171, 333, 17, 250):
        half = rng.choices(range(256), k=-(-length // 2))
        found.append((*half, *half)[:length])
    return found


Said = tuple[list[int], list[float]]
"""Tokens, and the log probabilities of each one's best alternatives: texts of the tiny Gemmas are one token again and again."""


def said(h: Heard) -> Said:
    assert h.error is None, h.error
    found = [entry for e in h.events if isinstance(e, Delta) for entry in e.logprobs]
    return h.tokens, [x for entry in found for _, x in entry.top]


def assert_same(h: Heard, want: Said) -> None:
    tokens, chances = said(h)
    assert tokens == want[0], f"a prompt of {len(h.request.prompt)} in slot {h.slot}"
    if chances:
        off = np.abs(np.array(chances) - np.array(want[1]))
        assert off.max() < 2e-3, f"log probabilities are off by {off.max()}"


@cache
def whole_texts(path: Path) -> dict[tuple[int, ...], Said]:
    """The prompts with what one slot says that keeps whole pages."""
    r = rig(path, spec_type="none", ctx=700, swa_full=True)
    assert not r.loop.worker.memory.needs_state
    return {p: said(r.generate(p, N, CHANCES, cache_prompt=False)) for p in prompts()}


def all_at_once(r: Rig, path: Path, n: int = 9, params: SamplingParams = GREEDY) -> list[Heard]:
    texts = dict(list(whole_texts(path).items())[:n])
    heard = r.all(texts, N, params)
    for h, text in zip(heard, texts.values(), strict=True):
        assert_same(h, text)
    return heard


def faked(path: Path, kind: str, **settings: object) -> Rig:
    def text(tokens: Any, n: int) -> list[int]:
        for prompt, (answer, _) in whole_texts(path).items():
            if list(tokens) == [*prompt, *answer][: len(tokens)] and len(tokens) >= len(prompt):
                return answer[len(tokens) - len(prompt) :][:n]
        return []

    return rig_for(path, FAKES[kind](5, text=text), **SMALL, **settings)


@pytest.mark.sampled(1, most=3)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("drafts", ["none", "ngram", "liar", "fickle"])
@pytest.mark.parametrize("np", [1, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_spoilt_rows_behind_a_window_change_no_text(
    name: str, np: int, drafts: str, kernels: str
) -> None:
    path = FIXTURES / f"{name}.gguf"
    settings: dict[str, object] = {"np": np, "kernels": kernels}
    if drafts in FAKES:
        r = faked(path, drafts, **settings)
    else:
        r = rig(path, **SMALL, **settings, **(NGRAM if drafts == "ngram" else {"spec_type": "none"}))
    heard = all_at_once(spoilt(r), path, params=CHANCES)
    drafted = sum(h.timings.draft_n for h in heard)
    assert (drafted > 0) is (drafts != "none")
    if drafts == "liar":
        assert not sum(h.timings.draft_n_accepted for h in heard), "every draft is taken back"


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("window", [1, 21, 33, 64, 130])
def test_any_window_goes_with_any_page(window: int, page_size: int, ahead: bool, tmp_path: Path) -> None:
    path = rewrite(GPT_OSS, tmp_path / "a.gguf", change={"gpt-oss.attention.sliding_window": window})
    r = rig(path, np=3, ctx=900, batch=29, page_size=page_size, **NGRAM)
    assert {pool.window for pool in rings_of(r)} == {window}
    spoilt(r)
    if ahead:
        r.run_ahead()
    all_at_once(r, path, n=7)


ASSISTANT = FIXTURES / "gemma4-assistant.gguf"
DRAFTERS: dict[str, tuple[str, dict[str, object]]] = {
    "assistant": ("gemma4-e", {"draft_path": ASSISTANT}),
    "draft model": ("gemma3", {"draft_path": GEMMA3, "spec_type": "draft", "n_draft_max": 3}),
    "suffix": ("gpt-oss", {"spec_type": "suffix"}),
}


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_have_the_drafts_that_they_have_beside_whole_pages(drafter: str, np: int) -> None:
    name, settings = DRAFTERS[drafter]
    path, given = FIXTURES / f"{name}.gguf", {**SMALL, "n_draft_fixed": True, **settings}
    r, whole = rig(path, np=np, **given), rig(path, np=np, swa_full=True, **given)
    assert not whole.loop.worker.memory.needs_state
    spoilt(r)
    for _ in range(2):
        drafted = [
            [(h.timings.draft_n, h.timings.draft_n_accepted) for h in all_at_once(one, path, 5, CHANCES)]
            for one in (r, whole.call_by_call())
        ]
        assert sum(n for n, _ in drafted[0]) > 0
        if np == 1 and drafter != "suffix":  # beside others, and with what was learned, rounds differ
            assert drafted[0] == drafted[1]


def test_an_assistant_with_a_longer_window_asks_for_whole_pages(tmp_path: Path) -> None:
    change = {"gemma4-assistant.attention.sliding_window": 9}
    longer = rewrite(ASSISTANT, tmp_path / "a.gguf", change=change)
    path, given = FIXTURES / "gemma4-e.gguf", {**SMALL, "draft_path": longer}
    with pytest.raises(PairError, match=r"window has 9 tokens.* of 8: add --swa-full"):
        rig(path, **given)
    assert rig(path, swa_full=True, **given).generate(prompts()[0], 5).tokens


def test_exact_rows_and_a_plain_loop_have_the_text_too() -> None:
    given: dict[str, object] = {"np": 3, "kernels": "reference", "exact": True, "plain_loop": True}
    all_at_once(spoilt(rig(GPT_OSS, **SMALL, **NGRAM, **given)), GPT_OSS, n=6)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("how", ["shared", "copied"])
def test_choices_of_one_prompt_have_a_ring_each(how: str) -> None:
    """As of one body with `n`: the first fills the cache or the others come beside it."""
    r, params = spoilt(rig(GPT_OSS, np=5, **SMALL, **NGRAM)), replace(GREEDY, temperature=0.9)
    cold = rig(GPT_OSS, np=1, ctx=700, swa_full=True, spec_type="none")
    prompt = prompts()[5]
    if how == "copied":
        r.generate(prompt, 3)
    heard = [r.submit(prompt, N, replace(params, seed=i)) for i in range(5)]
    r.run()
    texts = [h.tokens for h in heard]
    assert len({tuple(text) for text in texts}) == 5
    for i, text in enumerate(texts):
        again = cold.generate(prompt, N, replace(params, seed=i), cache_prompt=False)
        assert again.tokens == text


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", ["gpt-oss", "gemma4-e"])
def test_recorded_forwards_have_the_places_of_each_round(name: str) -> None:
    path = FIXTURES / f"{name}.gguf"
    r = rig(path, np=5, **SMALL, **NGRAM)
    all_at_once(r, path)
    assert rings_of(r) and r.loop.worker.arena is not None


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", NAMES)
def test_next_turns_and_other_ends_go_on_from_checkpoints(name: str) -> None:
    path = FIXTURES / f"{name}.gguf"
    r, cold = spoilt(rig(path, np=2, **SMALL, **NGRAM)), rig(path, ctx=700, swa_full=True)
    ask, n = partial(r.generate, n=20, params=CHANCES), 20

    def text(tokens: list[int]) -> Said:
        return said(cold.generate(tokens, n, CHANCES, cache_prompt=False))

    first = random.Random(6).choices(range(256), k=203)
    answer = ask(first).tokens
    turn = [*first, *answer, 7, 8, 9]
    h = ask(turn)
    assert h.timings.cache_n == len(first) + 19
    assert_same(h, text(turn))
    again = ask(first)
    assert again.timings.cache_n == 192, "cut near its end, at a page's end"
    assert_same(again, text(first))
    rng = random.Random(8)
    for n_match, n_cached in ((190, 0), (190, 176), (77, 0), (77, 64), (190, 176)):
        branch = [*first[:n_match], *rng.choices(range(256), k=31)]
        h = ask(branch)
        assert_same(h, text(branch))
        assert h.timings.cache_n == n_cached, "a prompt that leaves the cache is cut there"
    r.loop.cache.check(now=True)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("np", [1, 3])
def test_texts_hold_while_pages_and_checkpoints_are_evicted(np: int) -> None:
    """The pool holds the longest request and little more, and the cache of host memory nothing."""
    r = spoilt(rig(GPT_OSS, np=np, **SMALL, **NGRAM, kv_pool=700, cache_ram=0))
    for _ in range(2):
        all_at_once(r, GPT_OSS)
    assert r.loop.table.n_page_used == 0


def test_cancelled_requests_leave_the_others_their_text() -> None:
    r, texts = spoilt(rig(GPT_OSS, np=3, **SMALL, **NGRAM)), whole_texts(GPT_OSS)
    heard, rng = [], random.Random(9)
    for i, prompt in enumerate(texts):
        other = r.submit(rng.choices(range(256), k=90), N)
        heard.append(r.submit(prompt, N))
        r.steps(1 + 3 * (i % 4))
        r.loop.cancel(other.job)
    r.run()
    for h, text in zip(heard, texts.values(), strict=True):
        assert_same(h, text)


def test_a_ring_without_spare_rows_gives_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the texts above show that the spare rows are needed, and suffice."""
    monkeypatch.setattr(CacheSizes, "n_spare", 1)
    monkeypatch.setattr(RingPool, "n_spare", 0)
    r, texts = rig(GPT_OSS, np=2, **SMALL, **NGRAM), whole_texts(GPT_OSS)
    heard = r.all(texts, N)
    assert rings_of(r)[0].n_seat == 16 and [h.tokens for h in heard] != [
        text for text, _ in texts.values()
    ]


def test_a_forward_of_too_many_rows_is_refused_before_its_launch() -> None:
    table = SlotTable(2, 90, 16)
    table.n_chunk = 41
    table.acquire(table.slots[1], 500)
    assert plan_round(table, [Seq(1, 0, [1] * 41)]).n_row == 41
    for seq in (Seq(1, 0, [1] * 42), Seq(1, 3, [1] * 21, slack=21)):
        with pytest.raises(OutOfBounds, match="slot 1 rows of a forward") as e:
            plan_round(table, [seq])
        assert e.value.slot == 1


# -- memory ----------------------------------------------------------------------------------------------------------


def described(path: Path = GEMMA3, **settings: object) -> Any:
    values: dict[str, object] = {"np": 3, "kv_type": "f32", "device": "cpu", **SMALL}
    return describe(path, EngineSettings(**(values | settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["f32", "f8_e4m3"])
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "gemma4-e"])
def test_memory_is_planned_as_it_is_used(name: str, kv: str) -> None:
    """Slots, and the checkpoints that requests have left, up to the most that the plan has room for."""
    path = FIXTURES / f"{name}.gguf"
    d = described(path, kv_type=kv, **NGRAM)
    plan, kept = plan_memory(d), device_checkpoints(d) + start_bytes(d)
    r = rig(path, np=3, **{**SMALL, **NGRAM, "kv_type": kv})
    memory, states = r.loop.worker.memory, r.loop.cache.states
    assert plan.kv == memory.kv_bytes
    assert plan.state == memory.state_bytes + kept
    for prompt in prompts():
        r.generate([*prompt, *prompt][:301], 9)
    used = memory.state_bytes + states.n_bytes[0] + states.n_start_bytes
    one = checkpoint_bytes(d.own.parts(), d.sizes)
    assert plan.state - one < used <= plan.state


def test_rings_are_chosen_where_they_take_less_than_the_text() -> None:
    rows = {}
    for n_ctx in (40, 128, 256, 1000, 4000):
        d, whole = described(ctx=n_ctx), described(ctx=n_ctx, swa_full=True)
        rows[n_ctx] = plan_memory(d).kv + plan_memory(d).state, plan_memory(whole).kv
        assert rows[n_ctx][0] <= rows[n_ctx][1]
        assert not plan_memory(whole).state
    assert rows[40][0] == rows[40][1], "a ring would be longer"
    assert rows[4000][0] < rows[4000][1] / 4, "six of seven blocks have a window"
    grows = rows[4000][0] - rows[1000][0]
    assert grows == pytest.approx((rows[4000][1] - rows[1000][1]) / 7), "one block grows"


def test_a_slot_has_no_rows_of_another() -> None:
    r = rig(GEMMA3, np=3, **SMALL, **NGRAM)
    pool = rings_of(r)[0]
    seats = [run for slot in range(3) for run in pool.rows(slot, 5, 5 + pool.n_seat)]
    assert sorted(i for run in seats for i in range(run.start, run.stop)) == list(range(pool.null_row))
    assert pool.n_row == pool.null_row + 16
    for slot, first, end in ((3, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 0, pool.n_seat + 1)):
        with pytest.raises(OutOfBounds):
            pool.rows(slot, first, end)
