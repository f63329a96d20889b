"""Rounds launched before the round before them is over: the same texts, and requests leave the same pages and states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import test_prefix_reuse as reuse
import test_same_text_models as same
import torch
from draft_fakes import Ahead, Fickle
from engine_rig import FIXTURES, GREEDY, Heard, Rig, every_rig, fake_rig, plain_rig, rig, rig_for
from known_texts import N_TEXT, continuation, known_texts, tiny
from plans import fix_lengths

from pyspec.constrain import constraint
from pyspec.engine.loop.loop import Loop
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.errors import DeviceError, OutOfBounds
from pyspec.models.target import Out
from pyspec.request import Grammar, SamplingParams
from pyspec.sample.choose import Chosen
from pyspec.slots.batch import Batch

QWEN35, NEMOTRON = FIXTURES / "qwen35.gguf", FIXTURES / "nemotron_latent.gguf"


@pytest.fixture
def flown() -> Iterator[list[PendingRound]]:
    """Every rig launches rounds ahead, on a CPU, too; the rounds that were."""
    flights: list[PendingRound] = []

    def ahead(r: Rig) -> None:
        r.run_ahead()
        r.overwrite_results()
        r.watch_launches(flights)

    with every_rig(ahead):
        yield flights


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    ("kind", "np"),
    [("none", 1), ("none", 3), ("mtp", 2), ("mtp", 8), ("dflash", 3), ("fickle-hybrid", 4)],
)
def test_same_text_with_staggered_joins(kind: str, np: int, flown: list[PendingRound]) -> None:
    same.test_same_text_with_staggered_joins(kind, np)
    assert len(flown) > 10 or kind == "fickle-hybrid", "who is asked on the host waits for the verdict"


def rounds_told(r: Rig, monkeypatch: pytest.MonkeyPatch, n: int) -> tuple[list[float], float]:
    """Milliseconds of each round of one request's decoding as reported to the controller, and their sum by the clock. The clock
    advances by a second at each look."""
    looks, told = count(), []
    r.loop.clock = lambda: float(next(looks))
    heard = r.submit([5, 6, 7, 8], n)
    while not heard.tokens:
        r.loop.step()
    began = r.loop.ended
    monkeypatch.setattr(
        r.loop.controller,
        "timed",
        lambda _rows, verify, _live, _passes, draft, _experts: told.append(verify + draft),
    )
    r.run()
    return told, 1e3 * (r.loop.ended - began)


def test_the_controller_hears_of_all_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain steps a round is over when its tokens are committed."""
    told, took = rounds_told(plain_rig(QWEN35).call_by_call(), monkeypatch, 12)
    assert len(told) == 11 and len(set(told)) == 1
    assert sum(told) == took - 11e3, "all but the second before each begins"


def test_the_controller_hears_of_a_rounds_end_when_the_next_one_flies(
    monkeypatch: pytest.MonkeyPatch, flown: list[PendingRound]
) -> None:
    """From one landing to the next: work of the host after it is hidden. Only the last round's own is not."""
    told, took = rounds_told(plain_rig(QWEN35).call_by_call(), monkeypatch, 12)
    assert len(flown) == 10 and len(set(told[1:-1])) == 1
    assert sum(told) == took - 1e3, "all but the second before the first one begins"


