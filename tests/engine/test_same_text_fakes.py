"""Speculation changes the speed of a text, never the text: drafters of every kind, and a target with a known text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from draft_fakes import EOG, FAKES, N_VOCAB, Ahead, Liar, Oracle, ending_text_after, text_after
from engine_rig import GREEDY, Heard, Rig, fake_rig, fixture_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.draft.drafter import OnHost
from pyspec.draft.ngram import NGram
from pyspec.engine.loop import pending_round
from pyspec.models.target import Out
from pyspec.request import SamplingParams
from pyspec.sample.choose import Chosen, Span, choose
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts, DraftsAhead

KINDS = [*FAKES, "ngram", "none"]


def make(kind: str, np: int, **options: int) -> Rig:
    if kind == "none":
        return fake_rig(np, None, **options)
    return fake_rig(np, OnHost("ngram", NGram(5)) if kind == "ngram" else FAKES[kind](5), **options)


def prompt(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def assert_own_text(heard: Heard, n: int) -> None:
    assert heard.tokens == text_after(heard.request.prompt, n), heard.job.id


@pytest.mark.sampled(1)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_same_text_with_staggered_joins(kind: str, np: int) -> None:
    rig = make(kind, np, ubatch=48)
    heard = []
    for i in range(
        2 * np + 1
    ):  # more than fit; prompts longer than a forward, shorter than a page, at page borders
        heard.append(rig.submit(prompt(i, (1, 5, 15, 16, 17, 70, 100)[i % 7]), 20 + 3 * i))
        rig.steps(2)
    rig.run()
    for i, h in enumerate(heard):
        assert_own_text(h, 20 + 3 * i)
        assert h.finish == "length" and h.done.n_predicted == 20 + 3 * i
    if kind in FAKES:
        assert rig.loop.drafter.open == {}, "a request ended without the drafter hearing of it"


def test_the_liar_costs_rounds_and_the_oracle_saves_them() -> None:
    n = 61
    rounds = {kind: make(kind, 1).generate(prompt(0, 9), n).timings for kind in ("liar", "oracle")}
    assert rounds["liar"].n_rounds == n - 1 and rounds["liar"].draft_n_accepted == 0
    assert rounds["oracle"].n_rounds == (n - 1) / 6
    assert rounds["oracle"].draft_n_accepted == rounds["oracle"].draft_n


@pytest.mark.parametrize("ks", [[0, 5, 2, 1], [5, 5, 0, 0], [1, 2, 3, 4]])
def test_ragged_caps_share_one_forward(ks: list[int]) -> None:
    rig = fake_rig(4, Oracle(5))
    heard = [rig.submit(prompt(i, 10), 40, n_draft_max=k) for i, k in enumerate(ks)]
    rig.steps(2)
    assert rig.loop.target.widths[-1] == [k + 1 for k in ks]
    rig.run()
    for h in heard:
        assert_own_text(h, 40)


def test_prompt_chunks_run_beside_decoding_slots() -> None:
    rig = fake_rig(2, Oracle(5), ubatch=32)
    first = rig.submit(prompt(1, 8), 60)
    rig.loop.step()
    late = rig.submit(prompt(2, 100), 10)
    rig.loop.step()
    assert rig.loop.target.widths[-1] == [6, 26], (
        "the forward is filled with the prompt behind the decoding slot's rows"
    )
    rig.run()
    assert_own_text(first, 60)
    assert_own_text(late, 10)


def test_decoding_slots_do_not_starve_a_prompt() -> None:
    rig = fake_rig(4, Oracle(5), ubatch=8)
    busy = [rig.submit(prompt(i, 2), 200) for i in range(3)]
    rig.steps(4)
    late = rig.submit(prompt(9, 20), 1)
    rig.steps(24)
    assert late.over and not any(h.over for h in busy)


@pytest.mark.parametrize("kind", ["none", "oracle", "liar", "fickle"])
def test_one_token_is_one_token(kind: str) -> None:
    rig = make(kind, 1)
    assert_own_text(rig.generate(prompt(3, 16), 1), 1)
    assert rig.generate(prompt(3, 16), 0).done.n_predicted == 0


@pytest.mark.parametrize("kind", ["none", "oracle", "fickle"])
def test_the_context_limit_ends_a_request(kind: str) -> None:
    rig = make(kind, 1, ctx=64)
    for n in (1, 40, 63):
        h = rig.generate(prompt(4, n), -1, cache_prompt=False)
        assert_own_text(h, 64 - n)
        assert h.finish == "length" and h.done.truncated
    assert not rig.generate(prompt(4, 8), 3).done.truncated


def ending_prompt(at: range) -> tuple[list[int], int]:
    """A prompt whose text first meets an end token at a place in `at`, and that place."""
    for seed in range(5000):
        p = prompt(seed, 6)
        found = next((i for i, t in enumerate(ending_text_after(p, at.stop)) if t in EOG), -1)
        if found in at:
            return p, found
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("kind", ["none", "oracle", "fickle", "broken"])
def test_an_end_token_inside_a_draft_ends_the_text(kind: str) -> None:
    assert fixture_tokenizer().eog == EOG
    rig = make(kind, 1)
    if kind != "none":
        rig.use(FAKES[kind](5, text=ending_text_after))
    for at in (range(1, 2), range(2, 5), range(9, 12)):
        p, i = ending_prompt(at)
        h = rig.generate(p, 60, SamplingParams(temperature=0.0))
        assert h.finish == "eos" and h.tokens == ending_text_after(p, i) and h.done.n_predicted == i + 1
        assert_own_text(rig.generate(p, 30), 30)  # with ignore_eos it continues


@pytest.mark.parametrize("kind", ["none", "oracle", "fickle"])
def test_a_stop_string_inside_a_draft_ends_the_text(kind: str) -> None:
    p = prompt(11, 7)
    whole = make("none", 1).generate(p, 40).text
    plain = make("none", 1)
    rig = make(kind, 1)
    for at in (3, 11, 17):
        stop = whole[at : at + 3]
        want = plain.generate(p, 40, stop=(stop, "never"))
        got = rig.generate(p, 40, stop=(stop, "never"))
        assert got.text == whole[: whole.index(stop)] == want.text
        assert (got.tokens, got.finish, got.done.stop_string) == (want.tokens, "stop", stop)
        assert got.done.n_predicted == want.done.n_predicted
        held = rig.loop.table.slots[0].tokens
        assert held == [*p, *text_after(p, got.done.n_predicted)][: len(held)], (
            "what came after the stop is not kept"
        )
        assert len(held) <= len(p) + got.done.n_predicted


def test_a_time_limit_ends_a_request() -> None:
    h = make("oracle", 1).generate(prompt(5, 5), 200, max_predict_ms=0.01)
    assert h.finish == "length" and 0 < len(h.tokens) < 200
    assert h.tokens == text_after(h.request.prompt, len(h.tokens))


@pytest.mark.parametrize("kind", ["oracle", "liar", "fickle", "broken", "ngram"])
def test_a_slot_used_again_is_as_good_as_new(kind: str) -> None:
    """Cancelled in the queue, in its prompt, between draft and verdict: the next request has its own text."""
    rig = make(kind, 1, ubatch=16)
    for when in range(8):
        h, waiting = rig.submit(prompt(20, 40), 50), rig.submit(prompt(21, 40), 50)
        rig.steps(when)
        rig.loop.cancel(h.job)
        rig.loop.cancel(waiting.job)
        rig.run()
        assert h.finish == waiting.finish == "cancelled"
        assert h.tokens == text_after(h.request.prompt, len(h.tokens))
        assert_own_text(rig.generate(prompt(22, 30), 12), 12)


def test_a_cancelled_request_ends_within_a_round() -> None:
    rig = fake_rig(2, Liar(3))
    h, other = rig.submit(prompt(1, 4), 100), rig.submit(prompt(2, 4), 30)
    rig.steps(5)
    rig.loop.cancel(h.job)
    rig.loop.step()
    assert h.finish == "cancelled" and h.done.n_predicted == len(h.tokens)
    rig.run()
    assert_own_text(other, 30)


ACTION = st.tuples(
    st.sampled_from(["submit", "submit", "submit", "step", "step", "cancel"]), st.integers(0, 2**16)
)


ANY_ORDER = given(
    kind=st.sampled_from(KINDS),
    np=st.sampled_from([1, 2, 3, 8]),
    page_size=st.sampled_from([16, 32]),
    pool=st.sampled_from([0, 7]),
    ubatch=st.sampled_from([5, 33, 512]),
    actions=st.lists(ACTION, min_size=3, max_size=40),
)
FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(FUZZ, max_examples=15)
@ANY_ORDER
def test_any_order_of_joins_and_cancels(**drawn: Any) -> None:
    join_and_cancel(**drawn)


@pytest.mark.slow
@settings(FUZZ, max_examples=100)
@ANY_ORDER
def test_many_orders_of_joins_and_cancels(**drawn: Any) -> None:
    join_and_cancel(**drawn)


def join_and_cancel(
    kind: str, np: int, page_size: int, pool: int, ubatch: int, actions: list[tuple[str, int]]
) -> None:
    """Few pages, few slots, shared prefixes: every request gets exactly its own text."""
    rig = make(kind, np, page_size=page_size, n_page=pool, ubatch=ubatch, ctx=96)
    heard: list[Heard] = []
    for what, x in actions:
        if what == "submit":
            p = prompt(x % 3, 1 + x % 45) + prompt(
                x, x % 3
            )  # three families of prompts, so prefixes are shared
            heard.append(
                rig.submit(p, 1 + x % 37, cache_prompt=x % 5 > 0, slot=x % np if x % 4 == 0 else -1)
            )
        elif what == "step":
            rig.loop.step()
            rig.loop.table.check()
        elif heard:
            rig.loop.cancel(heard[x % len(heard)].job)
    rig.run()
    for h in heard:
        n = len(h.tokens)
        assert h.tokens == text_after(h.request.prompt, n)
        assert h.finish == "cancelled" or n == min(h.request.max_tokens, 96 - h.job.n_prompt)
    assert rig.loop.table.n_page_used <= rig.loop.table.n_page


def test_wild_ids_are_neither_embedded_nor_counted() -> None:
    rig = make("wild", 1)
    seen: list[int] = []
    rig.strike(lambda batch, forward: seen.extend(batch.tokens.tolist()))  # type: ignore[func-returns-value]
    h = rig.generate(prompt(8, 8), 50)
    assert_own_text(h, 50)
    assert all(0 <= t < N_VOCAB for t in seen)
    assert h.timings.draft_n == h.timings.draft_n_accepted, (
        "what was right before the wild id counts, nothing else"
    )


@dataclass
class Drawn(Ahead):
    """Says how its tokens were drawn, on the host and ahead: row i of q is 1 at the token before it in the draft, and 0.5 at its own."""

    def draft(self, asks: Sequence[DraftRequest]) -> list[Drafts]:
        return [Drafts(d.tokens, q_of(d.tokens)) for d in super().draft(asks)]

    def draft_ahead(self, batch: Batch, out: Out, kept: Kept, n_draft: int) -> DraftsAhead | None:
        found = super().draft_ahead(batch, out, kept, n_draft)
        return found and DraftsAhead(
            found.tokens, torch.stack([q_of(row) for row in found.tokens.tolist()])
        )


def q_of(tokens: Sequence[int]) -> Tensor:
    q = torch.zeros(len(tokens), N_VOCAB)
    q[range(len(tokens)), list(tokens)] = 0.5
    q[range(1, len(tokens)), list(tokens[:-1])] = 1.0
    return q


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3, ignore_eos=True)])
def test_probabilities_of_drawn_drafts_come_with_their_tokens_and_change_no_text(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, rig, plain = [], fake_rig(3, drafter := Drawn(5)), fake_rig(3, None)

    def checked(logits: Tensor, spans: Sequence[Span], **more: object) -> list[Chosen]:
        for span in spans:
            tokens, q = span.drafts.tokens, span.drafts.q
            if tokens:
                assert q is not None and torch.equal(q, q_of(tokens))
                seen.append(len(tokens))
        return choose(logits, spans, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(pending_round, "choose", checked)
    rig.run_ahead()
    heard = [rig.submit(prompt(i, 9), 50, params) for i in range(3)]
    rig.run()
    monkeypatch.undo()
    assert [h.tokens for h in heard] == [
        plain.generate(prompt(i, 9), 50, params).tokens for i in range(3)
    ]
    assert len(seen) > 10 and (params is not GREEDY or drafter.right > 0)


def test_a_draft_that_a_grammar_cuts_goes_on_with_tokens_that_were_not_drawn() -> None:
    drafts = Drafts([4, 5, 6], q_of([4, 5, 6])).first(2).then([7, 8])
    assert drafts.tokens == [4, 5, 7, 8]
    assert drafts.q is not None
    assert torch.equal(drafts.q, q_of([4, 5, 6])[:2])
    assert Drafts([4, 5]).first(1).then([9]) == Drafts([4, 9])


def test_a_drafter_that_returns_something_else_costs_its_drafts_and_no_text() -> None:
    """Lists, as the contract once had them; too few; none."""
    for wrong in ([[1, 2, 3]] * 2, [Drafts([1])], None, [Drafts(3), Drafts()]):  # type: ignore[arg-type]
        rig = fake_rig(2, drafter := Oracle(5))
        drafter.draft = lambda asks, wrong=wrong: wrong  # type: ignore[method-assign, misc]
        heard = [rig.submit(prompt(i, 9), 20) for i in range(2)]
        rig.run()
        for h in heard:
            assert_own_text(h, 20)
        assert rig.loop.stats.guard_trips == 1, wrong
