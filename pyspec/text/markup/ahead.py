"""Look-ahead in an answer: matches marks, names and spaces against the next text without consuming it."""

from __future__ import annotations

import re
from collections.abc import Iterable

Step = tuple[str, ...]
"""Alternative texts, or one of the kinds below."""

Lookahead = tuple[Step, ...]
"""Consecutive steps."""

GAP: Step = ("gap",)  # spaces and line ends, or nothing
NAME: Step = ("name",)  # any name
# the rest of an end mark in any form: ">", "/>", "=name>", or up to the line's end
TAIL: Step = ("tail",)
OVER: Step = ("over",)  # the answer's end

_KINDS = (GAP, NAME, TAIL, OVER)
_SPACES = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^<>\s\"'`=\\]+")
_TAIL = re.compile(r"[^<\n]*")
MOST_SPACES, MOST_NAME, MOST_TAIL = 64, 64, 64


def matches(text: str, at: int, lookahead: Lookahead, *, is_over: bool, cut_fits: bool) -> bool | None:
    """True if `lookahead` matches at `at`. None if that depends on text still to come."""
    places = {at}
    for step in lookahead:
        waits, reached = False, set[int]()
        for place in places:
            if step in _KINDS:
                found = _behind(text, place, step, is_over)
            else:
                found = _behind_text(text, place, step)
            waits = waits or None in found
            reached |= {each for each in found if each is not None}
        if waits and not is_over:
            return None
        if waits and cut_fits:
            return True  # the answer ends inside the look-ahead
        if not reached:
            return False
        places = reached
    return True


def _behind_text(text: str, at: int, options: Iterable[str]) -> set[int | None]:
    """The ends of the texts that match; None among them if a text may be incomplete."""
    found: set[int | None] = {at + len(each) for each in options if text.startswith(each, at)}
    n = len(text) - at
    if n < 512 and any(each.startswith(text[at:]) and len(each) > n for each in options):
        found.add(None)
    return found


def _behind(text: str, at: int, kind: Step, is_over: bool) -> set[int | None]:
    """The same for a kind of step that is not a text."""
    if kind == OVER:
        return {at} if at == len(text) and is_over else {None} if at == len(text) else set()
    pattern, least, most = {
        GAP: (_SPACES, 0, MOST_SPACES),
        NAME: (_NAME, 1, MOST_NAME),
        TAIL: (_TAIL, 0, MOST_TAIL),
    }[kind]
    match = pattern.match(text, at)
    end = match.end() if match else at
    if end - at > most:
        return set()
    if end == len(text) and not is_over:
        return {None}
    if kind == TAIL and not _ends_mark(text[at:end].strip(), is_line=end < len(text)):
        return set()
    return {end} if end - at >= least else set()


def _ends_mark(tail: str, *, is_line: bool) -> bool:
    """True if this may be the rest of an end mark: it ends in ">", or the line ends inside the mark's name."""
    return tail.endswith(">") or (is_line and (not tail or tail.isalpha()))
