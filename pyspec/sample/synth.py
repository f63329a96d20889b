"""Synthetic acceptance: drafts are kept by coin, to measure speed at a chosen acceptance. The text means nothing."""

from __future__ import annotations

import numpy as np

from pyspec.errors import ConfigError
from pyspec.sample.noise import COIN, uniform

_RUN, _MAX_RUNS = 1024, 256


class SynthAcceptance:
    """Accepts each drafted token with one constant probability, given that those before it were accepted.

    As llama.cpp's --spec-synth-len: `p` solves p + p**2 + .. + p**n_draft_max = mean_len - 1, a drafted end-of-generation
    token is never accepted, and after the accepted drafts the target's own choice for that row is emitted. Coins depend
    on (seed, request, position) only.
    """

    def __init__(self, mean_len: float, n_draft_max: int, seed: int = 0) -> None:
        if not 1.0 <= mean_len <= n_draft_max + 1:
            raise ConfigError(f"--spec-synth-len {mean_len:g} is outside 1..{n_draft_max + 1} (n_draft_max + 1)")
        self.mean_len = mean_len
        self.seed = seed
        self.p = _solve(mean_len - 1.0, n_draft_max)
        self._coins: dict[tuple[int, int], list[bool]] = {}  # by request and run of positions

    def n_accepted(self, request: int, position: int, n_draft: int) -> int:
        """How many of `n_draft` drafts are kept. `position` is that of the first; `request` tells requests apart."""
        for n in range(n_draft):
            run, at = divmod(position + n, _RUN)
            if not self._run(request, run)[at]:
                return n
        return n_draft

    def _run(self, request: int, run: int) -> list[bool]:
        """Coins of many positions at once: thrown one by one they would take longer than what is measured with them."""
        found = self._coins.get((request, run))
        if found is None:
            if len(self._coins) >= _MAX_RUNS:
                self._coins.clear()
            coins = uniform(self.seed ^ request, np.arange(run * _RUN, (run + 1) * _RUN), COIN) < self.p
            found = self._coins[request, run] = coins.tolist()
        return found


def _solve(accepted: float, n: int) -> float:
    """p in [0, 1] with p + .. + p**n == accepted, by bisection: the sum grows with p."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if sum(p**i for i in range(1, n + 1)) < accepted:
            low = p
        else:
            high = p
    return high
