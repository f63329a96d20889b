"""Events that a round defers until the device runs the next: listeners get the same ones, in the same order."""

from __future__ import annotations

import pytest
from draft_fakes import Fickle
from engine_rig import GREEDY, Heard, Rig, fake_rig

from pyspec.errors import DeviceError
from pyspec.request import Delta, Done, Event, SamplingParams


def loop_of(*, defers: bool) -> Rig:
    r = fake_rig(3, Fickle(5))
    r.loop.committer.defers = defers
    return r


def told(events: list[Event]) -> list[object]:
    """Events without clock values."""
    out: list[object] = []
    for e in events:
        plain = isinstance(e, Delta)
        out.append((e.tokens, e.text, e.n_draft, e.n_accepted) if plain else type(e))
        if isinstance(e, Done):
            t = e.timings
            out.append(
                (e.finish, e.n_predicted, e.stop_string, t.n_rounds, t.accepted_per_pos, t.n_draft_used)
            )
    return out


def ask_all(r: Rig) -> list[Heard]:
    free = SamplingParams(temperature=0.0)
    drawn = SamplingParams(temperature=0.7, seed=3, repeat_penalty=1.3)
    return [
        r.submit([1, 2, 3], 40),
        r.submit([4, 5], 200, free),
        r.submit([6, 7, 8, 9], 50, stop=("a", "e", "t")),
        r.submit([7] * 20, 30, drawn),
        r.submit([8, 1], 1),
    ]


def test_events_are_the_same_and_in_the_same_order() -> None:
    heard = []
    for defers in (False, True):
        r = loop_of(defers=defers)
        heard.append(ask_all(r))
        r.run()
        assert r.loop.committer.later == []
    assert [told(h.events) for h in heard[0]] == [told(h.events) for h in heard[1]]
    assert {h.finish for h in heard[1]} >= {"length", "stop"}


@pytest.mark.parametrize("n_round", [2, 5])
def test_a_cancelled_request_hears_of_its_last_round_first(n_round: int) -> None:
    texts = []
    for defers in (False, True):
        r = loop_of(defers=defers)
        heard = [r.submit([i, 2, 3], 100, GREEDY) for i in range(2)]
        r.steps(n_round)
        assert bool(r.loop.committer.later) == defers
        r.loop.cancel(heard[0].job)
        r.loop.step()
        assert heard[0].finish == "cancelled"
        texts.append(told(heard[0].events))
    assert texts[0] == texts[1]


def test_an_engine_that_goes_down_says_what_it_had_first() -> None:
    r = loop_of(defers=True)
    heard = r.submit([1, 2, 3], 100)
    r.steps(3)
    n = len(heard.tokens)
    r.loop.abort(DeviceError("gone"))
    assert len(heard.tokens) > n and isinstance(heard.error, DeviceError)


def test_first_tokens_are_handed_out_before_states_are_copied() -> None:
    r = loop_of(defers=True)
    seen: list[int] = []
    heard = r.submit([1, 2, 3], 40)
    r.loop.on_wait = lambda: seen.append(len(heard.tokens))
    observe = r.loop.speculator.observe

    def observed(*args: object) -> None:
        seen.append(-1)
        observe(*args)  # type: ignore[arg-type]

    r.loop.speculator.observe = observed  # type: ignore[method-assign]
    r.loop.step()
    assert seen == [0, 1, -1]


def test_who_decodes_does_not_wait_for_others_first_tokens_to_be_handed_out() -> None:
    r = loop_of(defers=True)
    first = r.submit([1, 2, 3], 40)
    r.steps(2)
    second, n = r.submit([4, 5, 6], 40), 0

    def count() -> None:
        nonlocal n
        n += 1

    r.loop.on_wait = count
    r.loop.step()
    assert n == 1 and not second.tokens and first.job.is_decoding
    r.loop.step()
    assert second.tokens
