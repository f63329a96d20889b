"""What comes next in an answer, looked at before any of it is taken: marks, with names and spaces between them."""

from __future__ import annotations

import re
from collections.abc import Iterable

Step = tuple[str, ...]
"""One of these texts, or one of the kinds below."""

Row = tuple[Step, ...]
"""Steps that follow each other."""

GAP: Step = ("gap",)  # spaces and line ends, or none
NAME: Step = ("name",)  # a name that is not known
TAIL: Step = ("tail",)  # what ends a mark, whatever it is: ">", "/>", "=name>", or the line's end
OVER: Step = ("over",)  # the answer's end

_KINDS = (GAP, NAME, TAIL, OVER)
_SPACES = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[^<>\s\"'`=\\]+")
_TAIL = re.compile(r"[^<\n]*")
MOST_SPACES, MOST_NAME, MOST_TAIL = 64, 64, 64


def comes(text: str, at: int, row: Row, *, is_over: bool, cut_fits: bool) -> bool | None:
    """Whether `row` stands at `at`. None: that hangs on text that has not come."""
    places = {at}
    for step in row:
        waits, reached = False, set[int]()
        for place in places:
            found = _behind(text, place, step, is_over) if step in _KINDS else _behind_text(text, place, step)
            waits = waits or None in found
            reached |= {each for each in found if each is not None}
        if waits and not is_over:
            return None
        if waits and cut_fits:
            return True  # the answer ends here
        if not reached:
            return False
        places = reached
    return True


def _behind_text(text: str, at: int, options: Iterable[str]) -> set[int | None]:
    """Where one of the texts ends; None: it may be one that is not there to its end."""
    found: set[int | None] = {at + len(each) for each in options if text.startswith(each, at)}
    if len(text) - at < 512 and any(each.startswith(text[at:]) and len(each) > len(text) - at for each in options):
        found.add(None)
    return found


def _behind(text: str, at: int, kind: Step, is_over: bool) -> set[int | None]:
    """The same for what is no text."""
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


def _ends_mark(said: str, *, is_line: bool) -> bool:
    """Whether this may be the rest of an end mark: it closes, or the line ends in the middle of its name."""
    return said.endswith(">") or (is_line and (not said or said.isalpha()))
