"""Translates GBNF to llguidance's lark with llama.cpp's meaning: a text matches if any derivation gives it.

A regular part becomes one terminal of the lexer, which follows all alternatives at once and costs next to nothing. Other parts become
rules of terminals, no two of which compete for the same characters (`Meetings`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pyspec.constrain.gbnf import BadGBNF, parse
from pyspec.text.expressions import (
    Automaton,
    Chars,
    Concat,
    Either,
    Node,
    Ref,
    Repeat,
    Rules,
    Token,
    TooLarge,
    all_below,
    automaton_of,
    below,
    have_common,
    is_nothing,
    joined_bits,
)

# -- regular rules ---------------------------------------------------------------------------------------------------
# Finds the regular rules of a GBNF grammar, which one expression can replace: rules without recursion, and rules with recursion at their
# end only (`ws ::= [ \t] ws | ""`), which is solved.

MOST_TOGETHER = 6  # mutually recursive rules that are solved; the result doubles with each


def without_tails(rules: Rules) -> tuple[Rules, frozenset[str]]:
    """The rules with tail recursion solved, and the names of the regular ones."""
    found = dict(rules)
    regular: set[str] = set()
    for group in _groups(rules):
        solved = _solved(group, found, regular)
        if solved is not None:
            found |= solved
            regular |= group
    return found, frozenset(regular)


def is_regular(node: Node, regular: Iterable[str]) -> bool:
    """True if a node consists of characters and regular rules only."""
    parts = all_below(node)
    if any(isinstance(each, Token) for each in parts):
        return False
    return all(each.name in regular for each in parts if isinstance(each, Ref))


def emptiness(rules: Mapping[str, Node], terminals: Mapping[Node, bool]) -> Callable[[Node], bool]:
    """Tells whether a node of these rules matches the empty text. terminals: the same of those nodes whose parts do not count"""
    empty: set[str] = set()

    def is_empty(node: Node) -> bool:
        if node in terminals:
            return terminals[node]
        if isinstance(node, Ref):
            return node.name in empty
        if isinstance(node, Repeat):
            return node.least == 0 or is_empty(node.node)
        if isinstance(node, Concat):
            return all(map(is_empty, node.parts))
        return isinstance(node, Either) and any(map(is_empty, node.choices))

    n = -1
    while n < len(empty):
        n = len(empty)
        empty |= {name for name, node in rules.items() if is_empty(node)}
    return is_empty


def _solved(group: set[str], rules: Rules, regular: set[str]) -> Rules | None:
    bodies = {name: rules[name] for name in group}
    if not any(_names(node, group) for node in bodies.values()):
        return {} if all(is_regular(node, regular) for node in bodies.values()) else None
    if len(group) > MOST_TOGETHER:
        return None
    equations = {}
    for name, node in bodies.items():
        parts = _by_tail(node, group)
        if parts is None or not all(is_regular(each, regular) for each in parts.values()):
            return None
        equations[name] = parts
    return _without_unknowns(equations)


Parts = dict[str, Node]
"""A rule's alternatives, by the rule at their end; "": no rule."""


def _by_tail(node: Node, group: set[str]) -> Parts | None:
    """Alternatives by their last rule. None: a rule of the group stands elsewhere than at an end."""
    if isinstance(node, Ref) and node.name in group:
        return {node.name: Concat(())}
    if not _names(node, group):
        return {"": node}
    if isinstance(node, Either):
        return _parts_together([_by_tail(each, group) for each in node.choices])
    if isinstance(node, Repeat) and node.most == 1:
        none: list[Parts | None] = [{"": Concat(())}] if node.least == 0 else []
        return _parts_together([_by_tail(node.node, group), *none])
    if isinstance(node, Concat):
        before, last = node.parts[:-1], node.parts[-1]
        parts = None if any(_names(each, group) for each in before) else _by_tail(last, group)
        return parts and {name: Concat((*before, each)) for name, each in parts.items()}
    return None


def _parts_together(all_parts: list[Parts | None]) -> Parts | None:
    found: dict[str, list[Node]] = {}
    for parts in all_parts:
        if parts is None:
            return None
        for name, node in parts.items():
            found.setdefault(name, []).append(node)
    return {name: n[0] if len(n) == 1 else Either(tuple(n)) for name, n in found.items()}


def _names(node: Node, group: set[str]) -> bool:
    return not group.isdisjoint(_references(node))


def _without_unknowns(equations: dict[str, Parts]) -> Rules | None:
    """Solve the equations by elimination. None if a rule never ends."""
    done: list[str] = []
    for name in sorted(equations):
        for before in done:
            _put_in(equations[name], before, equations[before])
        again = equations[name].pop(name, None)
        if again is not None:
            loop = Repeat(again, 0, None)
            equations[name] = {to: Concat((loop, each)) for to, each in equations[name].items()}
        done.append(name)
    for i, name in reversed(list(enumerate(done))):
        for before in done[:i]:
            _put_in(equations[before], name, equations[name])
    if not all("" in parts for parts in equations.values()):
        return None
    return {name: parts[""] for name, parts in equations.items()}


