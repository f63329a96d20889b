"""How many rows a forward may have that reads prompts while slots decode. Arithmetic only: no torch, and no clock of its own.

Decoding slots wait for the prompt rows of their forward; requests that are still read wait for more of them. A prompt's rows cost their
time in any forward, and fewer forwards have fewer fixed parts, so one takes all prompts that wait, as long as it is expected to last no
longer than a person notices, and in any case the rows that are not too many anywhere. Targets of the operator change that: a time per
output token makes it smaller, a time to first token larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspec.engine.policy.forward_costs import ForwardCosts
from pyspec.engine.policy.prompt_alone import PromptsAlone
from pyspec.slots.table import Slot

PAUSE_MS = 400.0  # most that decoding slots wait for one forward, unless `least` rows take longer
LEAST = 64  # prompt rows that a forward has in any case, so that prompts go on
CREDIT = 8.0  # rounds of the target that saved time counts for
URGENT = 0.5  # share of the time to first token after which a waiting prompt takes all rows
NEWER = 0.1  # weight of the last round in the mean tokens of a slot


class PacedRequest(Protocol):
    """A request in a slot, such as the loop's `Job`.

    started    seconds, of the loop's clock
    n_prefill  tokens to read; n_cached: of these, from the cache
    """

    @property
    def started(self) -> float: ...

    @property
    def is_decoding(self) -> bool: ...

    @property
    def n_prefill(self) -> int: ...

    @property
    def n_cached(self) -> int: ...

    @property
    def slot(self) -> Slot | None: ...


@dataclass(frozen=True, slots=True)
class PaceTargets:
    """The operator's targets in milliseconds; 0: none.

    tpot  per output token, in the mean over an answer
    ttft  from a request's arrival to its first token
    """

    tpot: float = 0.0
    ttft: float = 0.0


class PromptPace:
    """Rows of a forward with decoding slots: `least` to `most`, or a fixed number where both are equal.

    costs    of forwards with prompts
    alone    whether a prompt runs by itself, as a graph
    balance  milliseconds that decoding slots have left of the target, by all rounds so far
    """

    def __init__(
        self,
        least: int,
        most: int,
        costs: ForwardCosts,
        targets: PaceTargets | None = None,
    ) -> None:
        self.least, self.most = min(least, most), most
        self.targets = PaceTargets() if targets is None else targets
        self.costs, self.alone = costs, PromptsAlone(costs)
        self.balance = 0.0
        self._tokens = 1.0  # of a slot, in the mean of rounds

    def rows(self, jobs: Iterable[PacedRequest], now: float, n_verify: int) -> int:
        """Most rows of the next forward, if slots decode. now: seconds, of the loop's clock; n_verify: rows of those slots, about."""
        is_fixed = self.least == self.most and not self.targets.tpot
        if is_fixed or not self.costs.is_known:
            return self.most
        if self._is_urgent(jobs, now):
            return self.most
        if self.targets.tpot:
            least = min(n_verify + LEAST, self.least)
            return max(least, min(self.most, self.costs.rows(self._allowed + self.balance)))
        return max(self.least, min(self.most, self.costs.rows(PAUSE_MS)))

    @property
    def _allowed(self) -> float:
        """Milliseconds of a round at the target."""
        return self.targets.tpot * self._tokens

    def landed(self, n_row: int, ms: float, n_read: int, *, decodes: bool) -> None:
        """A forward of so many rows took so long. n_read: rows of prompts among them; decodes: other slots decoded in it."""
        if n_read:
            self.costs.add(n_row, ms)
        self.alone.rested = 0.0
        if decodes and self.targets.tpot:
            most = CREDIT * self._allowed
            self.balance = min(max(self.balance + self._allowed - ms, -most), most)

    def pause_ms(self, jobs: Iterable[PacedRequest], now: float) -> float:
        """Most that requests rest while prompts run alone: nothing where the operator fixed the rows of forwards, or a prompt is urgent, and
        what is left of the target for output tokens. now: as in `rows`."""
        if (self.least == self.most and not self.targets.tpot) or self._is_urgent(jobs, now):
            return 0.0
        return min(PAUSE_MS, self._allowed + self.balance) if self.targets.tpot else PAUSE_MS

    def _is_urgent(self, jobs: Iterable[PacedRequest], now: float) -> bool:
        urgent = now - 1e-3 * URGENT * self.targets.ttft
        return bool(self.targets.ttft) and any(
            job.started <= urgent for job in jobs if not job.is_decoding
        )

    def landed_alone(self, rows: int, ms: float, *, others: bool) -> None:
        """A prompt's graph of so many rows took so long. others: requests waited for it."""
        self.alone.landed(rows, ms, others=others)
        if others and self.targets.tpot:
            self.balance = max(self.balance - ms, -CREDIT * self._allowed)

    def committed(self, n_tokens: Sequence[int]) -> None:
        """Decoding slots were given so many tokens each in a round."""
        if n_tokens:
            self._tokens += NEWER * (max(1.0, sum(n_tokens) / len(n_tokens)) - self._tokens)
