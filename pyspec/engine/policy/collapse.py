"""Whether a good drafter became bad over many requests. Arithmetic only: no torch, and no clock."""

from __future__ import annotations

from collections import deque


class AcceptanceWatch:
    """Detects over many requests that a good drafter's acceptance collapsed. It does not find the reason."""

    LEAST_DRAFTED = 8  # drafted tokens of a request that counts
    MANY = 24  # requests
    GOOD, COLLAPSED = 0.3, 0.25  # acceptance that counts as good; share of it that counts as collapsed

    def __init__(self) -> None:
        self.was = self.now = 0.0
        self.recent: deque[float] = deque(maxlen=self.MANY)

    def add(self, n_drafted: int, n_accepted: int) -> bool:
        """Add a finished request. Returns True once if the last MANY of them show a collapse."""
        if n_drafted < self.LEAST_DRAFTED:
            return False
        if len(self.recent) == self.MANY:  # a request that leaves the window counts into the past mean
            self.was += (self.recent[0] - self.was) * (1 / self.MANY if self.was else 1.0)
        self.recent.append(n_accepted / n_drafted)
        self.now = sum(self.recent) / len(self.recent)
        if len(self.recent) < self.MANY or self.was < self.GOOD or self.now > self.COLLAPSED * self.was:
            return False
        self.was = self.now  # so that the collapse is reported once
        return True
