"""Look-ahead in an answer: matches marks, names and spaces against the next text without consuming it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Literal

Step = tuple[str, ...]
"""Alternative texts, "" for none, or one of the kinds below, whose words no name can be."""

Lookahead = tuple[Step, ...]
"""Consecutive steps."""


class Names(tuple[str, ...]):
    """Alternative texts, of which the one that matches is wanted: longer ones first."""

    def __new__(cls, names: object = ()) -> Names:
        return super().__new__(cls, sorted(names, key=len, reverse=True))  # type: ignore[call-overload]


GAP: Step = ("\0gap",)  # spaces and line ends, or nothing
NAME: Step = ("\0name",)  # any name, which is wanted
WORD: Step = ("\0word",)  # letters and digits
# the rest of an end mark in any form: ">", "/>", "=name>", or up to the line's end
TAIL: Step = ("\0tail",)
ATTRIBUTES: Step = ("\0attributes",)  # the rest of a tag behind its name: ' string="true">'
INSIDE: Step = ("\0inside",)  # text up to a bracket
SIGN: Step = ("\0sign",)  # between a tag's word and a name: "=", " name=" and the like
NUMBER: Step = ("\0number",)  # a number behind a name, or nothing
AHEAD: Step = ("\0ahead",)  # what is behind it is seen, but not taken
OVER: Step = ("\0over",)  # the answer's end

_Kind = tuple[re.Pattern[str], re.Pattern[str], int]
_Places = dict[int, tuple[int, str, str]]  # by each place that is reached: what is found up to it
_KINDS: dict[Step, _Kind] = {
    GAP: (re.compile(r"[ \t\r\n]*"), re.compile(r"\s*"), 64),
    NAME: (re.compile(r"[^<>\s\"'`=\\{}()|\[\]]*"), re.compile(r".+"), 128),
    WORD: (re.compile(r"[\w.-]*"), re.compile(r".+"), 64),
    TAIL: (re.compile(r"[^<\n]*"), re.compile(r".*"), 64),
    ATTRIBUTES: (
        re.compile(r"[^<>\n]*(?:>|$)"),
        re.compile(r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*/?>"""),
        128,
    ),
    INSIDE: (re.compile(r"[^<>]*"), re.compile(r"[^<>]*"), 1024),
    SIGN: (
        re.compile(r"[ \t=:]*(?:n(?:a(?:m(?:e(?:[ \t]*[=:]?[ \t]*)?)?)?)?)?"),
        re.compile(r"[ \t=:]+(?:name[ \t]*[=:][ \t]*)?"),
        32,
    ),
    NUMBER: (re.compile(r"[:._\-0-9]*"), re.compile(r"(?:[:._-]+[0-9]+)*[:._-]*"), 64),
}
"""The characters of which a kind may consist, the part of them that it is, and how many there are at most."""
_KEPT, _end = (ATTRIBUTES, NUMBER), itemgetter(0)
_FEW = 1024  # characters of texts that are worth a pattern


@dataclass(frozen=True, slots=True)
class Found:
    """A text that matches: where the part of it ends that is taken, its wanted name, and the attributes or the number behind that."""

    end: int
    name: str = ""
    attributes: str = ""


class LookaheadTree:
    """Look-aheads, of which the first that matches counts. Beginnings that they share are matched once."""

    def __init__(self, lookaheads: Iterable[Lookahead]) -> None:
        nodes: dict[tuple[int, bool, Step], int] = {}
        self._nodes: list[_Node] = []
        self._paths: list[list[int]] = []
        for each in lookaheads:
            at, is_ahead, path = -1, False, []
            for step in each:
                is_ahead = is_ahead or step is AHEAD
                is_name = step is NAME or isinstance(step, Names)
                at = nodes.setdefault((at, is_name, step), len(nodes))
                if at == len(self._nodes):
                    self._nodes.append(_node(step, is_ahead, is_name))
                if step is not AHEAD:
                    path.append(at)
            self._paths.append(path)

    def find(
        self, text: str, at: int, *, is_over: bool, cut_fits: bool
    ) -> Found | Literal[False] | None:
        """The first that matches at `at`; False if none does. None if that depends on text still to come.

        is_over   no text is to come
        cut_fits  the text may end inside one, then
        """
        start: _Places = {at: (at, "", "")}
        n = len(text)
        reached: list[_Places | None] = [None] * len(self._nodes)
        for path in self._paths:
            places = start
            for node in path:
                found = reached[node]
                if found is None:
                    step = self._nodes[node]
                    if step.texts and len(places) == 1:
                        (place,) = places
                        if n - place >= step.longest and not step.texts.match(text, place):
                            reached[node] = {}
                            break
                    found, waits = _reach(text, places, step, is_over)
                    if waits and not is_over:
                        return None
                    if waits and cut_fits:
                        return Found(*waits)
                    reached[node] = found
                if not found:
                    break
                places = found
            else:
                return Found(*max(places.values(), key=_end))
        return False


@dataclass(frozen=True, slots=True)
class _Node:
    """A step. texts: a pattern of its texts, the longest of which has `longest` characters; None if one is empty, or there are many."""

    step: Step
    kind: _Kind | None
    texts: re.Pattern[str] | None
    longest: int
    is_ahead: bool
    is_name: bool


@lru_cache(maxsize=1024)
def _node(step: Step, is_ahead: bool, is_name: bool) -> _Node:
    kind, longest = _KINDS.get(step) if len(step) == 1 else None, max(map(len, step), default=0)
    is_few = not kind and step is not OVER and all(step) and len(step) * longest < _FEW
    texts = re.compile("|".join(map(re.escape, step))) if is_few and step else None
    return _Node(step, kind, texts, longest, is_ahead, is_name)


def _reach(
    text: str, places: _Places, node: _Node, is_over: bool
) -> tuple[_Places, tuple[int, str, str] | None]:
    """The places behind a step, and what is found before it where that depends on text still to come."""
    step, kind, n = node.step, node.kind, len(text)
    waits, reached = None, dict[int, tuple[int, str, str]]()
    for place, found in places.items():
        ends: list[int | None]
        if step is OVER:
            ends = [] if place < n else [place] if is_over else [None]
        elif kind:
            ends = _ends(text, place, step, kind, is_over)
        else:
            ends = _ends_of_texts(text, place, step)
        for end in ends:
            if end is None:
                waits = waits or found
            elif end not in reached:
                _, name, attributes = found
                if node.is_name and not node.is_ahead:
                    name = text[place:end]
                elif kind and not node.is_ahead and step in _KEPT:
                    attributes = text[place:end]
                reached[end] = found if node.is_ahead else (end, name, attributes)
    return reached, waits


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


def _ends(text: str, at: int, step: Step, kind: _Kind, is_over: bool) -> list[int | None]:
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
