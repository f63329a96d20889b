"""Look-ahead in an answer: matches marks, names and spaces against the next text without consuming it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Step = tuple[str, ...]
"""Alternative texts, "" for none, or one of the kinds below."""

Lookahead = tuple[Step, ...]
"""Consecutive steps."""


class Names(tuple[str, ...]):
    """Alternative texts, of which the one that matches is wanted: longer ones first."""

    def __new__(cls, names: object = ()) -> Names:
        return super().__new__(cls, sorted(names, key=len, reverse=True))  # type: ignore[call-overload]


GAP: Step = ("gap",)  # spaces and line ends, or nothing
NAME: Step = ("name",)  # any name, which is wanted
WORD: Step = ("word",)  # letters and digits
# the rest of an end mark in any form: ">", "/>", "=name>", or up to the line's end
TAIL: Step = ("tail",)
ATTRIBUTES: Step = ("attributes",)  # the rest of a tag behind its name: ' string="true">'
NUMBER: Step = ("number",)  # a number behind a name, or nothing
AHEAD: Step = ("ahead",)  # what is behind it is seen, but not taken
OVER: Step = ("over",)  # the answer's end

_KINDS: dict[Step, tuple[re.Pattern[str], re.Pattern[str], int]] = {
    GAP: (re.compile(r"[ \t\r\n]*"), re.compile(r"\s*"), 64),
    NAME: (re.compile(r"[^<>\s\"'`=\\{}()|\[\]]*"), re.compile(r".+"), 128),
    WORD: (re.compile(r"[\w.-]*"), re.compile(r".+"), 64),
    TAIL: (re.compile(r"[^<\n]*"), re.compile(r".*"), 64),
    ATTRIBUTES: (
        re.compile(r"[^<>\n]*(?:>|$)"),
        re.compile(r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*/?>"""),
        128,
    ),
    NUMBER: (re.compile(r"[:._\-0-9]*"), re.compile(r"(?:[:._-]+[0-9]+)?"), 64),
}
"""The characters of which a kind may consist, the part of them that it is, and how many there are at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """A text that matches: where the part of it ends that is taken, its wanted name, and the attributes or the number behind that."""

    end: int
    name: str = ""
    attributes: str = ""
    is_ahead: bool = False


def matches(
    text: str, at: int, lookahead: Lookahead, *, is_over: bool, cut_fits: bool
) -> Found | Literal[False] | None:
    """Whether `lookahead` matches at `at`. None if that depends on text still to come."""
    places = {at: Found(at)}
    for step in lookahead:
        if step == AHEAD:
            places = {at: replace(found, is_ahead=True) for at, found in places.items()}
            continue
        waits, reached = None, dict[int, Found]()
        for place, found in places.items():
            for end in _ends(text, place, step, is_over):
                if end is None:
                    waits = waits or found
                    continue
                taken = text[place:end]
                new = found if found.is_ahead else replace(found, end=end)
                if found.is_ahead:
                    pass
                elif isinstance(step, Names) or step == NAME:
                    new = replace(new, name=taken)
                elif step in (ATTRIBUTES, NUMBER):
                    new = replace(new, attributes=taken)
                reached.setdefault(end, new)
        if waits and not is_over:
            return None
        if waits and cut_fits:
            return waits  # the answer ends inside the look-ahead
        if not reached:
            return False
        places = reached
    return max(places.values(), key=lambda found: found.end)


def _ends(text: str, at: int, step: Step, is_over: bool) -> list[int | None]:
    """Where a step may end; None among them if that depends on text still to come."""
    n = len(text) - at
    if step == OVER:
        return [] if n else [at] if is_over else [None]
    if step not in _KINDS:
        ends: list[int | None] = [at + len(each) for each in step if text.startswith(each, at)]
        is_cut = n < 512 and any(len(each) > n and each.startswith(text[at:]) for each in step)
        return [*ends, None] if is_cut else ends
    characters, pattern, most = _KINDS[step]
    run = characters.match(text, at)
    end = run.end() if run else at
    if end - at > most:
        return []
    is_whole = step == ATTRIBUTES and end > at and text[end - 1] == ">"
    if end == len(text) and not is_over and not is_whole:
        return [None]
    match = pattern.match(text, at, end)
    if match is None or (
        step == TAIL and not _ends_mark(match.group().strip(), is_line=end < len(text))
    ):
        return []
    return [match.end()]


def _ends_mark(tail: str, *, is_line: bool) -> bool:
    """True if this may be the rest of an end mark: it ends in ">", or the line ends inside the mark's name."""
    return tail.endswith(">") or (is_line and (not tail or tail.isalpha()))
