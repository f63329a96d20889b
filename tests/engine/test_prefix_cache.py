"""The prefix cache under speculation: the guarantees P1-P8 of a correct design, on models of every kind.

The text is that of a cold start, hits are as long with drafts as without, and filed pages never change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_fakes import EOG, Fickle, Liar, Oracle, ending_text_after, text_after
from engine_rig import FIXTURES, GREEDY, Heard, Rig, beyond, fake_rig, plain_rig, rig
from known_texts import N_TEXT, continuation, known_texts, tiny

from pyspec.draft.chain import Chain
from pyspec.engine.validate import turns
from pyspec.errors import SlotError
from pyspec.slots.drafts import Drafts
from pyspec.slots.states import Saved

QWEN35 = FIXTURES / "qwen35.gguf"
PATHS = {"llama": FIXTURES / "llama.gguf", "nemotron": FIXTURES / "nemotron_latent.gguf"}
PATHS |= {"lfm2moe": FIXTURES / "lfm2moe.gguf", "gemma4": FIXTURES / "gemma4-e.gguf"}
PATHS |= {"qwen4exp": FIXTURES / "qwen4exp-mtp.gguf", "glm5": FIXTURES / "glm5-next.gguf"}
PATHS |= {"rings": PATHS["gemma4"]}  # windows alone, not the whole text
PAGES_ALONE = ("llama", "gemma4")  # a prefix needs no checkpoint
KINDS = ["mtp", "nemotron", "dflash", "ngram", "llama", "lfm2moe", "gemma4", "rings", "qwen4exp", "glm5"]


def path_of(kind: str) -> Path:
    return tiny("qwen35") if kind == "dflash" else PATHS.get(kind, QWEN35)


def make(kind: str, **settings: object) -> Rig:
    """Drafts of fixed length; `none` after a dash turns them off."""
    name, _, off = kind.partition("-")
    drafts: dict[str, object] = {
        "mtp": {"spec_type": "mtp", "n_draft_max": 3},
        "nemotron": {"spec_type": "mtp", "n_draft_max": 2},
        "qwen4exp": {"spec_type": "mtp", "n_draft_max": 3},
        "glm5": {"spec_type": "mtp", "n_draft_max": 3},
        "dflash": {"draft_path": tiny("qwen35", drafter=True)},
    }.get(name, {"spec_type": "ngram", "ngram_match": 1})
    if off:
        drafts = {"spec_type": "none"}
    own = {"page_size": 16, "n_draft_fixed": True, "swa_full": name == "gemma4"}
    return rig(path_of(name), **{**own, **drafts, **settings})


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


@cache
def cold_rig(kind: str) -> Rig:
    return plain_rig(path_of(kind), prefix_cache=False)


def cold_text(kind: str, prompt: list[int], n: int) -> list[int]:
    """One slot, no drafter, nothing cached."""
    return cold_rig(kind).generate(prompt, n).tokens


@contextmanager
def nothing_filed_changes(r: Rig) -> Iterator[None]:
    """Bits of every filed row in every pool, and of every state, before and after."""
    table, size = r.loop.table, r.loop.table.page_size
    drafter = r.loop.drafter
    paged = [pool for pool in r.loop.memory.kv.values() if pool.paged]
    pools = [*paged, *(drafter.pools() if drafter is not None else ())]

    def rows() -> dict[object, list[torch.Tensor]]:
        return {
            node: [
                t[: len(node.tokens) // p.tokens_per_row].clone()
                for p in pools
                for t in p.page(node.page, size)
            ]
            for node in table.tree.nodes()
        }

    def states() -> dict[object, list[torch.Tensor]]:
        found = [s for node in table.tree.nodes() for s in node.states.values()]
        return {s: [t.clone() for t in both(s.content)] for s in found}

    def both(content: object) -> list[torch.Tensor]:
        assert isinstance(content, Saved)
        return content.checkpoint.tensors

    before = {**rows(), **states()}
    assert before
    yield
    after = {**rows(), **states()}
    common = before.keys() & after.keys()
    assert common
    for key in common:
        assert all(torch.equal(a, b) for a, b in zip(before[key], after[key], strict=True)), (
            "something filed was written"
        )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ubatch", [9, 512])
def test_two_slots_go_on_from_one_place_and_part_and_a_third_finds_it_as_it_was(
    kind: str, ubatch: int
) -> None:
    """P2, with the middle of a page in their common part."""
    r = make(kind, np=3, ubatch=ubatch)
    first = ids(1, 70)
    text = [*first, *r.generate(first, 20).tokens]
    turns = [[*text, *ids(seed, 1 + 9 * seed)] for seed in (2, 3, 4)]
    with nothing_filed_changes(r):
        heard = [r.submit(turn, 25, slot=i) for i, turn in enumerate(turns[:2])]
        r.run()
        heard.append(r.generate(turns[2], 25))
        again = r.generate(turns[0], 25)
    for h, turn in zip([*heard, again], [*turns, turns[0]], strict=True):
        assert h.tokens == cold_text(kind, turn, 25)
    third = heard[2].timings.cache_n
    assert [h.timings.cache_n for h in heard[:2]] == [89, 89]
    assert third == 89 if r.loop.memory.needs_state else third >= 90, (
        "states are where they were taken, rows are anywhere"
    )
    shared = len({tuple(r.filed([*turn, *h.tokens])[:80]) for turn, h in zip(turns, heard, strict=True)})
    assert shared == 1, "five whole pages are there once"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [5, 16, 17, 66, 90])
def test_identical_prompts_at_once_and_the_same_again(kind: str, n: int) -> None:
    """P8: same-step twins, a prompt shorter than a page, a prompt that is the cached prefix exactly."""
    r, want = make(kind, np=4, ubatch=40), cold_text(kind, ids(n, n), 12)
    heard = [r.submit(ids(n, n), 12) for _ in range(4)]
    r.run()
    assert [h.tokens for h in heard] == [want] * 4
    assert r.loop.table.n_page_cached == -(-(n + 11) // 16), "what four slots computed is filed once"
    with nothing_filed_changes(r):
        again = r.generate(ids(n, n), 12)
    assert again.tokens == want and again.timings.cache_n <= n - 1
    whole = [*ids(n, n), *want]
    with nothing_filed_changes(r):
        exact, more = r.generate(whole[:-1], 12), r.generate(whole, 12)
    assert exact.tokens == cold_text(kind, whole[:-1], 12) and more.tokens == cold_text(kind, whole, 12)
    assert more.timings.cache_n == n + 11, "all that has rows; the last token is computed"
    assert exact.timings.cache_n == (
        n + 10 if kind in PAGES_ALONE else n if n < 64 else again.timings.cache_n
    )


def conversation(r: Rig, seed: int, **request: object) -> list[tuple[int, list[int]]]:
    """(cached, tokens) of a chat of four turns, a regenerated answer, another chat, and the first one once more."""
    rng = random.Random(seed)
    out = []

    def ask(prompt: list[int], n: int, **more: object) -> list[int]:
        h = r.generate(prompt, n, replace(GREEDY, ignore_eos=False), **{**request, **more})
        out.append((h.timings.cache_n, h.tokens))
        return [*prompt, *h.tokens]

    opening = ids(seed, 80)
    text = opening
    for _ in range(4):
        text = ask([*text, *rng.choices(range(256), k=rng.randint(3, 60))], rng.randint(2, 30))
    ask(text[:-5], 20)
    for i in range(3):
        ask([*opening, *ids(seed + i + 1, 70)], 8)
    ask([*text, 7], 9, stop=("e",))
    ask(ids(seed + 9, 100), 5)
    ask([*text, 7, 8], 9)
    return out


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [10, 20])
def test_hits_are_the_same_with_speculation_and_without_and_texts_with_the_cache_and_without(
    kind: str, seed: int
) -> None:
    """P5: the drafter costs no cached token. Chunks divide neither pages nor prompts."""
    spec = conversation(make(kind, ctx=600, ubatch=37), seed)
    plain = conversation(make(f"{kind}-none", ctx=600, ubatch=37), seed)
    cold = conversation(make(kind, ctx=600, prefix_cache=False), seed)
    asked = conversation(make(kind, ctx=600), seed, cache_prompt=False)
    assert spec == plain
    assert [t for _, t in spec] == [t for _, t in cold] == [t for _, t in asked]
    assert {n for n, _ in cold} == {n for n, _ in asked} == {0}
    assert spec[0][0] == 0 and all(n > 80 for n, _ in spec[1:4]), (
        "every turn goes on from the one before"
    )
    assert spec[5][0] >= (80 if kind in PAGES_ALONE else 0) and spec[6][0] >= 64 and spec[7][0] >= 64, (
        "the common opening"
    )
    assert spec[-1][0] > 150, "the chat is still there after the other one"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ubatch", [7, 50, 512])
def test_prompts_that_share_parts_keep_their_text_in_every_order_and_chunk_size(
    kind: str, ubatch: int
) -> None:
    """P1: a state is filed where it was taken and nowhere else; three prompts that share parts, in every order."""
    r = make(kind, np=2, ubatch=ubatch, checkpoint_every=64)
    a, b = ids(1, 150), ids(2, 131)
    family = [a, b, a[:75] + b[:60], b[:129] + a[:9], a[:149]]
    want = [cold_text(kind, p, 6) for p in family]
    for order in itertools.islice(itertools.permutations(range(5), 3), 0, 60, 7):
        for i in order:
            assert r.generate(family[i], 6).tokens == want[i], f"{i} of {order}"
    heard = [(i, r.submit(family[i], 6)) for i in (0, 2, 1, 4, 3, 0)]
    r.run()
    assert all(h.tokens == want[i] for i, h in heard)


def state_of(r: Rig, n_past: int) -> Saved:
    (state,) = [
        s for node in r.loop.table.tree.nodes() for s in node.states.values() if s.n_past == n_past
    ]
    assert isinstance(state.content, Saved)
    return state.content


class Random(Fickle):
    """Proposes anything."""

    def guess(self, ask):  # type: ignore[no-untyped-def]
        return self.rng.choices(range(256), k=ask.n_draft)


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("drafter", ["oracle", "random", "mtp"])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 7])
def test_a_state_is_of_committed_tokens_only(drafter: str, rounds: int) -> None:
    """P6: all accepted, all refused, some; at the end, or cancelled in the middle with unfolded records."""
    path = QWEN35
    prompt, text = next((p, t) for p, t in known_texts(path).items() if len(p) > 60)
    r = rig(path, spec_type="mtp", n_draft_max=5, n_draft_fixed=True, page_size=16)
    mtp = r.loop.drafter
    assert isinstance(mtp, Chain)
    if drafter != "mtp":
        kind = {"oracle": Oracle, "random": Random}[drafter]
        fake = kind(5, text=lambda tokens, n: continuation(path, tokens, n))
        mtp.draft = lambda asks: [Drafts(fake.guess(ask)) for ask in asks]  # type: ignore[method-assign]
    h = r.submit(prompt, N_TEXT)
    r.steps(rounds)
    if rounds:
        r.loop.cancel(h.job)
    r.run()
    n_past = len(prompt) + len(h.tokens) - 1 if h.tokens else r.loop.stats.n_tokens_max
    assert h.tokens == text[: len(h.tokens)]
    if not h.tokens:
        return
    got = state_of(r, n_past)
    plain = plain_rig(path, page_size=16)
    plain.generate([*prompt, *h.tokens][:n_past], 1)
    want = state_of(plain, n_past)
    for a, b in zip(got.checkpoint.tensors, want.checkpoint.tensors, strict=True):
        assert (a - b).abs().max() < 1e-3
    again = r.generate([*prompt, *h.tokens, 3], 5)
    assert again.timings.cache_n == n_past


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "nemotron", "dflash", "qwen4exp", "glm5"])
def test_the_drafter_s_rows_come_with_the_pages(kind: str) -> None:
    """Whole pages shared, the middle of one copied: at the end all rows are those of a cold start."""
    r, fresh = make(kind), make(kind)
    first = ids(1, 70)
    turn = [*first, *r.generate(first, 20).tokens, *ids(2, 30)]
    heard = [one.generate(turn, 25) for one in (r, fresh)]
    assert [h.timings.cache_n for h in heard] == [89, 0]
    text = [*turn, *heard[0].tokens][:-1]
    drafters = [one.loop.drafter for one in (r, fresh)]
    assert all(drafter is not None and drafter.pools() for drafter in drafters)
    for a, b in zip(*(drafter.pools() for drafter in drafters), strict=True):  # type: ignore[union-attr]
        of_tokens = [torch.tensor(one.filed(text)) for one in (r, fresh)]
        assert len(of_tokens[0]) == len(of_tokens[1]) == len(text)
        each = a.tokens_per_row  # of these the last one makes the row
        rows = [a.rows_of(found[each - 1 :: each], 16) for found in of_tokens]
        assert (a.k[rows[0]] - b.k[rows[1]]).abs().max() < 1e-3 and (
            a.v[rows[0]] - b.v[rows[1]]
        ).abs().max() < 1e-3


@pytest.mark.parametrize("n_draft", [0, 1, 5])
def test_an_end_token_inside_an_accepted_draft_gets_no_row(n_draft: int) -> None:
    """The request leaves the same pages as without drafts."""
    drafter = Oracle(n_draft, text=ending_text_after) if n_draft else None
    ended = 0
    for seed in range(400):
        prompt = ids(seed, 5)
        if not EOG & {*ending_text_after(prompt, 12)[2:]}:
            continue
        r = fake_rig(1, drafter)
        h = r.generate(prompt, 30, replace(GREEDY, ignore_eos=False))
        assert h.finish == "eos" and h.tokens == ending_text_after(prompt, 30)[: len(h.tokens)]
        assert r.loop.stats.n_tokens_max == len(prompt) + len(h.tokens) + 1
        text = [*prompt, *ending_text_after(prompt, 30)]
        assert len(r.filed(text)) == len(prompt) + len(h.tokens)
        ended += 1
    assert ended > 10


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", [0, 13])
@pytest.mark.parametrize("device_states", [0, 1, 3])
def test_small_budgets_cost_hits_and_nothing_else(kind: str, pool: int, device_states: int) -> None:
    """P7: pages and states are evicted before a request waits for ever or fails; from the host they come back the same."""
    r = make(kind, np=3, kv_pool=pool * 16, ctx=160, ubatch=33)
    states = r.loop.cache.states
    one = sum(
        4 * (s.state[0].numel() + (s.shape.n_conv - 1) * s.shape.n_channel)
        for s in r.loop.memory.states.values()
    )
    states.limits = (device_states * one, 2 * one)
    prompts = [[*ids(i % 3, 70), *ids(i, 10 + 5 * (i % 4))] for i in range(9)]
    want = [cold_text(kind, p, 20) for p in prompts]
    for _ in range(2):
        heard = [r.submit(p, 20) for p in prompts]
        r.run(6000)
        assert [h.tokens for h in heard] == want
    assert r.loop.stats.requests_failed == 0
    if r.loop.memory.states:
        assert len(states) <= device_states + 2
    r.loop.table.clear()
    assert r.loop.table.n_page_used == r.loop.table.n_page_cached == len(states) == 0


def test_states_come_back_from_the_host() -> None:
    r = make("mtp")
    states = r.loop.cache.states
    states.limits = (0, 1 << 30)
    first = ids(1, 100)
    text = [*first, *r.generate(first, 10).tokens, 5]
    assert len(states.tiers[1]) == 2 and not states.tiers[0]
    with nothing_filed_changes(r):
        h = r.generate(text, 20)
    assert h.timings.cache_n == 109 and h.tokens == cold_text("mtp", text, 20)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "llama"])
def test_a_request_that_is_not_to_be_cached_neither_reads_nor_leaves_anything(kind: str) -> None:
    r = make(kind, np=2)
    prompt = ids(1, 90)
    r.generate(prompt, 5, cache_prompt=False)
    assert r.loop.table.n_page_cached == r.loop.table.n_page_used == len(r.loop.cache.states) == 0
    r.generate(prompt, 5)
    filed = r.loop.table.n_page_cached
    assert r.generate([*prompt, 1], 5, cache_prompt=False).timings.cache_n == 0
    assert r.loop.table.n_page_cached == filed
    off = make(kind, prefix_cache=False)
    off.generate(prompt, 5)
    assert off.loop.table.n_page_cached == 0 and off.generate(prompt, 5).timings.cache_n == 0


def test_checkpoints_lie_at_forks_turns_ends_and_now_and_then() -> None:
    """P4. Pages of 16: the third prompt with an opening finds a state where the second one left the first."""
    r = make("mtp", ctx=700, checkpoint_every=200)
    opening = ids(1, 300)
    for seed, cached in ((2, 0), (3, 192), (4, 288)):
        h = r.generate([*opening, *ids(seed, 100)], 3, n_before_turn=350 if seed == 2 else 0)
        assert h.timings.cache_n == cached
    at = sorted({n for node in r.loop.table.tree.nodes() for n in node.states})
    assert at == [192, 288, 336, 384, 402], (
        "200 on a page border, the fork, the turn, two prompts' ends, the answers' ends"
    )
    r = make("mtp", ctx=700)
    r.generate(ids(5, 500), 3, n_before_turn=350)
    at = sorted({n for node in r.loop.table.tree.nodes() for n in node.states})
    assert at == [336, 496 - 16 * (496 > 500 - 4), 502]


def test_prompts_that_come_together_share_what_is_filed_by_then() -> None:
    """Attention only: one slot is free at a time, so the second finds the whole opening, mid-page."""
    r = make("llama", np=1)
    opening = ids(1, 75)
    heard = [r.submit([*opening, 255 - i], 4) for i in range(3)]
    r.run()
    assert [h.timings.cache_n for h in heard] == [0, 75, 75]


def test_a_failed_request_leaves_nothing_but_what_others_read() -> None:
    """Its prompt was long enough to be filed in part before it failed; a request that came meanwhile continues from that."""
    r = fake_rig(2, None, ubatch=64)
    prompt = ids(1, 130)
    bad = r.submit(prompt, 40)
    r.steps(4)
    assert len(r.filed(prompt)) == 128, "the prompt's end is filed where no state is needed"
    good = r.submit([*prompt[:100], 7], 40)
    r.loop.step()
    error = SlotError("a guard tripped")
    error.slot = bad.slot
    r.loop.committer.blame(error)
    assert bad.error is error and len(r.filed(prompt)) == 96
    r.run()
    assert good.timings.cache_n == 100 and good.tokens == text_after([*prompt[:100], 7], 40)
    again = r.generate(prompt, 10)
    assert again.tokens == text_after(prompt, 10)


@pytest.mark.slow
def test_the_second_turn_of_a_long_conversation_starts_ten_times_sooner() -> None:
    """8,000 tokens, with MTP: milliseconds to the first token of either turn."""
    r = make("mtp", ctx=8300, page_size=32, **beyond(path_of("mtp")))
    first = ids(1, 8000)
    h = r.generate(first, 20)
    again = r.generate([*first, *h.tokens, *ids(2, 30)], 20)
    assert (h.timings.cache_n, again.timings.cache_n) == (0, 8019)
    assert again.timings.prompt_ms < h.timings.prompt_ms / 10


def test_the_end_of_the_context_leaves_a_place_to_go_on_from() -> None:
    r = make("mtp", ctx=96)
    prompt = ids(1, 70)
    h = r.generate(prompt, -1)
    assert h.done.truncated and len(h.tokens) == 26
    again = r.generate([*prompt, *h.tokens][:95], 1)
    assert again.timings.cache_n == 64 and again.tokens == [h.tokens[-1]]


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 2, 5])
@pytest.mark.parametrize("drafter", [Oracle, Liar, Fickle])
def test_any_traffic_with_the_cache_gives_each_its_own_text(np: int, drafter: type[Oracle]) -> None:
    """On the target that reveals misplaced rows at once: families of prompts, cancels, few pages."""
    r = fake_rig(np, drafter(4), ctx=128, n_page=11 if np > 1 else 9, ubatch=29)
    rng = random.Random(np)
    heard: list[Heard] = []
    for i in range(150):
        if rng.random() < 0.5:
            old = rng.choice(heard) if heard and rng.random() < 0.8 else None
            text = ids(i, 30) if old is None else [*old.request.prompt, *old.tokens]
            prompt = [*text[: rng.randint(1, 80)], *ids(i, rng.randint(1, 9))]
            heard.append(r.submit(prompt, rng.randint(1, 30)))
        if heard and rng.random() < 0.1:
            r.loop.cancel(rng.choice(heard).job)
        r.loop.step()
        r.loop.cache.check(now=True)
    r.run()
    for h in heard:
        assert h.tokens == text_after(h.request.prompt, len(h.tokens))
    assert r.loop.stats.requests_failed == 0 and r.loop.stats.prompt_tokens_cached > 100


def test_turns_begin_where_the_answer_s_opening_token_stood_before() -> None:
    system, user, answer = [9, 1, 2], [9, 3, 4], [9, 5]

    def of(prompt: list[int], *opening: int) -> tuple[int, int]:
        return turns(np.array(prompt, dtype=np.int64), np.isin(np.arange(10), opening))

    assert of([*system, *user, *answer], 9) == (3, 3)
    assert of([*system, *user, *answer, *user, *answer], 9) == (3, 8)
    assert of([*user, *answer, 8, *user, *user, *answer], 9, 8) == (3, 9)
    assert of([*answer], 9) == of([1, 2, 3], 9) == of([], 9) == (0, 0)
    begin, asked, said = [7, *[1] * 70], [8, *[2] * 10], [9, *[3] * 10]
    assert of([*begin, *asked, 9], 7, 8, 9) == (71, 71), "each role has a token of its own"
    assert of([*begin, *asked, *said, *asked, 9], 7, 8, 9) == (71, 93)
    assert of([7, *asked, *said, *asked, 9], 7, 8, 9) == (0, 23)
