"""Parser of GBNF, as in llama.cpp: rules of literals, classes, tokens, groups and repetitions.

It accepts three more forms, which have no other meaning: names with underscores, an alternative at the start of a line, and
left recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pyspec.ranges import printable
from pyspec.text.expressions import (
    LAST,
    SURROGATES,
    Chars,
    Concat,
    Either,
    Node,
    Ref,
    Repeat,
    Rules,
    Token,
    all_below,
    merged,
    others,
)

MOST_DEEP = 120  # nested brackets
MOST_REPEATS = 8  # consecutive repetition signs of one item
MOST_TIMES = 20_000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEXT_CHOICE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*(?=\|)")
_COUNT = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_TOKEN = re.compile(r"(!?)<(?:\[([0-9]{1,9})\]|([^>]*))>")
_HEX = {"x": 2, "u": 4, "U": 8}
_NAMED = {"t": "\t", "r": "\r", "n": "\n"} | {sign: sign for sign in "\\\"[]-^/'"}
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class BadGBNF(ValueError):
    """The text is not a grammar. The message names the place of the error."""


def parse(source: str) -> Rules:
    """The rules by name. There is a rule "root", and every reference is defined. Raises BadGBNF."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise BadGBNF("there is no rule root")
    for name, node in rules.items():
        for each in all_below(node):
            if isinstance(each, Ref) and each.name not in rules:
                raise BadGBNF(f"the rule {name} names {each.name}, which is not defined")
    return rules


class _Parser:
    """`at`: the next position."""

    def __init__(self, source: str) -> None:
        self.source, self.at, self.depth = source, 0, 0

    def rules(self) -> Rules:
        found: Rules = {}
        self._skip(_SPACE)
        while self.at < len(self.source):
            name = self._name()
            self._skip(_BLANK)
            self._want("::=")
            self._skip(_SPACE)
            found[name] = self._either()  # the last of two rules with one name counts
            if self.at < len(self.source) and self._here() not in "\r\n":
                raise self._flaw("a line's end")
            self._skip(_SPACE)
        return found

    def _either(self) -> Node:
        choices = [self._concat()]
        while self._goes_on():
            self.at += 1
            self._skip(_SPACE)
            choices.append(self._concat())
        return choices[0] if len(choices) == 1 else Either(tuple(choices))

    def _goes_on(self) -> bool:
        if found := _NEXT_CHOICE.match(self.source, self.at):
            self.at = found.end()
        return found is not None

    def _concat(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.source) and (part := self._part()) is not None:
            self._skip_between()
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _skip_between(self) -> None:
        self._skip(_SPACE if self.depth else _BLANK)

    def _part(self) -> Node | None:
        sign = self._here()
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if sign == "(":
            return self._group()
        if sign == ".":
            self.at += 1
            return Chars(others(()))
        if sign in "<!":
            return self._token()
        if _NAME.match(self.source, self.at):
            return Ref(self._name())
        if sign in "*+?{":
            raise self._flaw("something to repeat")
        return None

    def _repeated(self, node: Node) -> Node:
        for _ in range(MOST_REPEATS + 1):
            times = _SIGNS.get(self._here())
            if times is not None:
                self.at += 1
            elif self._here() == "{":
                times = self._count()
            else:
                return node
            self._skip_between()
            node = Repeat(node, *times)
        raise self._flaw(f"at most {MOST_REPEATS} repetitions of the same")

    def _count(self) -> tuple[int, int | None]:
        found = _COUNT.match(self.source, self.at)
        if found is None:
            raise self._flaw("{m}, {m,} or {m,n}")
        least = int(found[1][:9])
        most = int(found[3][:9]) if found[3] else None if found[2] else least
        if least > MOST_TIMES or (most is not None and not least <= most <= MOST_TIMES):
            raise self._flaw(f"up to {MOST_TIMES} repetitions, the larger number last")
        self.at = found.end()
        return least, most

    def _group(self) -> Node:
        self.depth += 1
        if self.depth > MOST_DEEP:
            raise self._flaw(f"at most {MOST_DEEP} brackets in each other")
        self.at += 1
        self._skip(_SPACE)
        node = self._either()
        self._skip(_SPACE)
        self.depth -= 1
        self._want(")")
        return node

    def _literal(self) -> Node:
        self.at += 1
        chars = tuple(Chars(((code, code),)) for code in self._codes('"'))
        return chars[0] if len(chars) == 1 else Concat(chars)

    def _class(self) -> Node:
        self.at += 1
        is_other = self._here() == "^"
        self.at += is_other
        found, codes = [], self._codes("]")
        for low in codes:
            high = low
            if self._here() == "-" and self.source[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = next(codes)
            if high < low:
                raise self._flaw(f"a range that ends behind U+{low:04X}")
            found.append((low, high))
        if not found:
            return Concat(())  # an empty class matches the empty text, as in llama.cpp
        ranges = others(merged(found)) if is_other else merged(found)
        if not ranges:
            raise self._flaw("a class with a character")
        return Chars(ranges)

    def _codes(self, end: str) -> Iterator[int]:
        """Code points up to `end`, which is consumed."""
        while self._here() != end:
            if self.at >= len(self.source):
                raise self._flaw(end)
            yield self._code()
        self.at += 1

    def _code(self) -> int:
        sign = self._here()
        self.at += 1
        if sign != "\\":
            return ord(sign)
        sign = self._here()
        self.at += 1
        if (size := _HEX.get(sign)) is None:
            if sign not in _NAMED:
                self.at -= 2
                raise self._flaw("an escape that GBNF has")
            return ord(_NAMED[sign])
        digits = self.source[self.at : self.at + size]
        if not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits):
            raise self._flaw(f"{size} hexadecimal digits")
        code = int(digits, 16)
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise BadGBNF(f"it names \\{sign}{digits}, which is not a character")
        self.at += size
        return code

    def _token(self) -> Node:
        found = _TOKEN.match(self.source, self.at)
        if found is None:
            raise self._flaw("<[id]> or <text> of a token")
        self.at = found.end()
        return Token(int(found[2]) if found[2] else f"<{found[3]}>", bool(found[1]))

    def _name(self) -> str:
        found = _NAME.match(self.source, self.at)
        if found is None:
            raise self._flaw("a name")
        self.at = found.end()
        return found[0]

    def _here(self) -> str:
        return self.source[self.at : self.at + 1]

    def _want(self, text: str) -> None:
        if not self.source.startswith(text, self.at):
            raise self._flaw(text)
        self.at += len(text)

    def _skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self.source, self.at)
        assert found is not None
        self.at = found.end()

    def _flaw(self, wanted: str) -> BadGBNF:
        line = self.source.count("\n", 0, self.at) + 1
        found = printable(self.source[self.at : self.at + 30].split("\n")[0], 30)
        return BadGBNF(
            f"line {line} has {found!r} where {wanted} is wanted"
            if found
            else f"line {line} ends where {wanted} is wanted"
        )
