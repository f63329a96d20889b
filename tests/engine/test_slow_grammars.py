"""Requests with slow grammars take turns, so that a round waits for one of them at most, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_rig import FIXTURES, GREEDY, rig
from waiting import Clock

from pyspec.constrain.constraint import SLOW_S, Constraint
from pyspec.request import Grammar

MANY = 8
LETTERS = Grammar(kind="regex", source="[a-z ]{3,200}")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("cost", [SLOW_S * 5, SLOW_S * 1.01])
def test_a_round_waits_for_one_slow_grammar_at_most_and_texts_stay(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    r = rig(FIXTURES / "llama.gguf", np=MANY + 3, ctx=100, page_size=16, spec_type="none")
    want = [r.generate([30 + i, 31], 9, GREEDY, grammar=LETTERS).tokens for i in range(MANY)]
    want_plain = r.generate([20, 21, 22], 60).tokens
    want_quick = r.generate([50, 31], 9, GREEDY, grammar=LETTERS).tokens
    clock, looks, commit = Clock(by=5e-3), [0], Constraint.commit
    r.loop.turns.clock = clock

    def slow(self: Constraint, tokens: Sequence[int]) -> int:
        if self is not quick.job.constraint:
            looks[0] += 1
            clock.now += cost
            self.spent += cost
        return commit(self, tokens)

    quick = r.submit([50, 31], 9, GREEDY, grammar=LETTERS)
    monkeypatch.setattr(Constraint, "commit", slow)
    held = [r.submit([30 + i, 31], 9, GREEDY, grammar=LETTERS) for i in range(MANY)]
    plain = r.submit([20, 21, 22], 60)
    r.loop.step()  # its speed is not known yet
    r.loop.step()
    most, rounds = 0, 0
    while not plain.over:
        looks[0] = 0
        r.loop.step()
        most, rounds = max(most, looks[0]), rounds + 1
    assert most == 1, "each round waits for one"
    assert rounds <= 60, "who has no grammar has a part in every round"
    assert quick.tokens == want_quick
    r.run()
    assert [h.tokens for h in held] == want and plain.tokens == want_plain


def test_slow_ones_among_themselves_take_turns_without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    r = rig(FIXTURES / "llama.gguf", np=3, ctx=100, page_size=16, spec_type="none")
    r.loop.turns.clock = lambda: 0.0  # so that no pause would end
    commit = Constraint.commit

    def slow(self: Constraint, tokens: Sequence[int]) -> int:
        self.spent += 3 * SLOW_S
        return commit(self, tokens)

    monkeypatch.setattr(Constraint, "commit", slow)
    held = [r.submit([30 + i, 31], 9, GREEDY, grammar=LETTERS) for i in range(3)]
    r.steps(2 + 3 * 4)
    assert max(len(h.tokens) for h in held) - min(len(h.tokens) for h in held) <= 1
    r.run()


def test_who_is_quick_again_has_a_part_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    r = rig(FIXTURES / "llama.gguf", np=2, ctx=100, page_size=16, spec_type="none")
    held, plain = r.submit([30, 31], 40, GREEDY, grammar=LETTERS), r.submit([20, 21, 22], 90)
    r.loop.step()
    assert held.job.constraint is not None
    held.job.constraint.spent += 100 * SLOW_S
    r.loop.step()
    assert r.loop.turns.n_slow == 1
    n = len(held.tokens)
    r.loop.step()
    assert len(held.tokens) == n, "the other has its share first"
    r.loop.turns.clock = lambda: 1e9
    r.steps(6)
    assert r.loop.turns.n_slow == 0 and len(held.tokens) >= n + 5
    plain.job.cancelled = True
    r.run()
