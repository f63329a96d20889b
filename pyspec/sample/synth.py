"""Synthetic acceptance: coins decide about drafts, to measure speed at a chosen acceptance. The text is meaningless."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyspec.config import EngineSettings
from pyspec.errors import ConfigError
from pyspec.sample.noise import COIN, uniform

_RUN, _MAX_RUNS = 1024, 256


class SynthAcceptance:
    """Accepts each drafted token with a probability of its place, given that those before it were accepted.

    As llama.cpp's --spec-synth-len (one probability for all: `p` solves p + p**2 + .. + p**n_draft_max = mean_len - 1) and --spec-synth-rates (per
    place, the share in which it and all before it are accepted). A drafted end-of-generation token is never accepted, and after the accepted
    drafts comes the target's own choice for that row. Coins depend on (seed, request, position) only.
    """

    def __init__(self, chances: Sequence[float], seed: int = 0) -> None:
        self.chances, self.seed = tuple(chances), seed
        self._coins: dict[tuple[int, int], list[float]] = {}  # by request and run of positions

    @classmethod
    def of_length(cls, mean_len: float, n_draft_max: int, seed: int = 0) -> SynthAcceptance:
        """One chance for all places."""
        if not 1.0 <= mean_len <= n_draft_max + 1:
            span = f"1..{n_draft_max + 1} (n_draft_max + 1)"
            raise ConfigError(f"--spec-synth-len {mean_len:g} is outside {span}")
        return cls([_solve(mean_len - 1.0, n_draft_max)] * n_draft_max, seed)

    @classmethod
    def of_rates(cls, text: str, n_draft_max: int, seed: int = 0) -> SynthAcceptance:
        """rates: P0,P1,... for each place."""
        rates = read_rates(text)
        if len(rates) < n_draft_max:
            most = f"{n_draft_max} tokens are drafted at most"
            raise ConfigError(f"--spec-synth-rates has {len(rates)} values; {most}")
        before = [1.0, *rates]
        return cls(
            [
                rate / all_before if all_before else 0.0
                for rate, all_before in zip(rates, before, strict=False)
            ],
            seed,
        )

    def n_accepted(self, request: int, position: int, n_draft: int) -> int:
        """The number of `n_draft` drafts that are kept. position: of the first; request: a number that identifies the request."""
        for n in range(n_draft):
            run, at = divmod(position + n, _RUN)
            if self._run(request, run)[at] >= self.chances[n]:
                return n
        return n_draft

    def _run(self, request: int, run: int) -> list[float]:
        """Coins of many positions at once: one by one they would take longer than the round that is measured."""
        found = self._coins.get((request, run))
        if found is None:
            if len(self._coins) >= _MAX_RUNS:
                self._coins.clear()
            coins = uniform(self.seed ^ request, np.arange(run * _RUN, (run + 1) * _RUN), COIN)
            found = self._coins[request, run] = coins.tolist()
        return found


def synth_of(settings: EngineSettings, n_draft: int) -> SynthAcceptance | None:
    """Synthetic acceptance, if settings ask for it and there is a drafter."""
    seed = max(settings.seed, 0)
    if not n_draft or not (settings.synth_len or settings.synth_rates):
        return None
    if settings.synth_rates:
        return SynthAcceptance.of_rates(settings.synth_rates, n_draft, seed)
    return SynthAcceptance.of_length(settings.synth_len, n_draft, seed)


def read_rates(text: str) -> list[float]:
    """P0,P1,...: shares, none larger than the one before. Raises ConfigError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--spec-synth-rates {text!r} has a part that is no number") from None
    if any(not 0.0 <= rate <= before for rate, before in zip(rates, [1.0, *rates], strict=False)):
        want = "want shares from 0 to 1, none larger than the one before"
        raise ConfigError(f"--spec-synth-rates {text!r}: {want}")
    return rates


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
