"""Which rows of prompts a forward takes. Arithmetic only: no torch, and no clock of its own.

Decoding slots wait for the prompt rows of their forward; requests that are still read wait for more of them. A prompt's rows cost their
time in any forward, and fewer forwards have fewer fixed parts, so one takes all prompts that wait, as long as it is expected to last no
longer than a person notices, and in any case the rows that are not too many anywhere (`PromptPace`). Targets of the operator change that: a
time per output token makes it smaller, a time to first token larger.

A prompt may run alone, as a CUDA graph, while other requests rest for a round (`PromptsAlone`). A forward with prompts and decoding slots is
no graph. The host launches its kernels one by one, which takes it longer than the device needs if the model is small or divided over several
GPUs: 62 ms for a forward of a 27B model on four H100, where the graph of a prompt of 300 tokens takes about 20. One such forward for all
requests is then slower than a graph for each prompt and a round of the decoding slots behind.

A short prompt is over soon. A long one pauses after each of its chunks until the decoding slots have had their share (`PromptThrottle`). By
default a long prompt takes as much time as each decoding slot, so one beside eight slows them by a ninth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pyspec.engine.policy.costs import N_SAMPLE, Costs
from pyspec.slots.table import Slot

# Sources in brackets: least part of the tokens a second of the servers of tests/test_prompt_pace.py with other values (docs/log, 2026-11-29)
PAUSE_MS = 400.0  # most that decoding slots wait for one forward, unless `least` rows take longer: a person notices more [200: 0.988, 800: the same]
LEAST = 64  # prompt rows that a forward has in any case, so that prompts go on [16: the same, 256: 1.02]
CREDIT = 8.0  # rounds of the target that saved time counts for [2: 0.993, 32: the same]
URGENT = 0.5  # share of the time to first token after which a waiting prompt takes all rows
NEWER = 0.25  # weight of the last round in means of tokens of a slot and of milliseconds [of tokens 0.1: the same]
DOUBT_EVERY = 50  # such choices, one forward for all is measured anew [10 and never: 0.93]
LONG = 8192  # uncached tokens of a long prompt
PAUSE = 2.0  # factor of a usual chunk's time beyond which it is a pause of the machine, for which no prompt waits

GraphOf = Callable[[int], int | None]
R = TypeVar("R", bound="PacedRequest")


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


class RoundPart(Protocol):
    """A request's part in a round, such as the loop's `Work`."""

    @property
    def job(self) -> PacedRequest: ...

    @property
    def is_prompt(self) -> bool: ...


class PromptPace:
    """Rows of a forward with decoding slots: `least` to `most`, or a fixed number where both are equal.

    alone    whether a prompt runs by itself, as a graph
    balance  milliseconds that decoding slots have left of the target, by all rounds so far
    """

    def __init__(
        self,
        least: int,
        most: int,
        costs: Costs,
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
        if is_fixed or not self.costs.prompts.has_trusted:
            return self.most
        if self._is_urgent(jobs, now):
            return self.most
        if self.targets.tpot:
            least = min(n_verify + LEAST, self.least)
            return max(least, min(self.most, self.costs.prompts.most(self._allowed + self.balance)))
        return max(self.least, min(self.most, self.costs.prompts.most(PAUSE_MS)))

    @property
    def _allowed(self) -> float:
        """Milliseconds of a round at the target."""
        return self.targets.tpot * self._tokens

    def landed(self, n_row: int, ms: float, n_read: int, *, decodes: bool) -> None:
        """A forward of so many rows took so long. n_read: rows of prompts among them; decodes: other slots decoded in it."""
        if n_read:
            self.costs.prompts.add(n_row, ms)
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


class PromptsAlone:
    """Chooses rounds of one prompt.

    graph_of  rows of the graph that holds a whole prompt of so many tokens; None: there is none
    rested    milliseconds that others have waited for such rounds, since the last round for all
    """

    def __init__(self, costs: Costs) -> None:
        self.graph_of: GraphOf = lambda n_row: None
        self.costs = costs
        self.rested = 0.0
        self._n_picked = 0

    def landed(self, rows: int, ms: float, *, others: bool) -> None:
        """The graph of a prompt, of so many rows, took so long. others: requests waited for it."""
        self.costs.alone.add(rows, ms)
        self.rested += ms if others else 0.0

    def pick(
        self,
        whole: Sequence[int],
        n_other: int,
        n_verify: int,
        verify_ms: float,
        most: int,
        pause_ms: float = PAUSE_MS,
    ) -> int | None:
        """The prompt that runs alone in this round; None: all requests run together.

        whole: tokens of each prompt that waits from its first token on, oldest first, 0 if it can not be a graph; n_other: rows of the other
        prompts; n_verify: rows of the decoding slots, in `verify_ms` milliseconds by themselves; most: rows of one forward for all; pause_ms:
        most that others wait for rounds of this kind, one after the other.
        """
        graphs = [(i, rows) for i, n in enumerate(whole) if (rows := self.graph_of(n))]
        if not graphs or not self.costs.prompts.has_trusted:
            return None
        n_together = sum(whole) + n_other + n_verify
        if n_together == whole[graphs[0][0]]:  # it is alone in any case
            return None
        times = [self._ms(rows) for _, rows in graphs]
        first = times[0] or 0.0
        if pause_ms <= 0 or self.rested + first > pause_ms:
            return None
        if times[0] is None:
            return graphs[0][0]  # one round tells
        n_rest = n_together - sum(whole[i] for i, _ in graphs)
        rest = verify_ms if n_rest == n_verify else self._joint_ms(n_rest, most)
        apart = sum(first if ms is None else ms for ms in times) + (rest if n_rest else 0.0)
        if apart >= self._joint_ms(n_together, most):
            return None
        self._n_picked += 1
        return graphs[0][0] if self._n_picked % DOUBT_EVERY else None

    def expected(self, n_token: int) -> float:
        """Milliseconds of the graph of a prompt; 0: unknown."""
        rows = self.graph_of(n_token)
        return (self._ms(rows) or 0.0) if rows else 0.0

    def _ms(self, rows: int) -> float | None:
        """Milliseconds of a graph; None: none of about its size has run."""
        return self.costs.alone(rows) if self.costs.alone.knows(rows) else None

    def _joint_ms(self, n_row: int, most: int) -> float:
        """Milliseconds of forwards for so many rows. One that is larger than all that were measured takes no longer, so that it is tried."""
        known = self.costs.prompts.largest
        return self.costs.prompts(min(n_row, most, known)) * max(1.0, n_row / max(most, 1))


class PromptThrottle:
    """weight: time of a long prompt in units of a decoding slot's; 0: no limit. n_free: rows of it that are never delayed.

    owed  milliseconds due to the decoding slots before the next chunk: at most what `PAUSE` usual chunks take from those that decode now
    own   milliseconds of a round of theirs
    """

    def __init__(self, weight: float, n_free: int) -> None:
        self.weight, self.n_free = weight, n_free
        self.owed = self.own = 0.0
        self.n_resting = 0  # prompts left out of the last plan
        self._landed = 0.0
        self._chunks: deque[float] = deque(maxlen=N_SAMPLE)  # milliseconds of each beyond `own`
        self._follows = False  # the round before had decoding slots, too, so they waited for this one

    def awake(self, jobs: Iterable[R]) -> list[R]:
        """Jobs that take part in this round."""
        jobs = list(jobs)
        if self.owed <= 0 or not any(job.is_decoding for job in jobs):
            self.owed = 0.0
            self.n_resting = 0
            return jobs
        found = [job for job in jobs if job.is_decoding or not self._is_long(job)]
        self.n_resting = len(jobs) - len(found)
        return found

    @property
    def are_over(self) -> bool:
        """A paused prompt may run again."""
        return self.n_resting > 0 and self.owed <= 0

    def _is_long(self, job: PacedRequest) -> bool:
        if not self.weight or job.slot is None or job.n_prefill - job.n_cached <= LONG:
            return False
        return job.slot.n_past - job.n_cached >= self.n_free

    def landed(self, at: float, work: Sequence[RoundPart], *, rested: bool = False) -> None:
        """A round's results arrived at this time, in seconds. Call it before they are committed. rested: decoding slots had no part in it."""
        took, follows = 1e3 * (at - self._landed), self._follows
        n_prompt = sum(w.is_prompt for w in work)
        n_decoding = len(work) - n_prompt
        self._landed, self._follows = at, n_decoding > 0 or (rested and follows)
        if not follows or not n_decoding:
            return
        n_long = sum(w.is_prompt and self._is_long(w.job) for w in work)
        if n_long:
            self._chunks.append(max(0.0, took - self.own))
            chunk = min(self._chunks[-1], self._usual)
            self.owed += chunk * n_decoding / (self.weight * n_long) - self.own
        elif n_prompt:
            self.owed -= self.own
        else:
            self.own += (took - self.own) * (NEWER if self.own else 1.0)
            self.owed -= took
        # credit for a rest that was too long, up to one round
        most = self._usual * n_decoding / self.weight if self.weight else 0.0
        self.owed = max(min(self.owed, most), -self.own)

    @property
    def _usual(self) -> float:
        """Most milliseconds that a chunk counts: of the first one, what the pace lets a forward take."""
        if len(self._chunks) < 2:
            return PAUSE_MS
        return (
            PAUSE * sorted(self._chunks)[len(self._chunks) // 4]
        )  # pauses of the machine come in a row
