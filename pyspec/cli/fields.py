"""Options of the command line from the fields of dataclasses: names, type, default and help are the field's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import click

from pyspec.cli.flags import commas, grouped
from pyspec.ranges import SWITCH, Kind, Many, OneOf, Real, Rule, Whole, rules_of

Decorator = Callable[[Any], Any]


class Number(click.FloatRange):
    """A finite number in a range: click accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def options_of(
    owner: type, changes: Mapping[str, Mapping[str, Any]], group: str = ""
) -> list[Decorator]:
    """An option for each field with a flag, of one group or of all; numbers are held against their ranges at once. changes: as of `option_of`."""
    return [
        option_of(rule, **{"type": _ranged(rule.kind), **changes.get(rule.name, {})})
        for rule in rules_of(owner)
        if rule.flag.words and group in ("", rule.flag.group)
    ]


def _ranged(kind: Kind) -> Any:
    if isinstance(kind, Whole):
        return click.IntRange(kind.low, kind.high)
    return Number(kind.low, kind.high) if isinstance(kind, Real) else _type(kind)


def option_of(rule: Rule, **more: Any) -> Decorator:
    """The option that sets a field; its value has the field's name. more: what click shall take instead."""
    flag, names = rule.flag, rule.flag.names
    if rule.kind is SWITCH:
        names = tuple(f"{name}/--no-{name[2:]}" for name in names) if rule.default else names
        more = {"is_flag": True} | more
    default = rule.default if rule.default != "" or not isinstance(rule.kind, OneOf) else None
    about = {"default": default, "help": flag.help or sentence(rule.text), "type": _type(rule.kind)}
    if flag.metavar:
        about["metavar"] = flag.metavar
    if isinstance(rule.kind, Many):
        about |= {"multiple": True, "callback": commas}
    return grouped(flag.group)(*names, rule.name, llama=flag.llama, **about | more)


def sentence(text: str) -> str:
    """A meaning as a sentence of help."""
    return f"{text[0].upper()}{text[1:]}."


def _type(kind: Kind) -> Any:
    """click's type. Ranges are left to the check of the whole dataclass, whose errors are the same for values from any source."""
    if isinstance(kind, OneOf) and kind is not SWITCH:
        return click.Choice([value for value in kind.values if value != ""])
    return {Whole: click.INT, Real: click.FLOAT}.get(type(kind))
