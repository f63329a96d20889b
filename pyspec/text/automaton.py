"""Regular expressions as automata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyspec.text.expressions import Chars, Either, Node, Ranges, Ref, Repeat, Rules, below, first_bytes

MOST_PLACES = 400  # characters of one automaton
MOST_DEEP = 60  # nesting of rules and brackets in one automaton


class TooLarge(Exception):
    """A node or a grammar is too large to analyse."""


@dataclass(slots=True)
class Automaton:
    """A regular node as a Glushkov automaton: its states are the places of the node's characters; -1 is the start.

    can_be_empty: it matches the empty text; last: places where it may end; behind: for each place, the possible next places
    """

    places: list[Ranges] = field(default_factory=list)
    behind: dict[int, set[int]] = field(default_factory=dict)
    last: frozenset[int] = frozenset()
    can_be_empty: bool = False

    def start_bytes(self) -> int:
        """The possible first bytes, as bits."""
        return self.next_bytes(-1)

    def next_bytes(self, place: int) -> int:
        """The possible bytes behind a place, as bits."""
        return joined_bits(first_bytes(self.places[each]) for each in self.behind.get(place, ()))


def automaton_of(node: Node, rules: Rules) -> Automaton:
    """The automaton of a regular node. Counted repetitions count as unbounded. Raises TooLarge."""
    automaton = Automaton()
    first, automaton.last, automaton.can_be_empty = _add(automaton, node, rules, 0)
    automaton.behind[-1] = set(first)
    return automaton


Part = tuple[frozenset[int], frozenset[int], bool]
"""The first and last places of a part, and whether it can be empty."""
NOTHING: Part = frozenset(), frozenset(), True


def _add(automaton: Automaton, node: Node, rules: Rules, depth: int) -> Part:
    if depth > MOST_DEEP:
        raise TooLarge
    if isinstance(node, Chars):
        if len(automaton.places) == MOST_PLACES:
            raise TooLarge
        automaton.places.append(node.ranges)
        place = frozenset([len(automaton.places) - 1])
        return place, place, False
    if isinstance(node, Ref):
        return _add(automaton, rules[node.name], rules, depth + 1)
    if isinstance(node, Repeat):
        if node.most == 0:
            return NOTHING
        first, last, can_be_empty = _add(automaton, node.node, rules, depth + 1)
        if node.most != 1:
            _follow(automaton, last, first)
        return first, last, can_be_empty or node.least == 0
    parts = [_add(automaton, each, rules, depth + 1) for each in below(node)]
    if isinstance(node, Either):
        return (
            frozenset().union(*(p[0] for p in parts)),
            frozenset().union(*(p[1] for p in parts)),
            any(p[2] for p in parts),
        )
    return _concat(automaton, parts)


def _concat(automaton: Automaton, parts: list[Part]) -> Part:
    first, last, can_be_empty = NOTHING
    for begins, ends, is_optional in parts:
        _follow(automaton, last, begins)
        first = first | begins if can_be_empty else first
        last = last | ends if is_optional else ends
        can_be_empty = can_be_empty and is_optional
    return first, last, can_be_empty


def _follow(automaton: Automaton, last: Iterable[int], first: Iterable[int]) -> None:
    for place in last:
        automaton.behind.setdefault(place, set()).update(first)


def joined_bits(alljoined_bits: Iterable[int]) -> int:
    """The union of several sets of bytes."""
    found = 0
    for bits in alljoined_bits:
        found |= bits
    return found
