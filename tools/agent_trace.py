"""Made-up traces of agents: conversations that grow by tools' results and by answers, and quantiles of their times.

Lengths are drawn from log-normal distributions, because recorded agents have many short calls and results, and few very long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp
from random import Random

SPREAD = 1.0  # standard deviation of a length's logarithm: a tenth is 3.6 times the median or more
MOST = 16  # times the median, at most


@dataclass(frozen=True)
class AgentTurn:
    """One turn of an agent: the tokens that the conversation grows by before the answer (a question, then tools' results), the tokens of the
    answer, and the seconds that the tool takes before."""

    n_new: int
    n_answer: int
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Agents:
    """The kind of agents.

    n_header   tokens of system prompt and tools, which all agents share
    n_turn     turns of each
    new, answer, pause_s   medians
    n_ctx      tokens that a conversation may have; a turn that would need more is left out, with all behind it
    """

    n_header: int = 4000
    n_turn: int = 12
    new: int = 500
    answer: int = 120
    pause_s: float = 0.0
    n_ctx: int = 32_768


def trace(kind: Agents, seed: int) -> list[AgentTurn]:
    """The turns of one agent, the same for the same seed."""
    draw, n, steps = Random(seed), kind.n_header, list[AgentTurn]()
    for _ in range(kind.n_turn):
        step = AgentTurn(
            _length(draw, kind.new), _length(draw, kind.answer), kind.pause_s * _factor(draw)
        )
        n += step.n_new + step.n_answer
        if n > kind.n_ctx:
            break
        steps.append(step)
    return steps


def _factor(draw: Random) -> float:
    return min(exp(draw.gauss(0.0, SPREAD)), MOST)


def _length(draw: Random, median: int) -> int:
    return max(2, round(median * _factor(draw)))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0.0 of none."""
    ranked = sorted(values)
    return ranked[max(0, ceil(share * len(ranked)) - 1)] if ranked else 0.0
