"""JSON as it comes: one value, passed on while it is read, and mended where models often fail.

Line ends and other control characters in strings are escaped, and so are backslashes that escape nothing: what is passed on is JSON
if the model meant it to be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pyspec.text.markup.reader import AnswerReader, Steps

DEPTH = 64  # of lists and objects
WORD_CHARS = 512  # of a number

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")


class NotJson(Exception):
    """What came next is no JSON. What was taken was passed on."""


def read_value(reader: AnswerReader, give: Callable[[str], None]) -> Steps[None]:
    """One value, without the spaces before it. Raises NotJson, also where the answer ends before the value does."""
    open_: list[str] = []  # what closes the lists and objects that are open
    while True:
        yield from reader.drop_spaces()
        char = yield from _need(reader)
        if char in "{[":
            if len(open_) == DEPTH:
                raise NotJson
            reader.skip(1)
            give(char)
            open_.append("}" if char == "{" else "]")
            yield from reader.drop_spaces()
            if (yield from _need(reader)) != open_[-1]:
                if char == "{":
                    yield from _key(reader, give)
                continue
        elif char == '"':
            yield from read_string(reader, give)
        else:
            yield from _word(reader, give)
        if not (yield from _behind_value(reader, give, open_)):
            return


def read_string(reader: AnswerReader, give: Callable[[str], None]) -> Steps[None]:
    """A string with its quotes."""
    yield from take(reader, '"')
    give('"')
    while (char := (yield from _need(reader))) != '"':
        if char == "\\":
            reader.skip(1)
            yield from _escape(reader, give)
        elif char < " ":
            reader.skip(1)
            give(json.dumps(char)[1:-1])
        else:
            give((yield from reader.take_while(_PLAIN)))
    reader.skip(1)
    give('"')


def take(reader: AnswerReader, char: str) -> Steps[None]:
    """Pass over `char`, or raise NotJson."""
    if (yield from reader.peek()) != char:
        raise NotJson
    reader.skip(1)


def _escape(reader: AnswerReader, give: Callable[[str], None]) -> Steps[None]:
    kind = yield from _need(reader)
    if kind != "u":
        if kind in '"\\/bfnrt':
            reader.skip(1)
            give("\\" + kind)
        else:
            give("\\\\")  # it escapes nothing
        return
    reader.skip(1)
    digits = ""
    while len(digits) < 4 and (char := (yield from _need(reader))) in _HEX:
        digits += char
        reader.skip(1)
    give(("\\u" if len(digits) == 4 else "\\\\u") + digits)


def _word(reader: AnswerReader, give: Callable[[str], None]) -> Steps[None]:
    """A number, true, false or null: at most WORD_CHARS long. What is none of them is passed on, too."""
    word = ""
    while more := (yield from reader.take_while(_WORD, WORD_CHARS - len(word))):
        word += more
    give(word)
    if not _LITERAL.fullmatch(word):
        raise NotJson


def _behind_value(reader: AnswerReader, give: Callable[[str], None], open_: list[str]) -> Steps[bool]:
    """Close what closes here; whether another value follows."""
    while open_:
        yield from reader.drop_spaces()
        char = yield from _need(reader)
        if char == open_[-1]:
            reader.skip(1)
            give(open_.pop())
        elif char == ",":
            reader.skip(1)
            give(", ")
            if open_[-1] == "}":
                yield from _key(reader, give)
            return True
        else:
            raise NotJson
    return False


def _key(reader: AnswerReader, give: Callable[[str], None]) -> Steps[None]:
    yield from reader.drop_spaces()
    yield from read_string(reader, give)
    yield from reader.drop_spaces()
    yield from take(reader, ":")
    give(": ")


def _need(reader: AnswerReader) -> Steps[str]:
    """The next character, which stays; NotJson at the answer's end."""
    char = yield from reader.peek()
    if not char:
        raise NotJson
    return char
