"""Finds the regular rules of a GBNF grammar, which one expression can replace: rules without recursion, and rules with recursion at their
end only (`ws ::= [ \\t] ws | ""`), which is solved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pyspec.text.expressions import Concat, Either, Node, Ref, Repeat, Rules, Token, all_below

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


def can_be_empty(rules: Rules, nodes: Iterable[Node]) -> set[Node]:
    """The nodes that match the empty text."""
    empty: set[str] = set()
    n = -1
    while n < len(empty):
        n = len(empty)
        empty |= {name for name, node in rules.items() if _is_empty(node, empty)}
    return {node for node in nodes if _is_empty(node, empty)}


def _is_empty(node: Node, empty: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in empty
    if isinstance(node, Repeat):
        return node.least == 0 or _is_empty(node.node, empty)
    if isinstance(node, Concat):
        return all(_is_empty(each, empty) for each in node.parts)
    return isinstance(node, Either) and any(_is_empty(each, empty) for each in node.choices)


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
        return _joined([_by_tail(each, group) for each in node.choices])
    if isinstance(node, Repeat) and node.most == 1:
        none: list[Parts | None] = [{"": Concat(())}] if node.least == 0 else []
        return _joined([_by_tail(node.node, group), *none])
    if isinstance(node, Concat):
        before, last = node.parts[:-1], node.parts[-1]
        parts = None if any(_names(each, group) for each in before) else _by_tail(last, group)
        return parts and {name: Concat((*before, each)) for name, each in parts.items()}
    return None


def _joined(all_parts: list[Parts | None]) -> Parts | None:
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
