"""Sampling that a model's file recommends, `general.sampling.*`: the defaults of requests, below flags.

A damaged value is reported and ignored, because it is only advice.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import isfinite
from typing import Any

from pyspec.gguf.fields import Fields
from pyspec.ranges import Whole, rules_of, shown
from pyspec.request import DEFAULT_SAMPLERS, SamplingParams, sampler_of

log = logging.getLogger(__name__)

PREFIX = "general.sampling."
KEYS = {rule.key: rule for rule in rules_of(SamplingParams) if rule.key}
"""The rules of parameters by llama.cpp's keys."""
SEQUENCE = "sequence"
DECIMALS = 6  # as llama.cpp reads them: 0.6 in 32 bits is 0.6 again
MOST_NAMES = 256  # characters


def recommended(fields: Fields) -> SamplingParams:
    """llama.cpp's defaults, overridden by the file's values. Warns of invalid ones."""
    found: dict[str, Any] = {}
    for key, rule in KEYS.items():
        given = fields.metadata.get(PREFIX + key)
        if given is None:
            continue
        value = _number(given, is_whole=isinstance(rule.kind, Whole))
        if rule.name in ("temperature", "top_k") and value is not None:
            value = max(value, 0 * value)  # below 0: greedy, and all
        if flaw := rule.flaw(given if value is None else value, PREFIX + key):
            log.warning("%s%s; it is not used", fields.where, flaw)
        else:
            found[rule.name] = value
    if (order := _order(fields)) is not None:
        found["samplers"] = order
    if found:
        log.info("the file recommends %s", ", ".join(f"{name} {value}" for name, value in found.items()))
    return replace(SamplingParams(), **found)


def _number(given: object, *, is_whole: bool) -> float | int | None:
    """Parse a number of any type, also text, as llama.cpp does; None if it is none."""
    try:
        number = (
            float(given)
            if isinstance(given, int | float | str) and not isinstance(given, bool)
            else None
        )
    except (ValueError, OverflowError):
        number = None
    if number is None or not isfinite(number):
        return None
    return int(number) if is_whole else round(number, DECIMALS)


def _order(fields: Fields) -> tuple[str, ...] | None:
    """The samplers in their order; None: the default."""
    given = fields.metadata.get(PREFIX + SEQUENCE)
    if given is None:
        return None
    words = given.split(";") if isinstance(given, str) and len(given) <= MOST_NAMES else []
    names = {word: sampler_of(word.strip()) for word in words if word.strip()}
    unknown = [word for word, name in names.items() if not name]
    if unknown or not names:
        log.warning("%s%s%s names no sampler in %s", fields.where, PREFIX, SEQUENCE, shown(given))
    order = tuple(dict.fromkeys(name for name in names.values() if name))
    return None if not order or order == DEFAULT_SAMPLERS else order
