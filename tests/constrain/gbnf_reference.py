"""A plain recogniser of GBNF: it follows all derivations at once, character by character, as llama.cpp does. Slow and simple.

It reads the result of `pyspec.constrain.gbnf`; tests/constrain/test_gbnf.py tests that parser itself.
"""

from __future__ import annotations

import random

from pyspec.constrain.gbnf import parse
from pyspec.text.expressions import Chars, Concat, Either, Ref, Repeat, Rules

Way = tuple[object, ...]
"""Remaining nodes, the next first; (node, least, most) is a repetition."""


MOST_WAYS = 3000


class TooMany(Exception):
    """The grammar is too ambiguous for this recogniser."""


def takes(source: str, text: str) -> bool:
    """True if the grammar matches all of a text. Raises TooMany."""
    rules = parse(source)
    ways = _ready([(Ref("root"),)], rules)
    for char in text:
        ways = _ready([way[1:] for way in ways if way and _has(way[0], char)], rules)
    return () in ways


def _has(node: object, char: str) -> bool:
    assert isinstance(node, Chars)
    return any(low <= ord(char) <= high for low, high in node.ranges)


def _ready(ways: list[Way], rules: Rules) -> set[Way]:
    """The derivations that begin with a character, or are complete."""
    found: set[Way] = set()
    seen: set[Way] = set()
    todo = list(ways)
    while todo:
        way = todo.pop()
        if way in seen:
            continue
        seen.add(way)
        if len(seen) > MOST_WAYS:
            raise TooMany
        if not way or isinstance(way[0], Chars):
            found.add(way)
        else:
            todo += [(*begin, *way[1:]) for begin in _opened(way[0], rules)]
    return found


def _opened(node: object, rules: Rules) -> list[Way]:
    if isinstance(node, Ref):
        return [(rules[node.name],)]
    if isinstance(node, Either):
        return [(each,) for each in node.choices]
    if isinstance(node, Concat):
        return [node.parts]
    if isinstance(node, Repeat):
        return _opened((node.node, node.least, node.most), rules)
    assert isinstance(node, tuple)
    inner, least, most = node
    if most == 0:
        return [()]
    rest = (inner, max(0, least - 1), None if most is None else most - 1)
    return [(inner, rest), *([()] if least == 0 else [])]


def grammar(rng: random.Random) -> str:
    """A small grammar over few characters, so that its rules meet; no rule is left-recursive."""
    names = ["root", *rng.sample(["a", "A", "b-c", "B-C", "start", "R1", "item"], rng.randint(0, 4))]
    return "\n".join(f"{name} ::= {_either(rng, names, i, 3)}" for i, name in enumerate(names))


def _either(rng: random.Random, names: list[str], own: int, depth: int) -> str:
    return " | ".join(_row(rng, names, own, depth) for _ in range(rng.choice([1, 1, 2, 3])))


def _row(rng: random.Random, names: list[str], own: int, depth: int) -> str:
    parts = []
    for i in range(rng.choice([1, 2, 2, 3])):
        kinds = ["text", "text", "class"] + ["group"] * (depth > 0) + ["rule"] * 2
        kind = rng.choice(kinds)
        if kind == "text":
            part = '"' + "".join(rng.choice("abcé") for _ in range(rng.randint(1, 3))) + '"'
        elif kind == "class":
            part = rng.choice(["[a-b]", "[^b]", "[bc]", ".", "[\\x61é]", "[^a-c]", "[è-ê]"])
        elif kind == "group":
            part = f"({_either(rng, names, own, depth - 1)})"
        else:  # behind a character any rule, else one further down
            may = (
                names if i and parts[-1][0] in '"[.' and parts[-1][-1] not in "*?}" else names[own + 1 :]
            )
            part = rng.choice(may) if may else '"a"'
        parts.append(part + rng.choice(["", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"]))
    return " ".join(parts)


def text(rng: random.Random, source: str) -> str:
    """A text of a random derivation, which matches in most cases."""
    rules = parse(source)
    said = ""
    way: Way = (Ref("root"),)
    for _ in range(300):
        if not way:
            break
        if isinstance(way[0], Chars):
            low, high = rng.choice(way[0].ranges)
            said += rng.choice([c for c in "abcdéèê" if low <= ord(c) <= high] or ["z"])
            way = way[1:]
        else:
            begins = _opened(way[0], rules)
            way = (*(min(begins, key=len) if len(said) > 12 else rng.choice(begins)), *way[1:])
    if rng.random() < 0.4 and said:
        at = rng.randrange(len(said))
        said = said[:at] + rng.choice(["", "a", "b", "é"]) + said[at + 1 :]
    return said[:30]
