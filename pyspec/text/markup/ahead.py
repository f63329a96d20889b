"""Look-ahead in an answer: matches marks, names and spaces against the next text without consuming it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import itemgetter
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
SIGN: Step = ("sign",)  # between a tag's word and a name: "=", " name=" and the like
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
    SIGN: (
        re.compile(r"[ \t=:]*(?:n(?:a(?:m(?:e(?:[ \t]*[=:]?[ \t]*)?)?)?)?)?"),
        re.compile(r"[ \t=:]+(?:name[ \t]*[=:][ \t]*)?"),
        32,
    ),
    NUMBER: (re.compile(r"[:._\-0-9]*"), re.compile(r"(?:[:._-]+[0-9]+)*[:._-]*"), 64),
}
"""The characters of which a kind may consist, the part of them that it is, and how many there are at most."""
_KEPT, _end = (ATTRIBUTES, NUMBER), itemgetter(0)


@dataclass(frozen=True, slots=True)
class Found:
    """A text that matches: where the part of it ends that is taken, its wanted name, and the attributes or the number behind that."""

    end: int
    name: str = ""
    attributes: str = ""


def matches(
    text: str, at: int, lookahead: Lookahead, *, is_over: bool, cut_fits: bool
) -> Found | Literal[False] | None:
    """Whether `lookahead` matches at `at`. None if that depends on text still to come."""
    places, is_ahead = {at: (at, "", "")}, False  # what is found up to each place
    for step in lookahead:
        if step is AHEAD:
            is_ahead = True
            continue
        waits, reached = None, dict[int, tuple[int, str, str]]()
        kind = _KINDS.get(step) if len(step) == 1 else None
        is_name = step is NAME or isinstance(step, Names)
        for place, found in places.items():
            ends: list[int | None]
            if step is OVER:
                ends = [] if place < len(text) else [place] if is_over else [None]
            elif kind:
                ends = _ends(text, place, step, kind, is_over)
            else:
                ends = _ends_of_texts(text, place, step)
            for end in ends:
                if end is None:
                    waits = waits or found
                elif end not in reached:
                    _, name, attributes = found
                    if is_name and not is_ahead:
                        name = text[place:end]
                    elif kind and not is_ahead and step in _KEPT:
                        attributes = text[place:end]
                    reached[end] = found if is_ahead else (end, name, attributes)
        if waits and not is_over:
            return None
        if waits and cut_fits:
            return Found(*waits)  # the answer ends inside the look-ahead
        if not reached:
            return False
        places = reached
    return Found(*max(places.values(), key=_end))


def _ends_of_texts(text: str, at: int, step: Step) -> list[int | None]:
    """Where a step of texts may end; None among them if that depends on text still to come."""
    rest, n, is_cut = "", len(text) - at, False
    ends: list[int | None] = []
    for each in step:
        if len(each) <= n:
            if text.startswith(each, at):
                ends.append(at + len(each))
        elif not is_cut:
            rest = rest or text[at:]
            is_cut = each.startswith(rest)
    return [*ends, None] if is_cut else ends


def _ends(
    text: str, at: int, step: Step, kind: tuple[re.Pattern[str], re.Pattern[str], int], is_over: bool
) -> list[int | None]:
    """The same of one of the kinds."""
    characters, pattern, most = kind
    run = characters.match(text, at)
    end = run.end() if run else at
    if end - at > most:
        return []
    is_whole = step is ATTRIBUTES and end > at and text[end - 1] == ">"
    if end == len(text) and not is_over and not is_whole:
        return [None]
    match = pattern.match(text, at, end)
    if match is None or (
        step is TAIL and not _ends_mark(match.group().strip(), is_line=end < len(text))
    ):
        return []
    return [match.end()]


def _ends_mark(tail: str, *, is_line: bool) -> bool:
    """True if this may be the rest of an end mark: it ends in ">", or the line ends inside the mark's name."""
    return tail.endswith(">") or (is_line and (not tail or tail.isalpha()))
