"""GBNF as lark: llguidance's converter, with what it writes so that it can not be read, or reads narrower than llama.cpp, put right."""

from __future__ import annotations

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    resolve,
)


def lark_of(source: str) -> str:
    """A grammar's rules in lark's words. Raises whatever the converter raises for what is no grammar."""
    rules = GrammarParser().parse(source)
    resolve(rules)
    for rule in rules.values():
        for child in rule.children():
            _mend(child)
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    return "%llguidance {}\n\n" + "\n\n".join(map(str, ordered)) + "\n"


def _mend(top: ASTNode) -> None:
    todo = [top]
    while todo:
        node = todo.pop()
        if isinstance(node, RegexNode) and node.rx == ".":
            node.rx = r"(?s:.)"  # any character is also a line's end
        if isinstance(node, RepetitionNode):
            if node.max_times == 0:
                node.node, node.min_times, node.max_times = LiteralNode(""), 1, 1
            elif isinstance(node.node, RepetitionNode):  # written without brackets: ("a"+)? is not "a"+?
                todo.append(node.node)
                node.node = AlternativeNode([node.node])
                continue
        todo += node.children()
