"""`samplers` of a request: the active samplers and their order, under llama-server's names."""

from __future__ import annotations

from typing import Any

from pyspec.errors import RequestError
from pyspec.request import DEFAULT_SAMPLERS
from pyspec.samplers import sampler_of

# Values that switch a sampler off.
NEUTRAL: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "adaptive_p": {"adaptive_target": -1.0},
}


def chain_of(samplers: list[str] | str) -> dict[str, Any]:
    """Sampling parameters of a list of names, or of a string of llama.cpp's letters. Raises RequestError for an unknown name.

    A repeated name counts at its first place. An order that changes nothing becomes the default, which runs on many rows at once.
    """
    names = [_named(name) for name in samplers]
    order = tuple(dict.fromkeys(name for name in names if name != "adaptive_p"))  # adaptive_p picks, so it is last
    values: dict[str, Any] = {}
    for name, neutral in NEUTRAL.items():
        if name not in names:
            values |= neutral
    return values | {"samplers": () if order == tuple(n for n in DEFAULT_SAMPLERS if n in order) else order}


def _named(name: str) -> str:
    known = sampler_of(name)
    if not known:
        raise RequestError(f"samplers: {name[:40]!r} is not known; there are {', '.join(NEUTRAL)}")
    return known
