"""Random numbers that are a pure function of (seed, position), so a draw does not depend on its scheduling.

A generator with state would have to be rolled back with every refused draft, and two runs with other draft lengths would differ. Here the
number of a token is hashed from the request's seed and the token's absolute position: SplitMix64 (Steele, Lea, Flood 2014), with the
seed's own hash as the start of the stream and the position as its counter.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
DRAW = 0x6472617700000000  # stream of the sampler's draws
DRAFT = 0x6472616674000000  # stream of drafts that are drawn by numbers of their own
ACCEPT = 0x6163636570740000  # stream of coins about these
XTC = 0x7874630000000000  # stream of XTC's coins
COIN = 0x636F696E00000000  # stream of synthetic acceptance
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def resolve_seed(seed: int) -> int:
    """The seed to use and to report: `seed` modulo 2**64, or 32 random bits from the system for -1."""
    return secrets.randbits(32) if seed == -1 else seed & _MASK


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, positions: Ints, stream: int = DRAW) -> NDArray[np.float64]:
    """One number in [0, 1) per position, a multiple of 2**-53, the same on every machine.

    positions  [n]  int64  absolute positions, >= 0
    """
    return (_bits(seed, positions, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def of_round(seed: int, start: int, stream: int) -> int:
    """A seed for one round: numbers of another round that reaches the same positions are others."""
    return int(_bits(seed, np.array([start]), stream)[0])


def _bits(seed: int, positions: Ints, stream: int) -> NDArray[np.uint64]:
    start = _mix(np.array([(seed ^ stream) & _MASK], dtype=np.uint64))
    return _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA))
