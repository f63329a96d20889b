"""Accounts of time: how the engine tries what may not pay, by a small share of all time. Arithmetic only: no torch here.

What something took is a debt, and what it saved pays it. While the debt is too large it is not done, and the debt shrinks by a share of
the time that passes. Then it is tried again. So what never pays costs that share.
"""

from __future__ import annotations

SHARE = 0.004  # of all time, that may be lost to what does not pay: chosen; tools/replay.py gives the same with 0.001 and 0.016
LIMIT = 2.0  # plain rounds of debt that begin a rest [0.5: 0.995, 8: the same]
MOST_DEBT = 16.0  # plain rounds: a pause of the machine is not held against it for longer
MOST_CREDIT = 4.0  # plain rounds that may be saved in advance


class Account:
    """A debt in milliseconds. at: when it was settled last, in milliseconds of rounds."""

    __slots__ = ("at", "debt", "rests")

    def __init__(self, at: float = 0.0) -> None:
        self.debt, self.at, self.rests = 0.0, at, False

    def settle(self, now: float) -> None:
        """Time has passed."""
        if self.debt > 0.0:
            self.debt = max(0.0, self.debt - SHARE * (now - self.at))
        self.at = now
        self.rests = self.rests and self.debt > 0.0

    def add(self, ms: float, unit: float) -> None:
        """ms: taken, or negative: saved. unit: milliseconds of a plain round."""
        self.debt = min(max(self.debt + ms, -MOST_CREDIT * unit), MOST_DEBT * unit)
        self.rests = self.rests or self.debt > LIMIT * unit
