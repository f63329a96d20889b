"""Decides by measuring whether it pays to cut drafts by their certainty: what cuts promise has to be worth the time that they take."""

from __future__ import annotations

N_TRIAL = 32  # rounds with cuts before a verdict
REST, LONGEST_REST = (
    1024,
    16_384,
)  # rounds without cuts after a bad verdict, doubled by each that follows
MARGIN = 2.0  # the drafter takes time for probabilities, too, and promises are believed with care


class CutTrial:
    """Rounds are counted by the caller, who numbers them."""

    def __init__(self) -> None:
        self.rests_until, self.rest = 0, REST
        self._begin()

    def _begin(self) -> None:
        self.n, self.gain_ms, self.ms = 0, 0.0, 0.0

    def is_on(self, n_round: int) -> bool:
        """Whether this round's drafts may be cut."""
        return n_round >= self.rests_until

    def add(self, n_round: int, gain_ms: float, ms: float) -> None:
        """A round was cut. gain_ms: what that promises, as time of decoding; ms: what it took."""
        self.n, self.gain_ms, self.ms = self.n + 1, self.gain_ms + gain_ms, self.ms + ms
        if self.n < N_TRIAL:
            return
        if self.gain_ms < MARGIN * self.ms:
            self.rests_until = n_round + self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
        else:
            self.rest = REST
        self._begin()
