"""Nodes of GBNF grammars and regular expressions. They compare by identity, because equal nodes at two places are two nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends included: sorted, disjoint and not adjacent."""
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True, eq=False)
class Chars:
    """One character out of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One token of the vocabulary, by its id or its text, or any other token."""

    key: int | str
    is_other: bool


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """The parts in order; without parts the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Either:
    """One of the choices."""

    choices: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """`least` to `most` repetitions; None: no upper bound."""

    node: Node
    least: int
    most: int | None


Node = Chars | Token | Ref | Concat | Either | Repeat
Rules = dict[str, Node]


def below(node: Node) -> tuple[Node, ...]:
    """The direct children of a node."""
    if isinstance(node, Concat):
        return node.parts
    if isinstance(node, Either):
        return node.choices
    return (node.node,) if isinstance(node, Repeat) else ()


def is_nothing(node: Node) -> bool:
    """True for a node that is the empty text as written."""
    return isinstance(node, Concat) and not node.parts


def all_below(top: Node) -> list[Node]:
    """A node and all its descendants, parents first."""
    found, todo = [], [top]
    while todo:
        node = todo.pop()
        found.append(node)
        todo += reversed(below(node))
    return found


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The same characters as sorted, disjoint ranges, without surrogates (UTF-8 has none)."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def _without_surrogates(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    first, last = SURROGATES
    found = []
    for low, high in ranges:
        found += [(low, min(high, first - 1)), (max(low, last + 1), high)]
    return [(low, high) for low, high in found if low <= high]


def others(ranges: Ranges) -> Ranges:
    """All other characters."""
    found, at = [], 0
    for low, high in ranges:
        found.append((at, low - 1))
        at = high + 1
    return merged([(low, high) for low, high in [*found, (at, LAST)] if low <= high])


def have_common(a: Ranges, b: Ranges) -> bool:
    """True if a character is in both."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] < b[j][0]:
            i += 1
        elif b[j][1] < a[i][0]:
            j += 1
        else:
            return True
    return False


def first_bytes(ranges: Ranges) -> int:
    """The first UTF-8 bytes of these characters, as bits of a number."""
    found = 0
    for low, high in ranges:
        for first, last, shift, mark in _LENGTHS:
            a, b = max(low, first), min(high, last)
            if a <= b:
                a, b = a >> shift | mark, b >> shift | mark
                found |= (1 << b + 1) - (1 << a)
    return found


_LENGTHS = (
    (0, 0x7F, 0, 0),
    (0x80, 0x7FF, 6, 0xC0),
    (0x800, 0xFFFF, 12, 0xE0),
    (0x10000, LAST, 18, 0xF0),
)


# -- automata --------------------------------------------------------------------------------------------------------
# Regular expressions as automata.

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
