"""The first answers of a fresh engine draft, though its warm-up was timed on a busy machine. The loop is the real one, its clock is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from draft_fakes import Oracle, text_after
from engine_rig import GREEDY, Rig, fake_rig
from sampling import few

from pyspec.engine.load.warmup import warm_up
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts

N_DRAFT, N_SLOT, N_TOKENS = 5, 2, 30
DRAFT_MS, VERIFY_MS, ROW_MS = 12.0, 10.0, 1.0


class Machine:
    """A clock that advances by the cost of the work, times the slowdown by other work on the machine."""

    def __init__(self, slows: Callable[[str], float], draft_ms: float = DRAFT_MS) -> None:
        self.now, self.slows, self.draft_ms = 0.0, slows, draft_ms

    def spend(self, what: str, ms: float) -> None:
        self.now += 1e-3 * ms * self.slows(what)


def engine_on(machine: Machine) -> Rig:
    r = fake_rig(N_SLOT, drafter := Oracle(N_DRAFT))
    r.loop.controller.fixed = False
    r.loop.clock = lambda: machine.now
    r.call_by_call()
    forward, draft = r.loop.target.run, drafter.draft

    def timed_forward(batch: Batch, taps: Sequence[int] = ()) -> Out:
        machine.spend("verify", VERIFY_MS + ROW_MS * batch.n_row)
        return forward(batch, taps)

    def timed_draft(asks: Sequence[DraftRequest]) -> list[Drafts]:
        machine.spend("draft", machine.draft_ms)
        return draft(asks)

    r.loop.target.run, drafter.draft = timed_forward, timed_draft  # type: ignore[method-assign]
    return r


def drafted(r: Rig, n_answer: int) -> list[int]:
    """Drafted tokens of each answer, requested one after the other, as a person with curl does."""
    found = []
    for i in range(n_answer):
        heard = r.generate([i, 2, 3], N_TOKENS, GREEDY)
        assert heard.tokens == text_after([i, 2, 3], N_TOKENS)
        found.append(heard.timings.draft_n)
    return found


def test_a_warm_up_that_timed_drafts_under_noise_silences_no_answer() -> None:
    """Measured: 124 to 174 ms instead of 12. Answers of 30 tokens were over before the first probe, seven in a row."""
    rng = random.Random(1)
    machine = Machine(lambda what: rng.uniform(10, 14) if what == "draft" else 1.0)
    r = engine_on(machine)
    warm_up(r.loop, r.tokenizer, r.info.n_overhang, 0)
    machine.slows = lambda what: 1.0
    assert all(drafted(r, 8))


def drafted_beside_others(seed: int) -> list[int]:
    rng = random.Random(seed)
    r = engine_on(Machine(lambda what: rng.uniform(3, 12) if rng.random() < 0.4 else 1.0))
    warm_up(r.loop, r.tokenizer, r.info.n_overhang, 0)
    return drafted(r, 12)


@pytest.mark.parametrize("seed", few(range(8), 2, 5))
def test_first_answers_on_a_machine_that_stays_busy_draft(seed: int) -> None:
    found = drafted_beside_others(seed)
    assert sum(n > 0 for n in found) >= 8 and any(found[:2]), found


@pytest.mark.slow
def test_of_thirty_engines_on_busy_machines_all_but_one_draft_ten_of_their_first_twelve_answers() -> (
    None
):
    """Of 100 engines one does not, another one before and after each change of the policy."""
    rare = [found for found in map(drafted_beside_others, range(30)) if sum(n > 0 for n in found) < 10]
    assert len(rare) <= 1, rare


def test_drafts_that_are_truly_dear_are_given_up() -> None:
    """Forty plain rounds each: they are timed again a few times only."""
    r = engine_on(Machine(lambda what: 1.0, draft_ms=440.0))
    warm_up(r.loop, r.tokenizer, r.info.n_overhang, 0)
    assert sum(drafted(r, 40)) <= 40, "of 1,200 tokens"
