"""Finds terminals of a lexer that compete for the same characters, so that the longest match may be wrong.

llguidance reads text in two steps, as most parsers do: a lexer takes the longest possible terminal, and a parser reads terminals. GBNF
has none: a rule may end at any character where the next one can begin. So a node can be a terminal only if no shorter one can end inside
it with the same next byte. Otherwise it is opened into smaller terminals, down to single characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyspec.text.automaton import Automaton, TooLarge, joined_bits
from pyspec.text.expressions import Concat, Either, Node, Ref, Repeat, below, have_common

MOST_STEPS = 150_000  # of all analyses of a grammar


@dataclass(frozen=True, slots=True)
class Meeting:
    """The overlap of two terminals that begin at the same place.

    is_same  one text matches both
    longer   bytes that may continue the second one where the first may end, as bits
    """

    is_same: bool
    longer: int


class TerminalPairs:
    """A cache of meetings, and a count of the steps so far."""

    def __init__(self) -> None:
        self.n, self._found = 0, dict[tuple[int, int], Meeting]()

    def count(self) -> None:
        """Count a step. Raises TooLarge."""
        self.n += 1
        if self.n > MOST_STEPS:
            raise TooLarge

    def meeting(self, a: Automaton, b: Automaton) -> Meeting:
        """The meeting of two automata, which must outlive this cache. Raises TooLarge."""
        if (id(a), id(b)) not in self._found:
            self._found[id(a), id(b)] = _meeting(a, b, self.count)
        return self._found[id(a), id(b)]


def _meeting(a: Automaton, b: Automaton, count: Callable[[], None]) -> Meeting:
    seen, todo, is_same, longer = {(-1, -1)}, [(-1, -1)], False, 0
    while todo:
        p, q = todo.pop()
        if p in a.last:
            is_same |= q in b.last
            longer |= b.next_bytes(q)
        for x in a.behind.get(p, ()):
            for y in b.behind.get(q, ()):
                count()
                if (x, y) not in seen and have_common(a.places[x], b.places[y]):
                    seen.add((x, y))
                    todo.append((x, y))
    return Meeting(is_same, longer)


class Meetings:
    """A grammar as a graph of terminals: the possible first ones, and the possible next ones of each. `terminals`: nodes of `rules`."""

    def __init__(self, rules: Mapping[str, Node], terminals: Mapping[Node, Automaton | None]) -> None:
        """terminals: None for a token, which has no text."""
        self.rules, self.terminals = rules, terminals
        self.next: dict[Node, set[Node]] = {node: set() for node in terminals}
        self._empty = self._can_be_empty()
        self._first: dict[str, frozenset[Node]] = dict.fromkeys(rules, frozenset())
        self._settle()

    def _can_be_empty(self) -> set[str]:
        found: set[str] = set()
        n = -1
        while n < len(found):
            n = len(found)
            found |= {name for name, node in self.rules.items() if self._is_empty(node, found)}
        return found

    def _is_empty(self, node: Node, empty: set[str]) -> bool:
        if node in self.terminals:
            automaton = self.terminals[node]
            return automaton is not None and automaton.can_be_empty
        if isinstance(node, Ref):
            return node.name in empty
        if isinstance(node, Repeat):
            return node.least == 0 or self._is_empty(node.node, empty)
        each = (self._is_empty(part, empty) for part in below(node))
        return all(each) if isinstance(node, Concat) else any(each)

    def _settle(self) -> None:
        """Compute the first terminals of each rule, then the next terminals of each terminal, to a fixed point."""
        is_new = True
        while is_new:
            is_new = False
            for name, node in self.rules.items():
                first = self._first_of(node)
                is_new |= first != self._first[name]
                self._first[name] = first
        behind: dict[str, set[Node]] = {name: set() for name in self.rules}
        n = -1
        while n < (n := sum(map(len, behind.values())) + sum(map(len, self.next.values()))):
            for name, node in self.rules.items():
                self._pass_on(node, frozenset(behind[name]), behind)

    def _first_of(self, node: Node) -> frozenset[Node]:
        if node in self.terminals:
            return frozenset([node])
        if isinstance(node, Ref):
            return self._first[node.name]
        if isinstance(node, Repeat):
            return self._first_of(node.node) if node.most != 0 else frozenset()
        if isinstance(node, Either):
            return frozenset().union(*map(self._first_of, node.choices))
        found: frozenset[Node] = frozenset()
        for part in below(node):
            found |= self._first_of(part)
            if not self._is_empty(part, self._empty):
                break
        return found

    def _pass_on(self, node: Node, follow: frozenset[Node], behind: dict[str, set[Node]]) -> None:
        """Record that `follow` may come behind `node`."""
        if node in self.terminals:
            self.next[node] |= follow
        elif isinstance(node, Ref):
            behind[node.name] |= follow
        elif isinstance(node, Repeat):
            if node.most != 0:
                follow = follow if node.most == 1 else follow | self._first_of(node)
                self._pass_on(node.node, follow, behind)
        elif isinstance(node, Either):
            for each in node.choices:
                self._pass_on(each, follow, behind)
        else:
            for part in reversed(below(node)):
                self._pass_on(part, follow, behind)
                first = self._first_of(part)
                follow = first | follow if self._is_empty(part, self._empty) else first

    def found(self, top: str, pairs: TerminalPairs) -> set[Node]:
        """The terminals inside which another one may end with the byte that continues them. Raises TooLarge."""
        found: set[Node] = set()
        first = self._first[top]
        seen: set[tuple[int, int]] = set()
        todo = [(a, b) for a in first for b in first]
        follows = {
            node: joined_bits(w.start_bytes() for x in self.next[node] if (w := self.terminals[x]))
            for node in self.terminals
        }
        while todo:
            a, b = todo.pop()
            x, y = self.terminals[a], self.terminals[b]
            if (id(a), id(b)) in seen:
                continue
            seen.add((id(a), id(b)))
            pairs.count()
            if x is None or y is None:
                is_same = a is b
            else:
                how = pairs.meeting(x, y)
                is_same = how.is_same or a is b
                if how.longer & follows[a]:
                    found.add(b)
            if is_same:
                pairs_behind = ((c, d) for c in self.next[a] for d in self.next[b])
                todo += [(c, d) for c, d in pairs_behind if (id(c), id(d)) not in seen]
            if len(todo) > MOST_STEPS:
                raise TooLarge
        return found