def _put_in(parts: Parts, name: str, what: Parts) -> None:
    before = parts.pop(name, None)
    if before is not None:
        for to, each in what.items():
            node = Concat((before, each))
            parts[to] = Either((parts[to], node)) if to in parts else node


def _references(node: Node) -> list[str]:
    return [each.name for each in all_below(node) if isinstance(each, Ref)]


def _groups(rules: Mapping[str, Node]) -> Iterator[set[str]]:
    """Groups of mutually recursive rules, referenced groups first (Tarjan's algorithm, without recursion)."""
    names = {name: _references(node) for name, node in rules.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    kept: set[str] = set()
    for top in rules:
        todo: list[tuple[str, Iterator[str]]] = []
        if top not in number:
            todo.append((top, iter(names[top])))
        while todo:
            name, left = todo[-1]
            if name not in number:
                number[name] = low[name] = len(number)
                stack.append(name)
                kept.add(name)
            for other in left:
                if other not in number:
                    todo.append((other, iter(names[other])))
                    break
                if other in kept:
                    low[name] = min(low[name], number[other])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[name])
                if low[name] == number[name]:
                    group = set(stack[stack.index(name) :])
                    del stack[len(stack) - len(group) :]
                    kept -= group
                    yield group


# -- terminals that compete for the same characters ------------------------------------------------------------------
# Finds terminals of a lexer that compete for the same characters, so that the longest match may be wrong.
#
# llguidance reads text in two steps, as most parsers do: a lexer takes the longest possible terminal, and a parser reads terminals. GBNF
# has none: a rule may end at any character where the next one can begin. So a node can be a terminal only if no shorter one can end inside
# it with the same next byte. Otherwise it is opened into smaller terminals, down to single characters.

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
        known = {node: found is not None and found.can_be_empty for node, found in terminals.items()}
        self._is_empty = emptiness(rules, known)
        self._first: dict[str, frozenset[Node]] = dict.fromkeys(rules, frozenset())
        self._settle()

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
            if not self._is_empty(part):
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
                follow = first | follow if self._is_empty(part) else first

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


MOST_LOOKS = 60  # analyses of a grammar; each opens the terminals that meet
IdOf = Callable[[str], int | None]
Terminals = dict[Node, Automaton | None]
"""Nodes that are terminals of the lexer; None for a token, which has no text."""


def lark_of(source: str, id_of: IdOf = lambda text: None, ends: Sequence[int] = ()) -> str:
    """The grammar in lark. Raises BadGBNF.

    id_of  gives the token with a text; None: llguidance may know it
    ends   tokens that end a generation; "any other token" excludes them
    """
    rules, regular = without_tails(parse(source))
    if "root" in regular:
        terminals: set[Node] = {rules["root"]}
    else:
        others = {name: node for name, node in rules.items() if name not in regular}
        grouped = {name: _grouped(node, regular) for name, node in others.items()}
        rules = rules | grouped
        terminals = _terminals(rules, regular)
    return _Writer(rules, terminals, id_of, ends).text()


def _grouped(node: Node, regular: frozenset[str]) -> Node:
    """The same node, with neighbouring regular parts or choices joined into one."""
    if isinstance(node, Concat):
        return Concat(_joined(node.parts, regular, Concat))
    if isinstance(node, Either):
        choices = sorted(node.choices, key=lambda each: is_regular(each, regular))
        return Either(_joined(choices, regular, Either))
    if isinstance(node, Repeat):
        return Repeat(_grouped(node.node, regular), node.least, node.most)
    return node


def _joined(
    nodes: Sequence[Node], regular: frozenset[str], kind: type[Concat | Either]
) -> tuple[Node, ...]:
    found: list[Node] = []
    for is_one, group in groupby(nodes, lambda each: is_regular(each, regular)):
        each = tuple(group)
        if is_one:
            found.append(each[0] if len(each) == 1 else kind(each))
        else:
            found += [_grouped(e, regular) for e in each]
    return tuple(found)


def _terminals(rules: Rules, regular: frozenset[str]) -> set[Node]:
    """The largest terminals that do not meet. Single characters never meet."""
    opened: set[Node] = set()
    automata: dict[Node, Automaton] = {}
    pairs = TerminalPairs()
    for _ in range(MOST_LOOKS):
        used, terminals = _cut(rules, regular, opened, automata)
        try:
            met = Meetings(used, terminals).found("root", pairs)
        except TooLarge:
            break
        if not met:
            return set(terminals)
        opened |= met
    nodes = (each for node in rules.values() for each in all_below(node))
    opened = {each for each in nodes if not isinstance(each, Chars)}
    return set(_cut(rules, regular, opened, automata)[1])


