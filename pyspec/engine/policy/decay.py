"""Sees where a drafter decays in a long text, and finds the window of the text that it should see there.

Drafters are trained on texts of some length, and many are right less often behind it. For each slot: if its drafts were right far less
often lately than earlier in the same text, and stay so, an alarm tries shorter windows, each for some drafts, and keeps the best. The
time until the next alarm doubles, because a text may simply have become harder. A request that begins with a long prompt is compared with
the drafts of short texts of all requests.
Behind the drafter's trained length (its file's key) a slot begins with a window of half of it: few distances in its training were longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

N_RECENT = 12  # drafts that count as lately, and those of a trial
SLOW, N_KNOWN = 1 / 64, 32  # weight of a draft in the level of those before; drafts until that is known
FALLEN = 0.5  # share of the earlier level below which the drafts are bad
LEAST = 0.5  # of a level from which drafts can fall
N_LOW = 32  # rounds with bad drafts, or then without, that raise an alarm; doubled by each
N_TRIAL = 32  # rounds of a trial at most: a window whose drafts are bad gets few
BETTER = 1.1  # of a trial over the whole text, to keep a window
WINDOWS = (2048, 512, 128)  # tokens that are tried, where the text is twice as long
SHORT, N_SHORT = 2048, 256  # tokens of a short text; drafts until their level is known
LONG = 4096  # tokens of a prompt behind which a text is compared with short ones


@dataclass
class _TextDecay:
    """What came of one request's drafts. rate: of each draft the share of judged tokens that were right, in the mean.

    earlier, n_earlier  rate of the drafts before the recent ones, and their number
    trials   windows to be tried yet, and the rate of each that was
    """

    window: int = 0
    is_own: bool = False  # the window was found by measuring
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=N_RECENT))
    n_round: int = 0  # since it sees so much
    earlier: float = 0.0
    n_earlier: int = 0
    is_begun_long: bool = False
    n_low: int = 0
    patience: int = N_LOW
    trials: list[int] = field(default_factory=list)
    tried: dict[int, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def rate(self) -> float:
        return sum(self.recent) / max(1, len(self.recent))

    def see(self, window: int) -> None:
        self.window, self.n_round = window, 0
        self.recent.clear()


class Decay:
    """Windows of all slots. n_trained: tokens that the drafter was trained for; 0: unknown."""

    def __init__(self, n_slot: int, n_trained: int = 0) -> None:
        self.n_trained = n_trained
        self.texts = [_TextDecay() for _ in range(n_slot)]
        self.short, self.n_short = 0.0, 0  # rate of drafts in short texts, and their number

    def begin(self, slot: int, n_past: int = 0) -> None:
        """Another text, whose prompt has so many tokens."""
        self.texts[slot] = _TextDecay(is_begun_long=n_past >= LONG)

    def window(self, slot: int, n_past: int) -> int:
        """Tokens that the slot's next draft should see; 0: all."""
        text = self.texts[slot]
        if self.n_trained and n_past >= self.n_trained and not text.is_own and not text.window:
            text.see(max(1, self.n_trained // 2))
            text.reason = (
                f"drafts see the last {text.window} tokens, half of the drafter's trained length"
            )
        return text.window

    def reason(self, slot: int) -> str:
        """Why the slot has its window, and its last alarm."""
        return self.texts[slot].reason

    def add(self, slot: int, n_past: int, n_draft: int, n_right: int) -> bool:
        """Add a verdict. Returns True if the window changes, so that what is known of the slot's drafts is of another kind."""
        text = self.texts[slot]
        text.n_round += 1
        if n_draft:
            if len(text.recent) == N_RECENT and not text.trials and not text.n_low:
                text.n_earlier += 1
                text.earlier += (text.recent[0] - text.earlier) * max(SLOW, 1 / text.n_earlier)
            rate = n_right / min(n_draft, n_right + 1)
            text.recent.append(rate)
            if n_past < SHORT:
                self.n_short += 1
                self.short += (rate - self.short) * max(1 / N_SHORT, 1 / self.n_short)
        if text.trials:
            is_over = len(text.recent) == N_RECENT or text.n_round >= N_TRIAL
            return is_over and self._end_trial(text)
        if len(text.recent) < N_RECENT:
            return False
        is_low = text.rate < FALLEN * self._level(text)
        text.n_low = text.n_low + 1 if is_low else 0
        return text.n_low >= text.patience and self._alarm(text, n_past)

    def _level(self, text: _TextDecay) -> float:
        """How often drafts were right before; 0.0: that is not known, or too low to fall from."""
        if text.is_begun_long and self.n_short >= N_SHORT:
            level = max(self.short, text.earlier)
        else:
            level = text.earlier if text.n_earlier >= N_KNOWN else 0.0
        return level if level >= LEAST else 0.0

    def _alarm(self, text: _TextDecay, n_past: int) -> bool:
        text.n_low, text.patience = 0, 2 * text.patience
        text.reason = f"alarm at {n_past} tokens: {text.rate:.0%} of a draft's tokens are right, earlier {self._level(text):.0%}"
        text.is_begun_long = False
        text.tried = {text.window: text.rate}
        text.trials = [n for n in self._windows() if 2 * n <= n_past and n != text.window]
        if text.window:
            text.trials.append(0)
        if not text.trials:  # the text is short: it has become harder
            text.tried, text.earlier = {}, text.rate
            return False
        text.is_own = True
        text.see(text.trials[0])
        return True

    def _windows(self) -> Sequence[int]:
        own = self.n_trained // 2
        return (own, *WINDOWS) if own not in (0, *WINDOWS) else WINDOWS

    def _end_trial(self, text: _TextDecay) -> bool:
        """The window had its drafts: the next one, or the best of all."""
        text.tried[text.trials.pop(0)] = text.rate
        if text.trials:
            text.see(text.trials[0])
            return True
        best = max(text.tried, key=lambda n: (text.tried[n] * (1.0 if n else BETTER), n == 0))
        text.earlier = text.tried[best]
        rates = ", ".join(f"{n or 'all'}: {rate:.0%}" for n, rate in sorted(text.tried.items()))
        text.reason += f"; of the tokens that drafts may see, {best or 'all'} were best ({rates})"
        text.tried = {}
        text.see(best)
        return True
