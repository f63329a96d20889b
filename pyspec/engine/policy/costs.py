"""What work costs: measured milliseconds by size, on machines that are busy with other work, too. Arithmetic only: no torch, and no clock."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

N_SAMPLE, N_TRUST = 5, 2  # samples kept per size; samples needed to trust them
N_AGREE = 3  # samples that settle a size if they agree:
AGREE, SLACK = (
    1.5,
    0.1,
)  # the median is at most this factor above the least, plus this share of a plain round
CAUTION = 0.5  # share of the steepness beyond sizes that a warm-up left: a busy machine made those too slow, and drafts would rest [0 and 1: 0.997]
FELL = 2.0  # factor by which a size's time has to fall to show that other work disturbed it (tests/test_control_noise.py: offers are taken again)
# a single sample above this factor of the straight line counts as noise [1.0: 0.99, 4: 0.98]
LIKELY = 1.25
N_FORWARD = 5  # forwards of a size that costs are taken from
FAR = 1000.0  # factor beyond the largest forward that was measured

Floats = NDArray[np.float64]


def bucket(size: int) -> int:
    """Sizes timed together: single ones below 64, then 32 per octave, named by their largest."""
    step = 1 << max(size.bit_length() - 6, 0)
    return -(-size // step) * step


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
    """

    def __init__(self, bucket: Callable[[int], int] = bucket) -> None:
        self.bucket = bucket
        self.samples: dict[int, deque[float]] = {}
        self.fresh: set[int] = set()
        self.stale: set[int] = set()  # expired: the old time is used until there is a new one
        self.used: set[int] = set()  # sizes with samples since the warm-up
        self._runs: dict[range | tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._sizes: list[int] = []  # trusted ones, ascending
        self._ms: list[float] = []
        self._was_warmed = False  # a warm-up timed sizes
        self._slope = 0.0  # milliseconds of a further size, beyond them

    def add(self, size: int, ms: float) -> None:
        """Add a sample."""
        size = self.bucket(size)
        if self.knows(size) and FELL * ms < min(self.samples[size]):
            self._distrust(size)
        samples = self.samples.setdefault(size, deque(maxlen=N_SAMPLE))
        if len(samples) == N_SAMPLE:
            newer = sorted([*samples, ms][1:])
            if samples[0] < newer[0] and not _agree(newer, 0.0):
                del samples[1]  # the least stands until newer ones agree that it is longer
        samples.append(ms)
        self.fresh.add(size)
        if self._was_warmed and size not in self.used:
            self.used.add(size)
            self._tabulate()
        self.used.add(size)
        i = bisect.bisect_left(self._sizes, size)
        if self._sizes[i : i + 1] == [size]:
            self._ms[i] = min(self.samples[size])
            self._slope = self._steepness()
        elif self.knows(size) or i == len(self._sizes):
            self._tabulate()

    def _distrust(self, size: int) -> None:
        """Other work had the machine when this size was timed before: forget larger ones that were not timed lately."""
        for larger in [other for other in self.samples.keys() - self.fresh if other > size]:
            del self.samples[larger]
        self.stale &= self.samples.keys()
        self._tabulate()

    def agrees(self, size: int, slack: float, n: int = N_AGREE) -> bool:
        """Most samples of a size are near the least."""
        times = sorted(self.samples.get(self.bucket(size), ()))
        return len(times) >= n and _agree(times, slack)

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

    def recall(self, known: Mapping[int, float]) -> None:
        """Take the times that an earlier start had in use in place of the warm-up's, whose texts are short and whose rounds are few."""
        for size, ms in known.items():
            if size == self.bucket(size):
                self.samples[size] = deque([ms] * N_TRUST, N_SAMPLE)
                self._was_warmed = True
        self._tabulate()

    def _tabulate(self) -> None:
        self._sizes = sorted(size for size in self.samples if self.knows(size) or size in self.stale)
        self._ms = [min(self.samples[size]) for size in self._sizes]
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
        last, ms = self._sizes[-1], self._ms[-1]
        found = [(min(self.samples[size]) - ms) / (size - last) for size in self.samples if size > last]
        if len(self._sizes) > 1:
            found.append((ms - self._ms[0]) / (last - self._sizes[0]))
        if len(found) < 2 and len(self._sizes) < 2:
            return 0.0
        return (CAUTION if self._was_warmed else 1.0) * max(
            0.0, min(*found, self._ms[0] / self._sizes[0])
        )

    def knows(self, size: int) -> bool:
        """Enough samples to trust."""
        return self.n(size) >= N_TRUST

    @property
    def has_trusted(self) -> bool:
        """Times are known: those of some size, at least."""
        return bool(self._sizes)

    def n(self, size: int) -> int:
        """Samples of this size."""
        return len(self.samples.get(self.bucket(size), ()))

    def expire(self) -> None:
        """Mark sizes that were not used since the last call as expired.

        Their last sample stands until there is a new one: without it, the largest sizes in use would define the time of larger ones.
        """
        self.stale |= {size for size in self.samples if self.knows(size)} - self.fresh
        for size in self.stale - self.fresh:
            samples = self.samples.get(size, deque[float]())
            while len(samples) >= N_TRUST:
                samples.popleft()
        for size in self.samples.keys() - self.fresh - self.stale:
            del self.samples[size]
        self.fresh.clear()
        self._tabulate()

    def __call__(self, size: int) -> float:
        size = self.bucket(size)
        if not self._sizes:
            return 1.0
        i = bisect.bisect_left(self._sizes, size)
        if i == len(self._sizes):
            return self._ms[-1] + self._slope * (size - self._sizes[-1])
        if i == 0 or self._sizes[i] == size:
            return self._ms[i]
        a, b = self._sizes[i - 1], self._sizes[i]
        line = self._ms[i - 1] + (self._ms[i] - self._ms[i - 1]) * (size - a) / (b - a)
        least = min(self.samples.get(size, ()), default=line)
        return least if least < LIKELY * line else line

    def of_all(self, sizes: range | tuple[int, ...]) -> NDArray[np.float64]:
        """[size]: the time of each size. The indices are cached, because rounds ask for the same sizes."""
        if sizes not in self._runs:
            self._runs[sizes] = np.unique([self.bucket(size) for size in sizes], return_inverse=True)
        buckets, which = self._runs[sizes]
        return np.array([self(size) for size in buckets.tolist()])[which]


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
        self._last.setdefault(size_class(n_row), deque(maxlen=N_FORWARD)).append((n_row, ms))
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

    def least_ms(self, n_row: int) -> float:
        """Of a forward of so many rows, at least: what is smaller than all that was measured counts as if nothing were fixed, what is larger
        as if it took no longer, and no size takes longer than a larger one."""
        medians = np.array([np.median(np.array(last), axis=0) for _, last in sorted(self._last.items())])
        rows, ms = medians.T
        ms = np.minimum.accumulate(ms[::-1])[::-1]
        return float(np.interp(n_row, np.append(0.0, rows), np.append(0.0, ms)))

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
