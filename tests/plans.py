"""Plans of rounds for tests: one from a controller alone, and parts of a loop's plans fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from waiting import Clock

from pyspec.engine.loop.loop import Loop
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import Offers, Prompt, RoundPlan, RoundState
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.round import LogitsNeed


def choose(
    c: Controller, caps: Sequence[tuple[int, int]], offers: Offers | None = None, beside: int = 0
) -> list[int]:
    """Drafts of the next round of these decoding slots, beside so many rows of a prompt. The plan is taken."""
    state = RoundState(c, caps, [Prompt(beside)] if beside else [], lambda: offers or {})
    made = c.plan(state)
    c.take(state, made)
    return [n for _, n in made.drafts]


def fix_lengths(loop: Loop, lengths: Callable[[Sequence[tuple[int, int]]], list[int]]) -> None:
    """Every plan has drafts of these lengths from now on. lengths: of (slot, cap) of each decoding slot"""
    plan = loop.controller.plan

    def fixed(state: RoundState) -> RoundPlan:
        made = plan(state)
        if made.alone is not None or not state.decoding:
            return made
        picked = lengths(state.decoding)
        drafts = [(slot, n) for (slot, _), n in zip(state.decoding, picked, strict=True)]
        # it says nothing of what drafts are worth, so no drafter rests by it, and none are cut
        return replace(made, drafts=drafts, asked=drafts, offered={}, kind="", pays=None, rate=0.0)

    loop.controller.plan = fixed  # type: ignore[method-assign]


def fix_alone(loop: Loop, pick: Callable[[list[int], int], int | None], graph_of: Any = None) -> None:
    """From now on this prompt is read by itself while the others rest. pick: of each prompt the rows of its graph, 0 if there is none, and the
    slots that decode. graph_of: rows of graphs, of any prompt if there is none"""
    c = loop.controller
    plan, c.rules = c.plan, replace(c.rules, graph_of=graph_of or (lambda n: n))

    def fixed(state: RoundState) -> RoundPlan:
        at = (
            pick([prompt.graph for prompt in state.prompts], len(state.decoding))
            if state.prompts
            else None
        )
        if at is not None:
            return replace(plan(replace(state, prompts=())), alone=at)
        return replace(plan(state), alone=None) if state.prompts else plan(state)

    c.plan = fixed  # type: ignore[method-assign]


def timed(loop: Loop, round_ms: float, row_ms: float) -> Clock:
    """A clock for the loop. It goes on by rounds, by other work that reports its time, and a little with each look."""
    clock, results = Clock(by=1e-5), loop.worker.results
    loop.clock = loop.speculator.clock = clock

    def run(batch: Batch, reads: LogitsNeed) -> Out:  # a tape's replay, too
        clock.now += 1e-3 * (round_ms + row_ms * batch.n_row)
        return results(batch, reads)

    loop.worker.results = run  # type: ignore[method-assign]
    return clock