def _cut(
    rules: Rules, regular: frozenset[str], opened: set[Node], automata: dict[Node, Automaton]
) -> tuple[Rules, Terminals]:
    """The rules in use, and the terminals in them."""
    used: Rules = {"root": rules["root"]}
    terminals: Terminals = {}
    todo = [rules["root"]]
    while todo:
        node = todo.pop()
        if isinstance(node, Token):
            terminals[node] = None
        elif node not in opened and not is_nothing(node) and is_regular(node, regular):
            try:
                if node not in automata:
                    automata[node] = automaton_of(node, rules)
                terminals[node] = automata[node]
            except TooLarge:
                opened.add(node)
                todo.append(node)
        elif isinstance(node, Ref):
            if node.name not in used:
                used[node.name] = rules[node.name]
                todo.append(rules[node.name])
        else:
            todo += below(node)
    return used, terminals


class _Writer:
    """Writes the rules under new names, because lark distinguishes terminals and rules by case."""

    def __init__(self, rules: Rules, terminals: set[Node], id_of: IdOf, ends: Sequence[int]) -> None:
        self._rules, self._terminals, self._id_of, self._ends = rules, terminals, id_of, ends
        self._empty = set(filter(emptiness(rules, {}), terminals))
        self._names: dict[Node | tuple[str, bool], str] = {}
        self._todo: list[tuple[str, Node, bool]] = []

    def text(self) -> str:
        """The grammar."""
        lines = ["%llguidance {}", f"start: {self._rule('root', False)}"]
        while self._todo:
            name, node, in_terminal = self._todo.pop()
            text = self._expression(node, in_terminal)
            lines.append(f"{name}: {text}" + _NOT_EMPTY * (name[0] == "T" and node in self._empty))
        return "\n".join(lines) + "\n"

    def _rule(self, name: str, in_terminal: bool) -> str:
        letter = "R" if in_terminal else "r"
        return self._named((name, in_terminal), letter, self._rules[name], in_terminal)

    def _named(self, key: Node | tuple[str, bool], letter: str, node: Node, in_terminal: bool) -> str:
        """A node's name. Its rule is written later."""
        if key not in self._names:
            self._names[key] = f"{letter}{len(self._names)}"
            self._todo.append((self._names[key], node, in_terminal))
        return self._names[key]

    def _expression(self, node: Node, in_terminal: bool) -> str:
        if isinstance(node, Token):
            return self._token(node)
        if not in_terminal and node in self._terminals:
            name = self._named(node, "T", node, True)
            return f"({name})?" if node in self._empty else name
        if isinstance(node, Chars):
            return f"/{_one_of(node)}/"
        if isinstance(node, Ref):
            return self._rule(node.name, in_terminal)
        if isinstance(node, Either):
            choices = [self._expression(each, in_terminal) for each in node.choices]
            return "(" + " | ".join(choices) + ")"
        if isinstance(node, Repeat):
            return self._repeat(node, in_terminal)
        return self._concat(node, in_terminal)

    def _concat(self, node: Concat, in_terminal: bool) -> str:
        found = []
        for kind, group in groupby(node.parts, type):
            if in_terminal and kind is Chars:
                found.append("/" + "".join(_one_of(c) for c in group if isinstance(c, Chars)) + "/")
            else:
                found += [self._expression(each, in_terminal) for each in group]
        return "(" + " ".join(found) + ")" if len(found) > 1 else found[0] if found else '""'

    def _repeat(self, node: Repeat, in_terminal: bool) -> str:
        if node.most == 0:
            return '""'
        each = self._expression(node.node, in_terminal)
        if (sign := _SIGNS.get((node.least, node.most))) is not None:
            return f"({each}){sign}"
        if node.most is None:
            return f"(({each}){{{node.least}}} ({each})*)"
        return f"({each}){{{node.least},{node.most}}}"

    def _token(self, node: Token) -> str:
        token = node.key if isinstance(node.key, int) else self._id_of(node.key)
        if token is None and not node.is_other and _SPECIAL.fullmatch(str(node.key)):
            # llguidance knows control tokens by name, and reports an unknown one
            return str(node.key)
        if token is None:
            raise BadGBNF(f"it names the token {node.key}, which is not in the vocabulary")
        if not node.is_other:
            return f"<[{token}]>"
        excluded = ",".join(map(str, sorted({token, *self._ends})))
        return f"<[^{excluded}]>"


_NOT_EMPTY = " & /(?s:.+)/"
"""A terminal of llguidance is not empty, so a node that can be empty is written as (terminal)?."""
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?"}
_SPECIAL = re.compile(r"<[A-Za-z0-9_|/-]+>")


def _one_of(node: Chars) -> str:
    """The characters in a regular expression."""
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return _code(node.ranges[0][0])
    ranges = (_code(low) + (f"-{_code(high)}" if high > low else "") for low, high in node.ranges)
    return f"[{''.join(ranges)}]"


def _code(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 0x80 else f"\\x{{{code:x}}}"
