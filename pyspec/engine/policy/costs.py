"""What work costs: measured milliseconds by size, on machines that are busy with other work, too. And what is owed for work that did not pay
(`Account`). Arithmetic only: no torch, and no clock."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyspec.engine.policy.row_costs import NO_EXPERTS, TINY, Brought, Factors

N_SAMPLE, N_TRUST = 5, 2  # samples kept per size; samples needed to trust them
N_AGREE = N_SAMPLE // 2 + 1  # samples that settle a size if they agree:
# the median is at most this factor above the least, plus this share of a plain round.
AGREE, SLACK = 1.5, 0.1
LIKELY = (
    1.25  # a single sample above this factor of the straight line counts as noise [1.0: 0.99, 4: 0.98]
)
CAUTION = 0.5  # share of the steepness beyond sizes that a warm-up left: a busy machine made those too slow, and drafts would rest [0: 0.997, 1: 0.963]
LEAST = 0.05  # share of a usual round that a round takes in any case
FELL = 2.0  # factor by which a size's time has to fall to show that other work disturbed it (tests/test_control_noise.py: offers are taken again)
SHARE = 0.004  # of all time, that may be lost to what does not pay: chosen; tools/replay.py gives the same with 0.001 and 0.016
LIMIT = 2.0  # plain rounds of debt that begin a rest, and that may be saved in advance [0.5: 0.995, 8: the same]
MOST_DEBT = 16.0  # rounds: a pause of the machine is not held against it for longer, and no time that was saved counts for more [4: 0.99]


def bucket(size: int) -> int:
    """Sizes timed together: single ones below 64, then 32 per octave, named by their largest."""
    step = 1 << max(size.bit_length() - 6, 0)
    return -(-size // step) * step


def half_octave(size: int) -> int:
    """Sizes timed together: two buckets an octave, named by their largest."""
    return int(2 ** (math.ceil(2 * math.log2(max(size, 1))) / 2))


def is_time(*ms: float) -> bool:
    """Whether these can be times of work. Those of a clock that was set back, or that is broken, teach nothing."""
    return all(0 <= each < math.inf for each in ms)


class Sample(NamedTuple):
    """ms: of a round with the usual experts; brought: those that it had, nothing where all are on the card."""

    ms: float
    size: int
    brought: Brought = NO_EXPERTS


def _agree(times: Sequence[float], slack: float) -> bool:
    """Most of these times, ascending, are near the least."""
    return times[len(times) // 2] <= AGREE * times[0] + slack


class Timer:
    """Milliseconds by size: the least of the last samples, because a busy machine only adds time.

    A time rises only to samples that agree with each other: those of other work do not. A size is trusted from its second sample on, and
    needs a new sample if it is not used for long. Costs between trusted sizes are interpolated. Kernels have steps; the warm-up has timed
    every size of a graph. It may have done so on a busy machine, though: a size that only it has timed counts no more than the straight line
    through sizes that were in use since. Without one (large models on a CPU), times beyond the trusted sizes lie on a straight line: through
    the least of single samples there, or through the smallest and the largest trusted size. A constant would make drafts look free until
    two drafts have had the same size.

    sparse: sizes are seldom the same, and no warm-up times them. So one sample tells, those of half an octave count together, and each stands
    at its own size. What is smaller than all that were measured counts as if half of the smallest were fixed; what is larger, as if nothing were.

    shift  milliseconds that rounds take now beyond those with the usual experts (`row_costs.py`)
    """

    def __init__(self, bucket: Callable[[int], int] = bucket, *, sparse: bool = False) -> None:
        self.bucket, self.sparse = half_octave if sparse else bucket, sparse
        self.samples: dict[int, deque[Sample]] = {}  # by bucket
        self.fresh: set[int] = set()
        self.stale: set[int] = set()  # expired: the old time is used until there is a new one
        self.used: set[int] = set()  # sizes with samples since the warm-up
        self._runs: dict[range | tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._sizes: list[int] = []  # trusted ones, ascending
        self._ms: list[float] = []
        self._was_warmed = False  # a warm-up timed sizes
        self._slope = 0.0  # milliseconds of a further size, beyond them
        self.shift = 0.0

    def add(self, size: int, ms: float, brought: Brought = NO_EXPERTS) -> None:
        """Add a sample."""
        if not is_time(ms):
            return
        at, size, ms = size, self.bucket(size), max(ms, TINY)
        if self.knows(size) and FELL * ms < min(self.samples[size]).ms:
            self._distrust(size)
        samples = self.samples.setdefault(size, deque(maxlen=N_SAMPLE))
        if len(samples) == N_SAMPLE:
            newer = sorted([*(sample.ms for sample in samples), ms][1:])
            if samples[0].ms < newer[0] and not _agree(newer, 0.0):
                del samples[1]  # the least stands until newer ones agree that it is longer
        samples.append(Sample(ms, at if self.sparse else size, brought))
        self.fresh.add(size)
        if self._was_warmed and size not in self.used:
            self.used.add(size)
            self._tabulate()
        self.used.add(size)
        i = bisect.bisect_left(self._sizes, size)
        if self._sizes[i : i + 1] == [size] and not self.sparse:
            self._ms[i] = min(self.samples[size]).ms
            self._slope = self._steepness()
        elif self.knows(size) or i == len(self._sizes):
            self._tabulate()

    def recount(self, old: Factors, new: Factors) -> None:
        """The usual experts, or their factors, have changed."""
        for samples in self.samples.values():
            for i, s in enumerate(samples):
                ms = s.ms + old.beyond(s.brought) - new.beyond(s.brought)
                samples[i] = s._replace(ms=max(ms, LEAST * s.ms))
        self._tabulate()

    def _distrust(self, size: int) -> None:
        """Other work had the machine when this size was timed before: forget larger ones that were not timed lately."""
        for larger in [other for other in self.samples.keys() - self.fresh if other > size]:
            del self.samples[larger]
        self.stale &= self.samples.keys()
        self._tabulate()

    def agrees(self, size: int, slack: float) -> bool:
        """Most samples of a size are near the least."""
        times = sorted(sample.ms for sample in self.samples.get(self.bucket(size), ()))
        return len(times) >= N_AGREE and _agree(times, slack)

    def mark_unverified(self, slack: float) -> None:
        """End the warm-up: forget sizes with few samples or with samples that do not agree."""
        self._was_warmed = bool(self.samples)
        self.samples = {
            size: samples for size, samples in self.samples.items() if self.agrees(size, slack)
        }
        self.fresh.clear()
        self.used.clear()
        self._tabulate()

    def known(self) -> dict[int, float]:
        """Milliseconds of the trusted sizes that were in use, for `recall`."""
        all_ = zip(self._sizes, self._ms, strict=True)
        return {size: ms for size, ms in all_ if ms > 0 and size in self.used}

    def recall(self, known: Mapping[int, float], brought: Brought = NO_EXPERTS) -> None:
        """Take the times that an earlier start had in use in place of the warm-up's, whose texts are short and whose rounds are few. brought: the
        usual experts in them"""
        for size, ms in known.items():
            if size == self.bucket(size):
                self.samples[size] = deque([Sample(ms, size, brought)] * N_TRUST, N_SAMPLE)
                self._was_warmed = True
        self._tabulate()

    def _tabulate(self) -> None:
        known = sorted(size for size in self.samples if self.knows(size) or size in self.stale)
        least = [min(self.samples[size]) for size in known]
        self._sizes, self._ms = [sample.size for sample in least], [sample.ms for sample in least]
        if self.sparse and known:
            for i in reversed(range(len(known) - 1)):  # one sample may be a pause of the machine
                if self.n(known[i]) < N_TRUST <= self.n(known[i + 1]):
                    self._ms[i] = min(self._ms[i], self._ms[i + 1])
            # a size that takes longer from now on says so of larger ones, too
            self._sizes = [0, *self._sizes]
            self._ms = list(itertools.accumulate([self._ms[0] / 2, *self._ms], max))
        if self._was_warmed:
            self._clip()
        self._slope = self._steepness()

    def _clip(self) -> None:
        """Clip times that only the warm-up took to the line through the nearest sizes in use."""
        known = [(size, ms) for size, ms in zip(self._sizes, self._ms, strict=True) if size in self.used]
        if len(known) < 2:
            return
        for i, size in enumerate(self._sizes):
            if size not in self.used:
                k = min(max(bisect.bisect_left(known, (size, 0.0)), 1), len(known) - 1)
                (a, low), (b, high) = known[k - 1], known[k]
                line = low + (high - low) * (size - a) / (b - a)
                self._ms[i] = min(self._ms[i], max(line, min(low, high)) if size > a else low)

    def _steepness(self) -> float:
        """Of the line beyond the trusted sizes. Noise only adds, so it is the flattest line, if there are two at least. A row
        never takes longer than by itself."""
        if not self._sizes:
            return 0.0
        if self.sparse:
            return self._ms[-1] / self._sizes[-1]
        last, ms = self._sizes[-1], self._ms[-1]
        beyond = (size for size in self.samples if size > last)
        found = [(min(self.samples[size]).ms - ms) / (size - last) for size in beyond]
        if len(self._sizes) > 1:
            found.append((ms - self._ms[0]) / (last - self._sizes[0]))
        if len(found) < 2 and len(self._sizes) < 2:
            return 0.0
        return (CAUTION if self._was_warmed else 1.0) * max(
            0.0, min(*found, self._ms[0] / self._sizes[0])
        )

    def knows(self, size: int) -> bool:
        """Enough samples to trust."""
        return self.n(size) >= (1 if self.sparse else N_TRUST)

    @property
    def has_trusted(self) -> bool:
        """Times are known: those of some size, at least."""
        return bool(self._sizes)

    def usual(self, size: int) -> float:
        """The least of samples near this size, by size; 0.0 while they are few. Between sizes a pause of the machine could stand in the table."""
        if self.n(size) < N_AGREE:
            return 0.0
        least = min(self.samples[self.bucket(size)])
        return least.ms * size / least.size

    def n(self, size: int) -> int:
        """Samples of this size."""
        return len(self.samples.get(self.bucket(size), ()))

    def expire(self) -> None:
        """Mark sizes that were not used since the last call as expired.

        Their last sample stands until there is a new one: without it, the largest sizes in use would define the time of larger ones.
        """
        self.stale |= {size for size in self.samples if self.knows(size)} - self.fresh
        for size in self.stale - self.fresh:
            samples = self.samples.get(size, deque[Sample]())
            while len(samples) >= N_TRUST:
                samples.popleft()
        for size in self.samples.keys() - self.fresh - self.stale:
            del self.samples[size]
        self.fresh.clear()
        self._tabulate()

    def __call__(self, size: int) -> float:
        return (
            max(self._usual(size) + self.shift, LEAST * self._usual(size))
            if self.shift
            else self._usual(size)
        )

    def _usual(self, size: int) -> float:
        """With the usual experts."""
        size = size if self.sparse else self.bucket(size)
        if not self._sizes:
            return 1.0
        i = bisect.bisect_left(self._sizes, size)
        if i == len(self._sizes):
            return self._ms[-1] + self._slope * (size - self._sizes[-1])
        if i == 0 or self._sizes[i] == size:
            return self._ms[i]
        a, b = self._sizes[i - 1], self._sizes[i]
        line = self._ms[i - 1] + (self._ms[i] - self._ms[i - 1]) * (size - a) / (b - a)
        least = min((sample.ms for sample in self.samples.get(size, ())), default=line)
        return least if least < LIKELY * line and not self.sparse else line

    @property
    def largest(self) -> int:
        """The largest size of which a time is known."""
        return self._sizes[-1]

    def most(self, ms: float) -> int:
        """The largest size that takes no longer, of sparse ones; 0: none."""
        at = bisect.bisect_right(self._ms, ms)
        if not at:
            return 0
        a, low = self._sizes[at - 1], self._ms[at - 1]
        slope = self._slope
        if at < len(self._sizes):
            slope = (self._ms[at] - low) / (self._sizes[at] - a)
        return int(min(a + (ms - low) / max(slope, 1e-9), 1e9))

    def of_all(self, sizes: range | tuple[int, ...]) -> NDArray[np.float64]:
        """[size]: the time of each size. The indices are cached, because rounds ask for the same sizes."""
        if sizes not in self._runs:
            self._runs[sizes] = np.unique([self.bucket(size) for size in sizes], return_inverse=True)
        buckets, which = self._runs[sizes]
        return np.array([self(size) for size in buckets.tolist()])[which]


@dataclass
class Costs:
    """What all work costs.

    verify   rounds of decoding slots, by rows
    draft    drafts, by drafting slots, a pass if chained; by rows for blocks
    prompts  forwards that read prompts, by rows
    alone    graphs of one prompt, by rows
    """

    verify: Timer = field(default_factory=Timer)
    draft: Timer = field(default_factory=Timer)
    prompts: Timer = field(default_factory=lambda: Timer(sparse=True))
    alone: Timer = field(default_factory=lambda: Timer(sparse=True))

    def forward(self, sizes: range, beside: int = 0) -> NDArray[np.float64]:
        """[size]: milliseconds of forwards with so many rows of decoding slots, and of prompts beside them."""
        if not beside:
            return self.verify.of_all(sizes)
        ends = [beside + n for n in (sizes.start, sizes.stop - 1)]
        ms = [max(self.verify(n), self.prompts(n)) for n in ends]
        return np.linspace(ms[0], ms[1], len(sizes))

    def end_warm_up(self) -> None:
        """Keep only reliable times."""
        slack = SLACK * self.verify(1)
        self.verify.mark_unverified(slack)
        self.draft.mark_unverified(slack)

    def expire(self) -> None:
        """Doubt times that were not used since the last call."""
        self.verify.expire()
        self.draft.expire()


class Account:
    """What may not pay is tried by a small share of all time: what it took is a debt, in milliseconds, and what it saved pays it.

    While the debt is too large it rests, and the debt shrinks by a share of the time that passes. Then it is tried again.
    """

    __slots__ = ("debt", "rests")

    def __init__(self) -> None:
        self.debt, self.rests = 0.0, False

    def passes(self, ms: float) -> None:
        """Time has passed."""
        if self.debt > 0.0:
            self.debt = max(0.0, self.debt - SHARE * ms)
        self.rests = self.rests and self.debt > 0.0

    def add(self, ms: float, unit: float) -> None:
        """ms: taken, or negative: saved. unit: milliseconds of a plain round."""
        self.debt = min(max(self.debt + ms, -LIMIT * unit), MOST_DEBT * unit)
        self.rests = self.rests or self.debt > LIMIT * unit
