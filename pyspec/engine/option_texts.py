"""The options of a generation, for `help()` and docs/python.md. Meanings, types and defaults come from the declarations.

`with_options` adds the list to a method's docstring, so that help(Engine.generate) is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

from pyspec.engine.options import GenerateOptions, GrammarOptions, RequestOptions
from pyspec.ranges import docs_of
from pyspec.request import Request, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

TEXTS = {
    name: text
    for owner in (SamplingParams, Request, GenerateOptions)
    for name, text in docs_of(owner).items()
    if name in GenerateOptions.__annotations__
}
GROUPS = {
    "How far it goes, and where it runs": (*RequestOptions.__annotations__, "timeout"),
    "The text has to match one of": tuple(GrammarOptions.__annotations__),
}


@dataclass(frozen=True)
class Option:
    """One option, as help shows it."""

    name: str
    type: str
    default: str
    text: str


def options() -> Iterator[tuple[str, list[Option]]]:
    """Groups of options with their titles, in the order of help."""
    named = {name for names in GROUPS.values() for name in names}
    for title, names in GROUPS.items():
        yield title, [_option(name) for name in names]
    yield "How the next token is chosen", [_option(name) for name in TEXTS if name not in named]


def _option(name: str) -> Option:
    hints = get_type_hints(GenerateOptions)
    return Option(name, type_text(hints[name]), _default(name), TEXTS[name])


def _default(name: str) -> str:
    for holder in (SamplingParams, Request):
        for field in fields(holder):
            if field.name == name and field.default is not MISSING:
                return repr(field.default)
    return "None"


def type_text(hint: Any) -> str:
    """A type as programs write it."""
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    for module in ("collections.abc.", "typing.", "pyspec.request."):
        text = text.replace(module, "")
    return text


def help_text() -> str:
    """All options as lines of a docstring."""
    lines: list[str] = []
    indent = " " * 8
    for title, group in options():
        lines += ["", f"{indent}{title}:", ""]
        for option in group:
            lines.append(f"{indent}    {option.name}: {option.type} = {option.default}")
            lines.append(f"{indent}        {option.text}")
    return "\n".join(lines)


def with_options(method: F) -> F:
    """The method with the options in its docstring."""
    method.__doc__ = f"{(method.__doc__ or '').rstrip()}\n{help_text()}\n{' ' * 8}"
    return method
