"""The sampling flags, with llama-server's names and defaults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from pyspec.cli.fields import option_of
from pyspec.cli.flags import grouped
from pyspec.errors import ConfigError
from pyspec.ranges import INT32, SWITCH, Rule, rules_of
from pyspec.request import DEFAULT_SAMPLERS, LETTERS, SAMPLING, SamplingGiven, SamplingParams

RULES = {rule.name: rule for rule in rules_of(SamplingParams)}
BIAS = re.compile(r"(\d+)([+-](?:inf|[0-9.]+(?:e[+-]?\d+)?))", re.IGNORECASE)


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    names = [name.strip() for name in (value or "").split(";")]
    return None if value is None else tuple(filter(None, names))


def _letters(
    ctx: click.Context,
    param: click.Parameter,
    value: str | None,
) -> tuple[str, ...] | None:
    if value is None:
        return None
    if unknown := sorted(set(value) - LETTERS.keys()):
        known = ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
        raise click.BadParameter(f"{unknown[0]!r} is no sampler; there are {known}", ctx, param)
    return tuple(LETTERS[letter] for letter in value)


def _breakers(
    ctx: click.Context,
    param: click.Parameter,
    values: tuple[str, ...],
) -> tuple[str, ...] | None:
    return () if "none" in values else values or None


def _biases(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[tuple[int, float], ...] | None:
    found = []
    for value in values:
        match = BIAS.fullmatch(value)
        if match is None:
            raise click.BadParameter(
                f"want a token id and its bias, such as 15043+1 or 2-inf, got {value!r}", ctx, param
            )
        found.append((int(match[1]), float(match[2])))
    return tuple(found) or None


def _of_field(rule: Rule) -> Callable[[Any], Any]:
    """The option of a field; its value is None unless it is given, because the model's file may recommend another."""
    if rule.kind is SWITCH:
        return option_of(rule)
    return option_of(rule, default=None, said=f"{rule.default:g}", show_default=False)


_own = grouped(SAMPLING)
SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    _own("-n", "--predict", "--n-predict", "n_predict", llama="N_PREDICT", default=-1, type=click.IntRange(-1, INT32),
         help="Most tokens to generate; -1: until the context is full."),
    *(_of_field(rule) for rule in RULES.values() if rule.flag.words),
    _own("--dry-sequence-breaker", "dry_sequence_breakers", llama="", multiple=True, callback=_breakers,
         help="DRY: text that ends a repetition (instead of the defaults); may be repeated; or none."),
    _own("--samplers", llama="", default=None, callback=_names, metavar="A;B;...", help="Samplers in order, by name."),
    _own("--sampler-seq", "--sampling-seq", "sampler_letters", llama="", default=None, callback=_letters,
         help="Samplers in order, by letter."),
    _own("-l", "--logit-bias", llama="", multiple=True, callback=_biases, metavar="ID+BIAS",
         help="Bias of a token, such as 15043+1; 2-inf bans it."),
]  # fmt: skip


def sampling_of(values: dict[str, Any]) -> SamplingGiven:
    """The sampling flags, removed from a command's values. Raises ConfigError, UsageError."""
    letters = values.pop("sampler_letters")
    if letters is not None and values["samplers"] is not None:
        raise click.UsageError("--samplers and --sampler-seq exclude each other")
    values["samplers"] = letters if values["samplers"] is None else values["samplers"]
    if values["samplers"] == DEFAULT_SAMPLERS:
        values["samplers"] = None
    flags = {p.name: p.opts[0] for p in click.get_current_context().command.params}
    given = {}
    for name, rule in RULES.items():
        if name in values and (value := values.pop(name)) is not None:
            if flaw := rule.flaw(value, flags[name]):
                raise ConfigError(flaw)
            given[name] = value
    return SamplingGiven(SamplingParams(**given), frozenset(given))
