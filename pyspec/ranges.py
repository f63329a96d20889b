"""The facts of a field, declared once at the field of a dataclass: legal values, meaning, the option that sets it.

    top_p: Annotated[float, Real(0, 1), Flag("--top-p $TOP_P", SAMPLING), Doc("choose among ...")] = 0.95

`check` tests a whole dataclass. The command line with its help, the variables of the environment, request bodies with their schema, the
Python API and docs/python.md are made of these facts, so a value is legal for all of them or for none.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

INT32 = 2**31 - 1
SHOWN, QUOTED = 40, 80  # characters of a value, and of text from a file, that an error repeats


class Kind(Protocol):
    """The legal values of a field."""

    @property
    def wanted(self) -> str:
        """The legal values in words: "a whole number from 1 to 256"."""

    def flaw(self, value: object) -> str:
        """The fault of a value, as the end of a sentence that starts with its name; "" for a legal value."""


def shown(value: object, most: int = SHOWN) -> str:
    """A value in an error message: one line of plain ASCII, at most `most` characters."""
    try:
        value = value[: most + 1] if isinstance(value, str) else value
        text = ascii(value)
    except ValueError:  # Python refuses to print thousands of digits
        text = "a huge number"
    except Exception:  # noqa: BLE001 - a caller's class may fail in __repr__, and deep nesting in the recursion
        text = f"a value of type {ascii(type(value).__name__)[:most]}"
    return text if len(text) <= most else text[: most - 3] + "..."


def quoted(text: str) -> str:
    """Text from a file in an error message: quoted, short, with all but plain ASCII escaped."""
    return shown(text, QUOTED)


def no_number(name: str) -> float:
    """For `json.loads`: JSON has no NaN and no infinity. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


def printable(text: str, most: int = 1 << 30) -> str:
    """External text made safe for a line of output: at most `most` characters, with characters that control a terminal as U+FFFD."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(c if c.isprintable() else "\ufffd" for c in cut)


def _is_not(value: object, wanted: str) -> str:
    return f"is {shown(value)}; want {wanted}"


@dataclass(frozen=True)
class Whole:
    """A whole number, both ends included. A bool is not one, although Python accepts it as int."""

    low: int
    high: int
    hint: str = ""  # about a special value: "0: automatic"

    @property
    def wanted(self) -> str:
        return f"a whole number from {self.low} to {self.high}" + (self.hint and f" ({self.hint})")

    def flaw(self, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high:
            return ""
        return _is_not(value, self.wanted)


@dataclass(frozen=True)
class Real:
    """A number, both ends included; never NaN.

    above  exclude the lower end
    also   special values outside the range
    """

    low: float
    high: float
    hint: str = ""
    above: bool = False
    also: tuple[float, ...] = ()

    @property
    def wanted(self) -> str:
        low = f"above {self.low:g}, at most" if self.above else f"from {self.low:g} to"
        also = "".join(f", or {x:g}" for x in self.also)
        return f"a number {low} {self.high:g}{also}" + (self.hint and f" ({self.hint})")

    def flaw(self, value: object) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool) and self._holds(value):
            return ""
        return _is_not(value, self.wanted)

    def _holds(self, value: float) -> bool:
        return value in self.also or (
            self.low <= value <= self.high and not (self.above and value == self.low)
        )


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    values: tuple[object, ...]

    @property
    def wanted(self) -> str:
        return "one of " + ", ".join(str(v) or "''" for v in self.values)

    def flaw(self, value: object) -> str:
        if any(type(value) is type(known) and value == known for known in self.values):
            return ""
        return _is_not(value, self.wanted)


@dataclass(frozen=True)
class Text:
    """Text that fully matches a regular expression."""

    pattern: str = r"(?s:.*)"
    wanted: str = "text"

    def flaw(self, value: object) -> str:
        return (
            ""
            if isinstance(value, str) and re.fullmatch(self.pattern, value)
            else _is_not(value, self.wanted)
        )


@dataclass(frozen=True)
class Of:
    """An object of one of these types."""

    type: type | tuple[type, ...]

    @property
    def wanted(self) -> str:
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        return "a " + " or ".join(t.__name__ for t in types)

    def flaw(self, value: object) -> str:
        return "" if isinstance(value, self.type) else _is_not(value, self.wanted)


@dataclass(frozen=True)
class Many:
    """A tuple or list of values of one kind."""

    kind: Kind
    wanted = "a tuple"

    def flaw(self, value: object) -> str:
        if not isinstance(value, tuple | list):
            return _is_not(value, self.wanted)
        return next(
            (f"[{i}] {flaw}" for i, item in enumerate(value) if (flaw := self.kind.flaw(item))), ""
        )


@dataclass(frozen=True)
class Ids:
    """Token ids: whole numbers. The engine checks their range; this check is fast because prompts are long."""

    wanted = "a tuple of token ids"

    def flaw(self, value: object) -> str:
        if not isinstance(value, tuple | list):
            return _is_not(value, self.wanted)
        if {*map(type, value)} <= {int}:
            return ""
        return next(
            f"[{i}] {_is_not(token, 'a token id')}"
            for i, token in enumerate(value)
            if type(token) is not int
        )


@dataclass(frozen=True)
class Pair:
    """Two values, each with its kind."""

    first: Kind
    second: Kind
    wanted = "a pair"

    def flaw(self, value: object) -> str:
        if not isinstance(value, tuple | list) or len(value) != 2:
            return _is_not(value, self.wanted)
        return self.first.flaw(value[0]) or self.second.flaw(value[1])


SWITCH = OneOf((True, False))


@dataclass(frozen=True)
class Doc:
    """The meaning of a field, for help and for the reference: `n_slot: Annotated[int, Doc("requests that run at once")]`."""

    text: str


@dataclass(frozen=True)
class Flag:
    """The option of the command line that sets a field.

    words    its spellings, of which errors name the first. Behind them, if llama-server has the option too, $ and its variable's name
             without LLAMA_ARG_, or $ alone if it has no variable
    group    its heading in help; "": commands define the option themselves
    metavar  what help calls the value
    help     what help says instead of the field's Doc
    """

    words: str
    group: str = ""
    metavar: str = ""
    help: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The spellings."""
        return tuple(word for word in self.words.split() if word[0] != "$")

    @property
    def llama(self) -> str | None:
        """llama-server's variable of the option without LLAMA_ARG_, "" if it has none; None: the option is pyspec's own."""
        return next((word[1:] for word in self.words.split() if word[0] == "$"), None)


