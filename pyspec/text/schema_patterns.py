r"""Rewrites patterns of JSON Schemas for llguidance, which has no look-around.

`^(?=A)(?!B)C` becomes several patterns that a text must all match: those of C, of texts that begin with A, and of texts that do not
begin with B. The last one is the complement of an automaton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pyspec.text.expressions import (
    Chars,
    Concat,
    Either,
    Node,
    Ranges,
    Repeat,
    TooLarge,
    automaton_of,
    have_common,
    merged,
    others,
)

MOST_STATES = 24  # of the automaton of a negative look-ahead
MOST_DEEP = 40
MOST_CHARS = 20_000  # of a rewritten pattern
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F),
    (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
CONTROLS: Ranges = ((0, 0x1F),)
_SETS = {"d": DIGIT, "w": WORD, "s": SPACE}
_NAMED = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_COUNT = re.compile(r"\{([0-9]{1,4})(,?)([0-9]{0,4})\}")
_AHEAD = re.compile(r"\(\?(=|!|<=|<!)")
_LAST = re.compile(r"\(\?<([=!])((?:[^()\\]|\\.)*)\)\$$")
_GROUP = re.compile(r"\((?:\?(?::|<[A-Za-z]\w*>))?")


class UnsupportedPattern(Exception):
    """The pattern has syntax that this module does not read."""


def plain_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a schema's patterns so that llguidance keeps the meaning of its author."""
    pattern, named = node.get("pattern"), node.get("patternProperties")
    if isinstance(named, dict):
        node["patternProperties"] = {_as_read(each): below for each, below in named.items()}
    if not isinstance(pattern, str):
        return node
    try:
        first, *more = [_with_plain_classes(each) for each in _parts(pattern)]
    except (UnsupportedPattern, TooLarge, RecursionError):
        return node
    node["pattern"] = first
    if more:
        node["allOf"] = [*node.get("allOf", ()), *({"pattern": each} for each in more)]
    return node


def _as_read(pattern: str) -> str:
    try:
        return _with_plain_classes(pattern)
    except UnsupportedPattern:
        return pattern


def _parts(pattern: str) -> list[str]:
    """Patterns that together match the same texts as `pattern`."""
    if not _AHEAD.search(pattern):
        return [pattern]
    if (behind := _LAST.search(pattern)) is not None:
        if _has_choices(pattern):
            raise UnsupportedPattern
        more = _parts(pattern[: behind.start()] + "$")
        return [*more, _end(behind[2], is_wanted=behind[1] == "=")]
    if not pattern.startswith("^"):
        raise UnsupportedPattern
    before, found, at = "", [], 1
    while at < len(pattern):
        ahead = _AHEAD.match(pattern, at)
        if ahead is not None and "<" not in ahead[1]:
            end = _end_of_group(pattern, at)
            inner = pattern[ahead.end() : end - 1]
            found.append(_beginning(before, inner, is_wanted=ahead[1] == "="))
            at = end
        elif (one := _one_char(pattern, at)) > at and _AHEAD.search(pattern, at):
            before += pattern[at:one]
            at = one
        else:
            break
    rest = before + pattern[at:]
    if _AHEAD.search(rest) or _has_choices(rest):
        raise UnsupportedPattern
    return [f"^{rest}", *found]


def _beginning(before: str, inner: str, *, is_wanted: bool) -> str:
    """A pattern of the texts with `inner` (or not) behind `before`. `before` has a fixed number of characters."""
    if _AHEAD.search(inner):
        raise UnsupportedPattern
    if not before:  # at the start of the text, where ^ is redundant
        inner = "|".join(each.removeprefix("^") for each in _choices(inner))
    if is_wanted:
        return f"^{before}(?:{inner})"
    choices = _choices(inner)
    is_whole = [each.endswith("$") and not each.endswith("\\$") for each in choices]
    rest = Repeat(Chars(others(())), 0, None)
    nodes = []
    for each, whole in zip(choices, is_whole, strict=True):
        node = _PatternReader(before + "(?:" + (each[:-1] if whole else each) + ")").read()
        nodes.append(node if whole else Concat((node, rest)))
    return f"^(?:{_complement(Either(tuple(nodes)))})$"


def _end(inner: str, *, is_wanted: bool) -> str:
    """A pattern of the texts that end in `inner` (or do not)."""
    end = f"(?:{inner})$"
    return end if is_wanted else _beginning("[\\s\\S]*", end, is_wanted=False)


