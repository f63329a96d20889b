"""A request that continues from cached pages has the same text, and as many drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_fakes import Oracle, text_after
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, fake_rig, plain_rig, rig
from known_texts import demo_prompts, known_texts, tiny

from pyspec.draft.chain import Chain
from pyspec.engine.policy.queue import worth_on
from pyspec.slots.batch import Batch

QWEN35 = FIXTURES / "qwen35.gguf"
DEEPSEEK4, DEEPSEEK4_MTP = FIXTURES / "deepseek4.gguf", FIXTURES / "deepseek4_mtp.gguf"


def make(kind: str, **settings: object) -> Rig:
    if kind == "mtp":
        return rig(QWEN35, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, **settings)
    if kind == "mtp-deepseek4":
        return rig(DEEPSEEK4, draft_path=DEEPSEEK4_MTP, n_draft_max=3, n_draft_fixed=True, **settings)
    if kind == "dflash":
        return rig(
            tiny("qwen35"), draft_path=tiny("qwen35", drafter=True), n_draft_fixed=True, **settings
        )
    return rig(FIXTURES / "llama.gguf", spec_type="ngram", n_draft_fixed=True, ngram_match=1, **settings)


def path_of(kind: str) -> Path:
    return {"mtp": QWEN35, "mtp-deepseek4": DEEPSEEK4, "dflash": tiny("qwen35")}.get(
        kind, FIXTURES / "llama.gguf"
    )


def random_ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


KINDS = ["mtp", "dflash", "ngram-llama", "mtp-deepseek4"]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_goes_on_from_the_first(kind: str) -> None:
    r, cold = make(kind, np=2), plain_rig(path_of(kind))
    first = random_ids(1, 30)
    answer = r.generate(first, 20).tokens
    turn = [*first, *answer, *random_ids(2, 9)]
    h = r.generate(turn, 20)
    assert h.timings.cache_n == len(first) + 19, "all but the last token, which has no row yet"
    assert h.timings.prompt_n == len(turn) - h.timings.cache_n
    assert h.tokens == cold.generate(turn, 20).tokens
    assert r.generate(turn, 20, cache_prompt=False).tokens == h.tokens


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [20, 64, 69, 100])
def test_a_prompt_that_comes_again_is_taken_from_the_cache_and_has_the_same_text(
    kind: str, n: int
) -> None:
    """Recurrent state is restored from the checkpoint near the prompt's end; of short prompts the end itself is kept, with its logits."""
    r = make(kind, page_size=16)
    prompt = random_ids(3, n)
    first = r.generate(prompt, 12)
    for _ in range(2):
        again = r.generate(prompt, 12)
        assert again.tokens == first.tokens
        if kind == "ngram-llama":
            assert again.timings.cache_n == n - 1, "at least one token is computed"
        elif n >= worth_on(r.loop.worker.device.type):
            assert again.timings.cache_n == (n - 4) // 16 * 16
        else:
            assert again.timings.cache_n == n - 1, (
                "the token behind which the first one is chosen is not counted"
            )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ubatch", [7, 512])
def test_prompts_with_a_common_part_keep_their_text_whichever_came_before(
    kind: str, ubatch: int
) -> None:
    """P1: A, B, A and prompts that share a part of either, in chunks of odd sizes."""
    r, cold = make(kind, ubatch=ubatch, page_size=16), plain_rig(path_of(kind))
    a, b = random_ids(4, 90), random_ids(5, 110)
    for prompt in (a, b, a, a[:70] + b[:40], a, b[:81] + a[:8], b, a[:50], a[:82]):
        h = r.generate(prompt, 8)
        assert h.tokens == cold.generate(prompt, 8, cache_prompt=False).tokens


def test_a_state_dies_with_its_page() -> None:
    """A's states must not serve B, whose pages came after A's were evicted.

    6 pages of 16. A has 70 + 2 tokens, states at 64 and 71. A request of 90 tokens takes A's pages. B has 20 + 55. C repeats
    68 of B's tokens, so only A's state of 64 would stand below it.
    """
    r, cold = make("mtp", np=2, kv_pool=6 * 16, page_size=16), plain_rig(QWEN35)
    a, b = random_ids(6, 70), random_ids(7, 20)
    first = r.generate(a, 2, slot=0)
    assert len(r.loop.cache.states) == 2
    assert not r.loop.cache.states.starts
    assert len(r.filed([*a, *first.tokens])) == 71
    r.generate(random_ids(8, 80), 10, slot=1)
    assert len(r.filed([*a, *first.tokens])) == 0, "the pages were taken"
    text = r.generate(b, 55, slot=0).tokens
    c = [*b, *text[:48], 3, 1, 4]
    h = r.generate(c, 15, slot=0)
    assert h.timings.cache_n == len(b), "where its own prompt ended"
    assert h.tokens == cold.generate(c, 15).tokens


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_a_cancelled_request_can_be_gone_on_from(kind: str, rounds: int) -> None:
    r, cold = make(kind, ubatch=40, page_size=16), plain_rig(path_of(kind))
    prompt = random_ids(9, 90)
    h = r.submit(prompt, 40)
    r.steps(rounds)
    r.loop.cancel(h.job)
    r.run()
    for after in (prompt, [*prompt, *h.tokens, 5, 6], prompt[:30]):
        assert r.generate(after, 10).tokens == cold.generate(after, 10, cache_prompt=False).tokens


