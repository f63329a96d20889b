"""The samplers' names: llama.cpp's names and letters, and common variants."""

from __future__ import annotations

LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "a": "adaptive_p",
}
ALIASES = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical_p": "typ_p",
    "typical": "typ_p",
}
ALIASES |= {name.replace("_", "-"): name for name in LETTERS.values()}
ALIASES |= {name.replace("_", ""): name for name in LETTERS.values()}


def sampler_of(name: str) -> str:
    """llama.cpp's name of a sampler, from its letter or any variant; "" if unknown."""
    known = LETTERS.get(name) if len(name) == 1 else ALIASES.get(name.lower(), name.lower())
    return known if known is not None and known in LETTERS.values() else ""
