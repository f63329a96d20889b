"""Regular expressions as automata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyspec.text.expressions import Chars, Either, Node, Ranges, Ref, Repeat, Rules, below, first_bytes

MOST_PLACES = 400  # characters of one word
MOST_DEEP = 60  # nesting of rules and brackets in one word


class TooMuch(Exception):
    """A word or a grammar is too large to analyse."""


@dataclass(slots=True)
class Word:
    """A regular node as a Glushkov automaton: its states are the places of the node's characters; -1 is the start.

    can_be_empty: it matches the empty text; last: places where it may end; behind: for each place, the possible next places
    """

    places: list[Ranges] = field(default_factory=list)
    behind: dict[int, set[int]] = field(default_factory=dict)
    last: frozenset[int] = frozenset()
    can_be_empty: bool = False

    def begins(self) -> int:
        """The possible first bytes, as bits."""
        return self.goes_on(-1)

    def goes_on(self, place: int) -> int:
        """The possible bytes behind a place, as bits."""
        return joined_bits(first_bytes(self.places[each]) for each in self.behind.get(place, ()))


def word_of(node: Node, rules: Rules) -> Word:
    """The automaton of a regular node. Counted repetitions count as unbounded. Raises TooMuch."""
    word = Word()
    first, word.last, word.can_be_empty = _add(word, node, rules, 0)
    word.behind[-1] = set(first)
    return word


Part = tuple[frozenset[int], frozenset[int], bool]
"""The first and last places of a part, and whether it can be empty."""
NOTHING: Part = frozenset(), frozenset(), True


def _add(word: Word, node: Node, rules: Rules, depth: int) -> Part:
    if depth > MOST_DEEP:
        raise TooMuch
    if isinstance(node, Chars):
        if len(word.places) == MOST_PLACES:
            raise TooMuch
        word.places.append(node.ranges)
        place = frozenset([len(word.places) - 1])
        return place, place, False
    if isinstance(node, Ref):
        return _add(word, rules[node.name], rules, depth + 1)
    if isinstance(node, Repeat):
        if node.most == 0:
            return NOTHING
        first, last, can_be_empty = _add(word, node.node, rules, depth + 1)
        if node.most != 1:
            _follow(word, last, first)
        return first, last, can_be_empty or node.least == 0
    parts = [_add(word, each, rules, depth + 1) for each in below(node)]
    if isinstance(node, Either):
        return (
            frozenset().union(*(p[0] for p in parts)),
            frozenset().union(*(p[1] for p in parts)),
            any(p[2] for p in parts),
        )
    return _in_a_row(word, parts)


def _in_a_row(word: Word, parts: list[Part]) -> Part:
    first, last, can_be_empty = NOTHING
    for begins, ends, is_optional in parts:
        _follow(word, last, begins)
        first = first | begins if can_be_empty else first
        last = last | ends if is_optional else ends
        can_be_empty = can_be_empty and is_optional
    return first, last, can_be_empty


def _follow(word: Word, last: Iterable[int], first: Iterable[int]) -> None:
    for place in last:
        word.behind.setdefault(place, set()).update(first)


def joined_bits(alljoined_bits: Iterable[int]) -> int:
    """The union of several sets of bytes."""
    found = 0
    for bits in alljoined_bits:
        found |= bits
    return found
