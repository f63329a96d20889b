"""Translates GBNF to llguidance's lark with llama.cpp's meaning: a text matches if any derivation gives it.

A regular part becomes one terminal of the lexer, which follows all alternatives at once and costs next to nothing. Other parts become
rules of terminals, no two of which compete for the same characters (gbnf_meet).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby

from pyspec.constrain.gbnf import BadGBNF, parse
from pyspec.constrain.gbnf_meet import Meetings, TerminalPairs
from pyspec.constrain.gbnf_regular import can_be_empty, is_regular, without_tails
from pyspec.text.automaton import Automaton, TooLarge, automaton_of
from pyspec.text.expressions import (
    Chars,
    Concat,
    Either,
    Node,
    Ref,
    Repeat,
    Rules,
    Token,
    all_below,
    below,
    is_nothing,
)

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
        self._empty = can_be_empty(rules, terminals)
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