@dataclass(frozen=True)
class Key:
    """The key of a model's file that recommends a value, behind "general.sampling."."""

    name: str


@dataclass(frozen=True)
class Rule:
    """The facts of one field of a dataclass."""

    name: str
    kind: Kind
    optional: bool  # may be None
    default: Any = MISSING
    flag: Flag = Flag("")
    text: str = ""  # its Doc
    key: str = ""  # its Key

    @property
    def wanted(self) -> str:
        """The legal values in words."""
        return self.kind.wanted + " or None" * self.optional

    @property
    def spelt(self) -> str:
        """The flag's first spelling, or the field's name."""
        return self.flag.names[0] if self.flag.words else self.name

    def flaw(self, value: object, title: str = "") -> str:
        """The fault as a whole sentence, or "". title: what it calls the field instead of its name"""
        if value is None and self.optional:
            return ""
        flaw = self.kind.flaw(value)
        space = "" if flaw[:1] == "[" else " "
        return flaw and f"{title or self.name}{space}{flaw}{' or None' * self.optional}"


def _notes(hint: Any) -> tuple[list[Any], list[Any], bool]:
    """The types of a hint, the notes around them, and whether None is one more."""
    notes: list[Any] = []
    types, may_be_none = [hint], False
    while len(types) == 1:
        (hint,) = types
        if get_origin(hint) is Annotated:
            types, notes = [hint.__origin__], [*notes, *hint.__metadata__]
        elif get_origin(hint) in (Union, UnionType):
            types = [choice for choice in get_args(hint) if choice is not NoneType]
            may_be_none = len(types) < len(get_args(hint))
        else:
            break
    return types, notes, may_be_none


_RULES: dict[type, tuple[Rule, ...]] = {}  # reading type hints is slow


def rules_of(owner: type) -> tuple[Rule, ...]:
    """The fields of a dataclass that have rules: Annotated with a Kind, bools, dataclasses."""
    if owner not in _RULES:
        hints = get_type_hints(owner, include_extras=True)
        found = (_rule(f.name, hints[f.name], f.default) for f in fields(owner))
        _RULES[owner] = tuple(rule for rule in found if rule is not None)
    return _RULES[owner]


def _rule(name: str, hint: Any, default: Any) -> Rule | None:
    types, notes, may_be_none = _notes(hint)
    if len(types) != 1:
        return None
    (type_,) = types
    flag = next((note for note in notes if isinstance(note, Flag)), Flag(""))
    text = next((note.text for note in notes if isinstance(note, Doc)), "")
    key = next((note.name for note in notes if isinstance(note, Key)), "")
    kind: Kind | None = next((note for note in notes if not isinstance(note, Flag | Doc | Key)), None)
    if kind is None and type_ is bool:
        kind = SWITCH
    elif kind is None and isinstance(type_, type):
        kind = Of(type_)
    return None if kind is None else Rule(name, kind, may_be_none, default, flag, text, key)


def docs_of(owner: type) -> dict[str, str]:
    """The meanings of a class's fields, those with a Doc."""
    found = (
        (name, _notes(hint)[1]) for name, hint in get_type_hints(owner, include_extras=True).items()
    )
    return {name: note.text for name, notes in found for note in notes if isinstance(note, Doc)}


def check(thing: Any, error: type[Exception], *, by_flag: bool = False) -> None:
    """Raise `error` with the first fault of a dataclass, which names the field, or its flag."""
    for rule in rules_of(type(thing)):
        if flaw := rule.flaw(getattr(thing, rule.name), rule.spelt if by_flag else ""):
            raise error(flaw)