def _signs(text: str, at: int = 0) -> Iterator[tuple[int, str, int]]:
    """Brackets and bars of a pattern from `at` on, as place, sign and depth. An opening bracket counts in its depth, a closing one does not."""
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            at = _end_of_class(text, at) - 1
        elif text[at] in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[text[at]]
            yield at, text[at], depth
        at += 1


def _choices(text: str) -> list[str]:
    """The alternatives of a pattern."""
    found, begin = [], 0
    for at, sign, depth in _signs(text):
        if sign == "|" and depth == 0:
            found.append(text[begin:at])
            begin = at + 1
    return [*found, text[begin:]]


def _has_choices(text: str) -> bool:
    return len(_choices(text)) > 1


def _end_of_group(text: str, at: int) -> int:
    for end, sign, depth in _signs(text, at):
        if sign != "|" and depth == 0:
            return end + 1
    raise UnsupportedPattern


def _end_of_class(text: str, at: int) -> int:
    at += 2 if text[at + 1 : at + 2] == "^" else 1
    while at < len(text) and text[at] != "]":
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        raise UnsupportedPattern
    return at + 1


def _one_char(pattern: str, at: int) -> int:
    """The end of an item that matches exactly one character; `at` if there is none."""
    sign = pattern[at]
    if sign in "(){}*+?|^$":
        return at
    end = _end_of_class(pattern, at) if sign == "[" else at + 1
    if sign == "\\":
        found = _CODE.match(pattern, at + 1)
        end = found.end() if found else at + 2
        kind = pattern[at + 1 : at + 2]
        if kind in ("b", "B", "p", "P", "k") or kind.isdigit():
            return at
    return at if pattern[end : end + 1] in ("*", "+", "?", "{") and pattern[end : end + 1] else end


def _with_plain_classes(pattern: str) -> str:
    """Remove U+0000 from classes with all control characters: with it, llguidance lets escaped quotes and backslashes through."""
    found, at = [], 0
    while at < len(pattern):
        end = at + (2 if pattern[at] == "\\" else 1)
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
            try:
                ranges = _class(pattern[at:end])
            except UnsupportedPattern:
                ranges = ()
            if ranges and not have_common(others(ranges), CONTROLS):
                found.append(_written([(max(low, 1), high) for low, high in ranges]))
                at = end
                continue
        found.append(pattern[at:end])
        at = end
    return "".join(found)


def _class(text: str) -> Ranges:
    """The characters of a class; `text` includes its brackets."""
    reader, found = _PatternReader(text), []
    reader.at = 1
    is_other = text[1:2] == "^"
    reader.at += is_other
    while reader.at < len(text) - 1:
        low = reader.in_class()
        if isinstance(low, int) and text[reader.at] == "-" and reader.at + 1 < len(text) - 1:
            reader.at += 1
            high = reader.in_class()
            if not isinstance(high, int) or high < low:
                raise UnsupportedPattern
            found.append((low, high))
        else:
            found += [(low, low)] if isinstance(low, int) else low
    return others(merged(found)) if is_other else merged(found)