HYBRIDS = {"gdn": QWEN35, "mamba2": NEMOTRON, "attention": FIXTURES / "llama.gguf"}


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("path", HYBRIDS.values(), ids=HYBRIDS)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
def test_drafts_ahead_that_are_often_right(path: Path, np: int, flown: list[PendingRound]) -> None:
    """Each slot keeps another number of rows, and the next round was launched behind them."""
    r = rig_for(path, drafter := Ahead(5, text=partial(continuation, path)), np=np, ubatch=40)
    texts = known_texts(path)
    heard = []
    for prompt in texts:
        heard.append(r.submit(prompt, N_TEXT))
        r.steps(3)
    r.run()
    assert [h.tokens for h in heard] == list(texts.values())
    assert drafter.n_ahead > 20 and drafter.right > 0.7 * drafter.n_ahead
    assert sum(h.timings.draft_n_accepted for h in heard) > 60


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("drafts", [False, True])
def test_what_an_end_token_ends_is_gone_on_from(
    path: Path, drafts: bool, flown: list[PendingRound]
) -> None:
    """Alone or among accepted drafts, while the next round is in flight: the state stands at the end."""
    for (prompt, text), at in zip(
        known_texts(path).items(), (1, 4, 7, 11, 2, 19, 23, 5, 28), strict=True
    ):
        end = text[at]
        at = text.index(end)
        r = rig(path, spec_type="none", np=2, ctx=512)
        if drafts:
            r = rig_for(path, Ahead(5, text=partial(continuation, path)), np=2, ctx=512)
        params = SamplingParams(temperature=0.0)
        first = r.submit(prompt, N_TEXT, params, eog=frozenset({end}))
        r.submit([8, 8, *prompt], 25)
        r.run()
        assert first.tokens == text[:at] and (first.finish == "eos")
        again = r.generate([*prompt, *text[: at + 2]], 4)
        assert again.timings.cache_n > 0 and again.tokens[: 28 - at] == text[at + 2 : at + 6]
        longer = [*prompt, *first.tokens, 17, 4]
        want = plain_rig(path).generate(longer, 12, cache_prompt=False).tokens
        assert r.generate(longer, 12).tokens == want
    assert any(flight.launched.tokens is not None for flight in flown) == drafts and flown


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
def test_banned_tokens_among_drafts_leave_the_text_as_it_is(
    path: Path, flown: list[PendingRound]
) -> None:
    """The device stops at them; the host continues with another token, unknown to the rounds launched ahead."""
    prompts = list(known_texts(path))[:4]
    free = list(known_texts(path).values())[:4]
    bans = tuple((t, -torch.inf) for t in {free[0][5], free[1][11], free[2][20], free[3][3]})
    params = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=bans)
    cold = plain_rig(path)
    cold.loop.lookahead.on = False
    want = {p: cold.generate(p, 30, params).tokens for p in prompts}

    def text(tokens: Sequence[int], n: int) -> list[int]:
        """The next tokens with the bans, or without."""
        for prompt, own in want.items():
            whole = [*prompt, *own]
            if list(tokens) == whole[: len(tokens)]:
                return (
                    whole[len(tokens) : len(tokens) + n]
                    if len(tokens) % 3
                    else continuation(path, tokens, n)
                )
        return []

    r = rig_for(path, Ahead(5, text=text), np=3)
    heard = r.all(prompts, 30, params)
    assert [h.tokens for h in heard] == list(want.values())
    assert any(flight.off for flight in flown if flight.launched.tokens is not None)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_synthetic_acceptance_is_the_same_ahead(kind: str, flown: list[PendingRound]) -> None:
    """Coins decide on the device as on the host: the same tokens, most of them drafted."""
    found = []
    for may in (False, True):
        _, r = same.MAKERS[kind](np=2, synth_len=2.5)
        r.loop.lookahead.on = may
        heard = r.all(([1, 2, 3], [9, 8, 7, 6], [5] * 20), 40)
        found.append([h.tokens for h in heard])
        assert sum(h.timings.draft_n_accepted for h in heard) > 40
    # near their end, requests draft less if the round before is not read yet
    assert [tokens[:28] for tokens in found[0]] == [tokens[:28] for tokens in found[1]] and len(
        flown
    ) > 15


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash", "fickle-hybrid"])
def test_a_drafter_hears_of_rounds_that_were_ahead(kind: str, flown: list[PendingRound]) -> None:
    """Without drafts for a while, by the request; then the same slots draft, from a context with these rounds."""
    path, r = same.MAKERS[kind](np=2)
    texts = list(known_texts(path).items())
    for turn in range(2):
        heard = r.all([p for p, _ in texts[:2]], N_TEXT, n_draft_max=0 if turn == 0 else None)
        for h, (_, text) in zip(heard, texts, strict=False):
            assert h.tokens == text
        assert bool(flown) and (turn == 0 or sum(h.timings.draft_n for h in heard) > 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("turns", [False, True], ids=["always", "by turns"])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_are_those_of_rounds_that_wait(
    kind: str, turns: bool, flown: list[PendingRound], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter keeps its observations of rounds ahead, though the next forward overwrote them, and its drafts ahead are the same
    as its others."""

    found: list[dict[tuple[int, int], list[int]]] = []
    choose = Loop.choose

    def record(self: Loop, flight: PendingRound) -> list[Chosen | None]:
        found[-1].update({(w.job.n_prompt, w.seq.n_past): list(w.draft) for w in flight.work if w.draft})
        return choose(self, flight)

    monkeypatch.setattr(Loop, "choose", record)
    for may in (False, True):
        path, r = same.MAKERS[kind](np=2)
        r.loop.lookahead.on = may
        loop = r.loop

        def lengths(decoding: Sequence[tuple[int, int]], loop: Loop = loop) -> list[int]:
            """By turns: no drafts for six tokens, then drafts."""
            drafts = [not turns or loop.jobs[slot].n_predicted // 6 % 2 for slot, _ in decoding]
            return [
                min(3 if wants else 0, most) for wants, (_, most) in zip(drafts, decoding, strict=True)
            ]

        fix_lengths(r.loop, lengths)
        found.append({})
        texts = list(known_texts(path).items())[:2]
        heard = r.all([prompt for prompt, _ in texts], N_TEXT)
        assert all(h.tokens == text for h, (_, text) in zip(heard, texts, strict=True))
    both = found[0].keys() & found[1].keys()
    for where in both:
        n = min(len(found[0][where]), len(found[1][where]))
        assert found[0][where][:n] == found[1][where][:n], where
    assert len(both) > 8 and sum(flight.launched.tokens is not None for flight in flown) > (
        0 if turns else 10
    )


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
def test_what_a_request_leaves_is_gone_on_from(path: Path, flown: list[PendingRound]) -> None:
    """It ends in a round behind which the next was launched: its state and pages stand at the end of its text."""
    cold = plain_rig(path, np=1)
    cold.loop.lookahead.on = False
    warm = rig(path, spec_type="none", np=2, ctx=512)
    prompt = [5, 9, 30, 7, 44, 12, 3]
    for n in (1, 2, 3, 9, 20):
        stop = cold.generate(prompt, n + 6, cache_prompt=False).tokens[n]
        params = SamplingParams(temperature=0.0, logit_bias=(), ignore_eos=True)
        first = warm.submit(prompt, 60, params, stop=(cold.tokenizer.decode([stop]),))
        other = warm.submit([8, 8, *prompt], 30)
        warm.run()
        assert other.tokens == cold.generate([8, 8, *prompt], 30, cache_prompt=False).tokens
        longer = [*prompt, *first.tokens, 17, 4]
        again = warm.generate(longer, 12)
        assert again.timings.cache_n > 0
        assert again.tokens == cold.generate(longer, 12, cache_prompt=False).tokens
    assert len(flown) > 50


@pytest.mark.slow
def test_prefixes_are_reused_as_ever(flown: list[PendingRound]) -> None:
    names = [
        n for n in dir(reuse) if n.startswith("test_") and reuse.__dict__[n].__code__.co_argcount == 0
    ]
    for name in names:
        getattr(reuse, name)()
    assert flown and names


@pytest.mark.slow
def test_cancels_at_any_moment_leave_the_others_their_text(flown: list[PendingRound]) -> None:
    path = QWEN35
    texts = list(known_texts(path).items())
    for rounds in range(9):
        r = rig(path, spec_type="none", np=3, ubatch=24)
        kept = [(r.submit(p, N_TEXT), text) for p, text in texts[:2]]
        gone = r.submit(texts[2][0], N_TEXT)
        r.steps(rounds)
        r.loop.cancel(gone.job)
        r.loop.step()
        assert gone.finish == "cancelled" and gone.tokens == texts[2][1][: len(gone.tokens)]
        r.run()
        assert all(h.tokens == want for h, want in kept)
    assert flown


def test_only_plain_greedy_rounds_fly_ahead(flown: list[PendingRound]) -> None:
    for params in (
        SamplingParams(temperature=0.8, seed=1, ignore_eos=True),
        SamplingParams(temperature=0.0, ignore_eos=True, repeat_penalty=1.2),
        SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=((5, 1.0),)),
    ):
        plain_rig(QWEN35, np=1).generate([1, 2, 3], 12, params)
        assert not flown
    r = fake_rig(2, Fickle(5))
    r.submit([1, 2, 3], 20, GREEDY)
    r.run()
    assert not flown, "whoever drafts waits for the verdict"


def test_a_banned_best_token_sends_only_its_own_request_back(flown: list[PendingRound]) -> None:
    """The device continued with it before the host could refuse it."""
    cold = plain_rig(QWEN35, np=1)
    cold.loop.lookahead.on = False
    prompts = [[1, 2, 3], [4, 5, 6], [9, 9, 1]]
    free = [cold.generate(p, 30).tokens for p in prompts]
    bans = tuple((t, -torch.inf) for t in {free[0][5], free[0][11], free[2][20]})
    params = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=bans)
    want = [cold.generate(p, 30, params).tokens for p in prompts]
    assert want[0] != free[0]
    r = rig(QWEN35, spec_type="none", np=3)
    heard = r.all(prompts, 30, params)
    assert [h.tokens for h in heard] == want
    assert any(flight.off for flight in flown) and not all(flight.off for flight in flown)


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("drafts", ["all", "free", "nobody's"])
def test_texts_under_grammars_fly_ahead(
    path: Path, drafts: str, flown: list[PendingRound], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused token sends only its own request back, an end ends its own, and the neighbours run ahead."""
    monkeypatch.setattr(constraint, "CALM", 2)
    any_text = Grammar(kind="regex", source="(?s:.*)")
    cold = plain_rig(path, np=1)
    cold.loop.lookahead.on = False
    asked: list[tuple[list[int], Grammar]] = []
    for prompt in ([1, 2, 3], [4, 5, 6], [9, 9, 1]):
        text = json.dumps(cold.generate(prompt, 10, GREEDY, grammar=any_text).text, ensure_ascii=False)
        bound = Grammar(kind="lark", source=f"start: {text} WORD \nWORD: /[a-m]{{2,3}}/")
        asked += [
            (prompt, any_text),
            (prompt, bound),
            (prompt, Grammar(kind="lark", source=f"start: {text}")),
        ]

    def texts(r: Rig) -> list[tuple[list[int], str]]:
        heard = []
        for prompt, grammar in asked:
            heard.append(r.submit([7, *prompt], 20))
            n_draft = None if drafts == "all" else 0
            heard.append(r.submit(prompt, 24, GREEDY, grammar=grammar, n_draft_max=n_draft))
            r.run()
        return [(h.tokens, h.finish) for h in heard]

    want = texts(cold)
    assert not flown and {finish for _, finish in want} == {"length", "stop"}
    if drafts == "nobody's":
        r = rig(path, spec_type="none", np=2)
    else:
        r = rig_for(path, Ahead(5, text=partial(continuation, path)), np=4)
    assert texts(r) == want
    held = [flight for flight in flown if any(w.job.constraint is not None for w in flight.work)]
    n_off = sum(1 for flight in held if flight.off)
    assert 0 < n_off < len(held), "some were refused, and who was does not fly on"
    drafted = [f for f in held if any(w.job.constraint is not None and w.draft for w in f.work)]
    assert bool(drafted) == (drafts == "all")
    assert any(f.refused for f in drafted) == (drafts == "all"), (
        "drafts of the device that a grammar does not take"
    )
    assert texts(r) == want, "and what they left is gone on from"


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("path", [QWEN35, NEMOTRON], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_token_that_is_best_in_spite_of_its_bias_is_gone_on_from(
    path: Path, drafts: bool, flown: list[PendingRound]
) -> None:
    """The device stops at it, because it knows only the best logit: the host continues alone, from the state at that token."""
    for prompt, text in list(known_texts(path).items())[:3]:
        bias = tuple((t, -1e-4) for t in sorted({*text[4:20:3]}))
        params = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=bias)
        drafter = Ahead(5, text=partial(continuation, path))
        r = rig_for(path, drafter, np=2) if drafts else rig(path, spec_type="none", np=2)
        heard = [r.submit(prompt, N_TEXT, params), r.submit([3, *prompt], 12)]
        r.run()
        assert heard[0].tokens == text
    assert any(flight.off for flight in flown)


def test_a_request_that_waits_is_seated_at_once(flown: list[PendingRound]) -> None:
    r = rig(QWEN35, spec_type="none", np=2)
    first = r.submit([1, 2, 3], 40)
    r.steps(5)
    assert r.loop.lookahead.under_way is not None
    second = r.submit([4, 5, 6], 5)
    r.loop.step()
    assert len(second.events) >= 1, "it has a slot"
    r.run()
    assert len(first.tokens) == 40 and len(second.tokens) == 5


def test_a_bad_row_ends_its_own_request(flown: list[PendingRound]) -> None:
    """NaN in the logits of one slot, in a round behind which the next was launched."""
    r = rig(QWEN35, spec_type="none", np=2)
    want = plain_rig(QWEN35).generate([4, 5, 6], 40).tokens
    bad, good = (
        r.submit([1, 2, 3], 20),
        r.submit([4, 5, 6], 40),
    )  # the shorter request has the first slot
    r.steps(4)

    def poisoned(batch: Batch, forward: Callable[[], Out]) -> Out:
        out = forward()
        logits = out.logits.clone()
        logits[0] = torch.nan
        return replace(out, logits=logits)

    r.strike(poisoned)
    r.run()
    assert bad.error is not None and "NaN" in str(bad.error) and good.tokens == want


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("lasts", [False, True])
def test_a_forward_that_is_refused_ahead_is_asked_for_again_in_its_turn(
    lasts: bool, flown: list[PendingRound]
) -> None:
    r = rig(QWEN35, spec_type="none", np=2)
    want = [plain_rig(QWEN35).generate(p, 20).tokens for p in ([1, 2, 3], [4, 5, 6])]
    heard = [r.submit(p, 20) for p in ([1, 2, 3], [4, 5, 6])]
    r.steps(4)
    forward, refused = r.loop.worker.forward, list[int]()

    def refuse(batch: Batch) -> Out:
        if (lasts and any(seq.slot == heard[0].slot for seq in batch.seqs)) or not refused:
            refused.append(1)
            raise OutOfBounds("page", 9, 4, heard[0].slot)
        return forward(batch)

    r.loop.worker.forward = refuse  # type: ignore[assignment]
    r.run()
    assert heard[1].tokens == want[1] and len(refused) > lasts
    assert (heard[0].error is not None) == lasts and (lasts or heard[0].tokens == want[0])


def test_an_engine_that_goes_down_in_flight_tells_everybody(flown: list[PendingRound]) -> None:
    r = rig(QWEN35, spec_type="none", np=2)
    heard = [r.submit([i, 2, 3], 40) for i in range(3)]
    r.steps(6)
    assert r.loop.lookahead.under_way is not None
    r.loop.abort(DeviceError("gone"))
    assert r.loop.lookahead.under_way is None and all(isinstance(h.error, DeviceError) for h in heard)
    assert not any(slot.busy for slot in r.loop.table.slots)


def test_the_last_tokens_are_not_flown_past(flown: list[PendingRound]) -> None:
    """A request that ends by its length is known to end: no unread round is launched for it."""
    heard: Heard = plain_rig(QWEN35, np=1).generate([1, 2, 3], 12)
    assert len(heard.tokens) == 12
    assert len(flown) == 10, "the prompt gives the first token, and the round after it is not ahead"


def test_a_tiny_dflash_pair_in_an_engine(flown: list[PendingRound]) -> None:
    r: Rig = rig(tiny("qwen35"), draft_path=tiny("qwen35", drafter=True), np=3)
    texts = list(known_texts(tiny("qwen35")).items())
    heard = [(r.submit(p, N_TEXT), text) for p, text in texts[:5]]
    r.run()
    assert all(h.tokens == text for h, text in heard)


@pytest.mark.slow
def test_slots_hold_no_page_beyond_their_reservation(flown: list[PendingRound]) -> None:
    """Passes and verifies ahead are laid out behind all rows that may be kept: up to the last row, and not beyond."""
    texts = known_texts(QWEN35)
    for n in range(12, N_TEXT):
        r = rig(QWEN35, spec_type="mtp", n_draft_max=8, n_draft_fixed=True, np=2, page_size=16)
        heard = [
            (r.submit(p, n + i), text[: n + i]) for i, (p, text) in enumerate(list(texts.items())[:2])
        ]
        r.run()  # which checks the table after each round
        assert all(h.tokens == text[: len(h.tokens)] for h, text in heard)
    assert any(flight.launched.tokens is not None for flight in flown)
