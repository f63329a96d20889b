"""The sampling flags, with llama-server's names and defaults."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from pyspec.cli.flags import grouped
from pyspec.errors import ConfigError
from pyspec.ranges import INT32, docs_of, rules_of
from pyspec.request import DEFAULT_SAMPLERS, Request, SamplingGiven, SamplingParams
from pyspec.samplers import LETTERS

F = TypeVar("F", bound=Callable[..., Any])
TEXTS = docs_of(SamplingParams) | docs_of(Request)
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


def _sampling(*names: str, **more: Any) -> Callable[[F], F]:
    """An option with the type, default and text of SamplingParams; its value is None unless it is given."""
    name = next((n for n in names if n[0] != "-"), names[0].strip("-").replace("-", "_"))
    default = getattr(SamplingParams(), name, None)
    if isinstance(default, int | float) and not isinstance(default, bool) and "default" not in more:
        more |= {"default": None, "type": type(default), "said": f"{default:g}", "show_default": False}
    if name in TEXTS and "help" not in more:
        more["help"] = f"{TEXTS[name][0].upper()}{TEXTS[name][1:]}."
    return grouped("Default sampling")(*names, **more)


SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    _sampling("-n", "--predict", "--n-predict", "n_predict", default=-1, type=click.IntRange(-1, INT32),
              help="Most tokens to generate; -1: until the context is full."),
    _sampling("--temp", "--temperature", "temperature"),
    _sampling("--top-k"),
    _sampling("--top-p"),
    _sampling("--min-p"),
    _sampling("--typical", "--typical-p", "typical_p"),
    _sampling("--top-n-sigma", "--top-nsigma", "top_n_sigma"),
    _sampling("--xtc-probability"),
    _sampling("--xtc-threshold"),
    _sampling("--repeat-last-n"),
    _sampling("--repeat-penalty"),
    _sampling("--presence-penalty"),
    _sampling("--frequency-penalty"),
    _sampling("--dry-multiplier"),
    _sampling("--dry-base"),
    _sampling("--dry-allowed-length"),
    _sampling("--dry-penalty-last-n"),
    _sampling("--dry-sequence-breaker", "dry_sequence_breakers", multiple=True, callback=_breakers,
              help="DRY: text that ends a repetition (instead of the defaults); may be repeated; or none."),
    _sampling("--dynatemp-range"),
    _sampling("--dynatemp-exp", "dynatemp_exponent"),
    _sampling("--mirostat"),
    _sampling("--mirostat-lr", "mirostat_eta"),
    _sampling("--mirostat-ent", "mirostat_tau"),
    _sampling("--adaptive-target"),
    _sampling("--adaptive-decay"),
    _sampling("--samplers", default=None, callback=_names, metavar="A;B;...", help="Samplers in order, by name."),
    _sampling("--sampler-seq", "--sampling-seq", "sampler_letters", default=None, callback=_letters,
              help="Samplers in order, by letter."),
    _sampling("-l", "--logit-bias", multiple=True, callback=_biases, metavar="ID+BIAS",
              help="Bias of a token, such as 15043+1; 2-inf bans it."),
    _sampling("-s", "--seed", "seed", default=-1),
    _sampling("--ignore-eos", is_flag=True),
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
    for rule in rules_of(SamplingParams):
        if rule.name in values and (value := values.pop(rule.name)) is not None:
            if flaw := replace(rule, title=flags[rule.name]).flaw(value):
                raise ConfigError(flaw)
            given[rule.name] = value
    return SamplingGiven(SamplingParams(**given), frozenset(given))