class _PatternReader:
    """Parses a JavaScript expression without look-around, backreferences and anchors."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def read(self) -> Node:
        node = self._either()
        if self.at < len(self.text):
            raise UnsupportedPattern
        return node

    def _either(self) -> Node:
        choices = [self._concat()]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            choices.append(self._concat())
        return Either(tuple(choices))

    def _concat(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._part()))
        return Concat(tuple(parts))

    def _part(self) -> Node:
        sign = self.text[self.at]
        if sign == "(":
            return self._group()
        if sign == "[":
            begin = self.at
            self.at = _end_of_class(self.text, begin)
            ranges = _class(self.text[begin : self.at])
        elif sign == ".":
            self.at += 1
            ranges = others(LINE_ENDS)
        elif sign in "^$*+?{":
            raise UnsupportedPattern
        else:
            one = self.in_class()
            ranges = ((one, one),) if isinstance(one, int) else one
        if not ranges:
            raise UnsupportedPattern
        return Chars(ranges)

    def _group(self) -> Node:
        found = _GROUP.match(self.text, self.at)
        self.depth += 1
        if found is None or self.depth > MOST_DEEP or self.text.startswith("?", found.end()):
            raise UnsupportedPattern
        self.at = found.end()
        node = self._either()
        if self.text[self.at : self.at + 1] != ")":
            raise UnsupportedPattern
        self.at += 1
        self.depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        sign = self.text[self.at : self.at + 1]
        if sign == "{":
            found = _COUNT.match(self.text, self.at)
            if found is None:
                raise UnsupportedPattern
            self.at = found.end()
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            node = _unrolled(node, least, most)
        elif sign and sign in "*+?":
            self.at += 1
            node = Repeat(node, int(sign == "+"), 1 if sign == "?" else None)
        else:
            return node
        if self.text[self.at : self.at + 1] == "?":  # lazy or greedy: both match the same texts
            self.at += 1
        return node

    def in_class(self) -> int | Ranges:
        """One character, or the characters of an escape."""
        sign = self.text[self.at]
        self.at += 1
        if sign != "\\":
            return ord(sign)
        if found := _CODE.match(self.text, self.at):
            self.at = found.end()
            return int(found[1] or found[2] or found[3], 16)
        sign = self.text[self.at : self.at + 1]
        self.at += 1
        if sign.lower() in _SETS and sign:
            return _SETS[sign] if sign.islower() else others(_SETS[sign.lower()])
        if sign in _NAMED:
            return _NAMED[sign]
        if not sign or sign.isalnum():
            raise UnsupportedPattern
        return ord(sign)


def _unrolled(node: Node, least: int, most: int | None) -> Node:
    """Write a counted repetition out, because the automaton treats counted repetitions as unbounded."""
    if least + (most or 0) > 4 * MOST_STATES:
        raise UnsupportedPattern
    parts: list[Node] = [node] * least
    parts += [Repeat(node, 0, None)] if most is None else [Repeat(node, 0, 1)] * (most - least)
    return Concat(tuple(parts))


def _complement(node: Node) -> str:
    """A regular expression of the texts that do not match a node. Raises TooLarge."""
    automaton = automaton_of(node, {})
    alphabet = _alphabet(automaton.places)
    start = frozenset([-1])
    states, todo = {start: 0}, [start]
    edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    while todo:
        state = todo.pop()
        after = [place for each in state for place in automaton.behind.get(each, ())]
        for chars in alphabet:
            places = automaton.places
            to = frozenset(place for place in after if have_common(places[place], (chars,)))
            if to not in states:
                if len(states) == MOST_STATES:
                    raise TooLarge
                states[to] = len(states)
                todo.append(to)
            edges.setdefault((states[state], states[to]), []).append(chars)
    accepts = [
        number
        for state, number in states.items()
        if not (state & automaton.last or (automaton.can_be_empty and state == start))
    ]
    written = {pair: _written(merged(chars)) for pair, chars in edges.items()}
    return _expression(written, len(states), accepts)


def _alphabet(places: Sequence[Ranges]) -> list[tuple[int, int]]:
    """All characters, split wherever a place distinguishes them."""
    cuts = {0, 0xD800, 0xE000, 0x110000}
    for ranges in places:
        for low, high in ranges:
            cuts |= {low, high + 1}
    found = sorted(cuts)
    return [(a, b - 1) for a, b in pairwise(found) if a != 0xD800]


def _expression(edges: dict[tuple[int, int], str], n: int, accepts: Sequence[int]) -> str:
    """An expression of all paths from state 0 to an accepting state, by eliminating states one by one."""
    edges = {(a + 1, b + 1): text for (a, b), text in edges.items()} | {(0, 1): ""}
    edges |= {(state + 1, n + 1): "" for state in accepts}
    for out in range(n, 0, -1):
        loop = edges.pop((out, out), None)
        again = "" if loop is None else f"(?:{loop})*"
        into = [(a, text) for (a, b), text in edges.items() if b == out]
        outof = [(b, text) for (a, b), text in edges.items() if a == out]
        edges = {pair: text for pair, text in edges.items() if out not in pair}
        for a, before in into:
            for b, behind in outof:
                text = f"{_one(before)}{again}{_one(behind)}"
                edges[a, b] = f"{edges[a, b]}|{text}" if (a, b) in edges else text
        if sum(map(len, edges.values())) > MOST_CHARS:
            raise TooLarge
    return edges.get((0, n + 1), "[^\\x{0}-\\x{10ffff}]")


def _one(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _written(ranges: Sequence[tuple[int, int]]) -> str:
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"
