"""How many rows a forward may have that reads prompts while slots decode. Arithmetic only: no torch, and no clock of its own.

Decoding slots wait for the prompt rows of their forward; requests that are still read wait for more of them. A prompt's rows cost their
time in any forward, and fewer forwards have fewer fixed parts, so one takes all prompts that wait, as long as it is expected to last no
longer than a person notices, and in any case the rows that are not too many anywhere. Targets of the operator change that: a time per
output token makes it smaller, a time to first token larger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PAUSE_MS = 400.0  # most that decoding slots wait for one forward, unless `least` rows take longer
LEAST = 64  # prompt rows that a forward has in any case, so that prompts go on
N_SAMPLE = 5  # forwards of a size that costs are taken from
FAR = 1000.0  # factor beyond the largest forward that was measured
CREDIT = 8.0  # rounds of the target that saved time counts for
URGENT = 0.5  # share of the time to first token after which a waiting prompt takes all rows
NEWER = 0.1  # weight of the last round in the mean tokens of a slot

Floats = NDArray[np.float64]


class ForwardCosts:
    """Milliseconds of forwards that read prompts, by rows: medians of the last ones of a size, and straight lines between sizes.

    A forward has a fixed part, which is large on a GPU, where it is no graph. What is smaller than all that was measured counts as if half of
    the smallest were fixed; what is larger, as if nothing were.
    """

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[int, float]]] = {}  # by size class: rows and milliseconds
        self._curve: tuple[Floats, Floats] | None = None

    def add(self, n_row: int, ms: float) -> None:
        """A forward of so many rows took so long, its wait for the results included."""
        self._last.setdefault(size_class(n_row), deque(maxlen=N_SAMPLE)).append((n_row, ms))
        self._curve = None

    @property
    def is_known(self) -> bool:
        return bool(self._last)

    @property
    def curve(self) -> tuple[Floats, Floats]:
        """Rows, from 0 to more than any forward has, and milliseconds, which never fall."""
        if self._curve is None:
            medians = [np.median(np.array(last), axis=0) for _, last in sorted(self._last.items())]
            rows, ms = np.array(medians).T
            rows = np.concatenate(([0.0], rows, [FAR * rows[-1]]))
            ms = np.concatenate(([ms[0] / 2], ms, [FAR * ms[-1]]))
            self._curve = rows, np.maximum.accumulate(ms)
        return self._curve

    def ms(self, n_row: Floats) -> Floats:
        """Of forwards of so many rows."""
        return np.interp(n_row, *self.curve)

    def rows(self, ms: float) -> int:
        """Most rows of a forward that takes no longer."""
        rows, took = self.curve
        at = int(np.searchsorted(took, ms, side="right"))
        if at == len(rows):
            return int(rows[-1])
        if not at:
            return 0
        share = (ms - took[at - 1]) / (took[at] - took[at - 1])
        return int(rows[at - 1] + share * (rows[at] - rows[at - 1]))


def size_class(n_row: int) -> int:
    """Rows that are measured together: two classes an octave."""
    return int(2 * math.log2(max(n_row, 1)))


class PacedRequest(Protocol):
    """A request in a slot, such as the loop's `Job`. started: seconds, of the loop's clock."""

    @property
    def started(self) -> float: ...

    @property
    def is_decoding(self) -> bool: ...


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
        self.costs = costs
        self.balance = 0.0
        self._tokens = 1.0  # of a slot, in the mean of rounds

    def rows(self, jobs: Iterable[PacedRequest], now: float, n_verify: int) -> int:
        """Most rows of the next forward, if slots decode. now: seconds, of the loop's clock; n_verify: rows of those slots, about."""
        is_fixed = self.least == self.most and not self.targets.tpot
        if is_fixed or not self.costs.is_known:
            return self.most
        waiting = [job for job in jobs if not job.is_decoding]
        urgent = now - 1e-3 * URGENT * self.targets.ttft
        if self.targets.ttft and any(job.started <= urgent for job in waiting):
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
        if decodes and self.targets.tpot:
            most = CREDIT * self._allowed
            self.balance = min(max(self.balance + self._allowed - ms, -most), most)

    def committed(self, n_tokens: Sequence[int]) -> None:
        """Decoding slots were given so many tokens each in a round."""
        if n_tokens:
            self._tokens += NEWER * (max(1.0, sum(n_tokens) / len(n_tokens)) - self._tokens)