def chances(r: Rig, prompt: Sequence[int], n: int, **request: object) -> tuple[int, tuple[int, ...]]:
    t = r.generate(prompt, n, replace(GREEDY, ignore_eos=False), **request).timings
    return t.cache_n, t.accepted_per_pos


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_acceptance_after_reuse_is_that_of_a_cold_start(kind: str) -> None:
    """P5: hidden state and draft cache come back with the prefix; a stale one would show in the accepted drafts."""
    settings = (
        {"spec_type": "mtp", "n_draft_max": 3}
        if kind == "mtp"
        else {"draft_path": DEMO_DRAFT, "n_draft_max": 4}
    )
    r = rig(DEMO, ctx=512, n_draft_fixed=True, page_size=16, **settings)
    prompts = [p for p, _ in demo_prompts() if len(p) >= 68][:2]
    assert len(prompts) == 2
    for prompt in prompts:
        none, cold = chances(r, prompt, 50)
        cached, warm = chances(r, prompt, 50)
        assert (none, cached > 60) == (0, True)
        assert warm == cold
    r.generate(
        prompts[0], 1
    )  # no draft is made: the drafter has to catch up later on rows that the checkpoint lacks
    other = rig(DEMO, ctx=512, n_draft_fixed=True, page_size=16, **settings)
    assert chances(r, prompts[0], 50)[1] == chances(other, prompts[0], 50)[1]


def test_mtp_rows_not_yet_computed_are_computed_before_their_page_is_filed() -> None:
    """Chunks of 50 and 46 rows: at the checkpoint (96) the drafter has caught up on nothing, and it never drafts."""
    r, cold = (make("mtp", page_size=16, ubatch=50) for _ in range(2))
    prompt = random_ids(12, 101)
    for one in (r, cold):
        assert isinstance(one.loop.drafter, Chain)
        one.loop.drafter.most_waiting = 1000
    r.generate(prompt, 1)
    inputs: list[list[torch.Tensor]] = []
    cached = []
    for one in (r, cold):
        watch(one, inputs)
        cached.append(one.generate(prompt, 20).timings.cache_n)
    assert cached == [96, 0]
    warm, (before, behind) = inputs[0][0], inputs[1][:2]
    assert [len(x) for x in (warm, before, behind)] == [6, 96, 6], (
        "rows up to the checkpoint; the others and the anchor's"
    )
    assert (warm - behind).abs().max() < 1e-3


def watch(r: Rig, seen: list[list[torch.Tensor]]) -> None:
    """Collect the MTP block's outputs, per forward."""
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    drafter.most_waiting = 1000
    forward, outs = drafter.block.forward, []
    seen.append(outs)

    def watched(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        outs.append(forward(batch, hidden))
        return outs[-1]

    drafter.block.forward = watched  # type: ignore[method-assign]


def test_reuse_after_pages_were_taken_away() -> None:
    """Few pages: evicted prefixes are computed again, and requests wait instead of failing."""
    r = fake_rig(3, Oracle(5), ctx=96, n_page=8)
    prompts = [random_ids(i, 40 + i) for i in range(4)]
    for _ in range(3):
        heard = r.all(prompts, 30)
        for h in heard:
            assert h.tokens == text_after(h.request.prompt, 30)
    assert r.loop.stats.requests_failed == 0


def test_a_small_pool_queues_requests_instead_of_failing_them() -> None:
    r = rig(QWEN35, np=4, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, page_size=16, kv_pool=130)
    texts = known_texts(QWEN35)
    short = [(p, t) for p, t in texts.items() if len(p) < 70]
    heard = [(r.submit(p, len(t)), t) for p, t in short]
    most = 0
    while not r.loop.is_idle:
        r.loop.step()
        r.loop.table.check()
        most = max(most, len(r.loop.jobs))
    assert 1 < most < 4
    for h, text in heard:
        assert h.tokens == text


def test_a_conversation_is_not_thrown_away_for_a_common_opening() -> None:
    """Every chat begins with the same few tokens; an empty slot is the better place for the second one."""
    r = fake_rig(2, None)
    opening = random_ids(1, 5)
    a, b = opening + random_ids(2, 40), opening + random_ids(3, 40)
    first, second = r.generate(a, 4), r.generate(b, 4)
    assert {first.slot, second.slot} == {0, 1}
    assert r.generate([*a, 1, 2], 4).timings.cache_n == 45
    third = r.generate(random_ids(4, 30), 4)
    assert third.slot == second.slot, "the one not used for longest"
