"""Reads one JSON value while it arrives, passes it on, and repairs mistakes that models often make.

Line ends, other control characters and stray backslashes in strings are escaped. Python's syntax becomes JSON: True, None, single
quotes, tuples, a comma behind the last item, numbers such as .5. If the model meant JSON, the output is JSON.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

from pyspec.text.markup.reader import AnswerReader, Emit, Steps

DEPTH = 64  # of nested lists and objects
WORD_CHARS = 512  # of a number

_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_WORD = re.compile(r"[-+._0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>0|[1-9][0-9]*(?:_[0-9]+)*)?"
    r"(?:\.(?P<part>[0-9]*))?(?P<power>[eE][-+]?[0-9]+)?"
)
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


class NotJson(Exception):
    """The next text is not JSON. The text read so far was passed on."""


def as_json(text: str) -> str | None:
    """A whole text as JSON, if it is JSON or Python's syntax for it."""
    reader, taken = AnswerReader(), list[str]()
    reader.push(text.strip())
    reader.is_over = True
    try:
        for _ in read_value(reader, taken.append):
            pass  # never waits, because all of the text is there
    except NotJson:
        return None
    return "".join(taken) if reader.is_read else None


def read_value(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Read one value, without spaces before it. Raises NotJson, also if the answer ends inside the value.

    At one of the reader's `ends`, and at the end of an answer that has such, the open brackets are closed.
    """
    open_: list[str] = []  # closing brackets of the open lists and objects
    while True:
        yield from reader.drop_spaces()
        char = yield from _need(reader)
        if char in _CLOSING:
            if len(open_) == DEPTH:
                raise NotJson
            reader.skip(1)
            emit(_begin(char))
            open_.append(_CLOSING[char])
            yield from reader.drop_spaces()
            if (yield from _need(reader)) != open_[-1]:
                if char == "{":
                    yield from _key(reader, emit)
                continue
        elif char in _PLAIN:
            yield from read_string(reader, emit)
        else:
            yield from _word(reader, emit)
            if open_ and not (yield from reader.peek()):
                raise NotJson  # perhaps more of it was to come
        if not (yield from _behind_value(reader, emit, open_)):
            return


def _begin(char: str) -> str:
    return "[" if char == "(" else char


def read_string(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Read a string with its quotes, single or double."""
    quote = yield from reader.peek()
    if quote not in _PLAIN:
        raise NotJson
    reader.skip(1)
    emit('"')
    while (char := (yield from _need(reader))) != quote:
        if char == "\\":
            reader.skip(1)
            yield from read_escape(reader, emit)
        elif char < " " or char == '"':
            reader.skip(1)
            emit(json.dumps(char)[1:-1])
        else:
            emit((yield from reader.take_while(_PLAIN[quote])))
    reader.skip(1)
    emit('"')


def read_arguments(reader: AnswerReader) -> Steps[None]:
    """Read a call's arguments: an object, or a text that contains it, perhaps in a fenced block. Without, the arguments are empty."""
    yield from reader.drop_spaces()
    if fence := (yield from reader.take_mark("```")):
        yield from reader.pass_line("{\n")
        yield from reader.drop_spaces()
    char = yield from reader.peek()
    if char == "{":
        with suppress(NotJson):  # the text read so far is emitted already
            yield from read_value(reader, reader.arguments)
    elif char == '"':
        taken: list[str] = []
        with suppress(NotJson):
            yield from read_string(reader, taken.append)
        reader.arguments(as_object("".join(taken)))
    else:
        reader.arguments("{}")
    if fence:
        yield from reader.take_spaces()
        yield from reader.take_mark("```")


def as_object(text: str) -> str:
    """Arguments as an object: null is an empty one, and a string contains the object, or is its only value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, str):
        return "{}" if value is None else text
    inner = as_json(value)
    return inner if inner is not None and inner.startswith("{") else json.dumps({"value": value})


def take(reader: AnswerReader, char: str) -> Steps[None]:
    """Skip `char`, or raise NotJson."""
    if (yield from reader.peek()) != char:
        raise NotJson
    reader.skip(1)


def read_escape(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Read what stands behind a backslash."""
    kind = yield from _need(reader)
    if kind != "u":
        if kind in '"\\/bfnrt':
            reader.skip(1)
            emit("\\" + kind)
        elif kind == "'":
            reader.skip(1)
            emit(kind)
        else:
            emit("\\\\")  # a backslash that escapes nothing
        return
    reader.skip(1)
    digits = ""
    while len(digits) < 4 and (char := (yield from _need(reader))) in _HEX:
        digits += char
        reader.skip(1)
    emit(("\\u" if len(digits) == 4 else "\\\\u") + digits)


def _word(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Read a number, true, false or null of at most WORD_CHARS. Another word is passed on, too, before NotJson."""
    word = ""
    while more := (yield from reader.take_while(_WORD, WORD_CHARS - len(word))):
        word += more
    mended = _mended(word)
    emit(word if mended is None else mended)
    if mended is None:
        raise NotJson


def _mended(word: str) -> str | None:
    """The word in JSON; None if it has no JSON form."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        return word
    match = _PYTHON_NUMBER.fullmatch(word)
    if match is None or not (match["whole"] or match["part"]):
        return None
    part = f".{match['part']}" if match["part"] else ".0" if match["part"] is not None else ""
    sign = "-" if match["sign"] == "-" else ""
    return f"{sign}{(match['whole'] or '0').replace('_', '')}{part}{match['power'] or ''}"


def _behind_value(reader: AnswerReader, emit: Emit, open_: list[str]) -> Steps[bool]:
    """Read closing brackets and a comma. Returns whether another value follows."""
    while open_:
        yield from reader.drop_spaces()
        if reader.ends and (yield from reader.look(*reader.ends)) is not None:
            emit("".join("}" if each == "}" else "]" for each in reversed(open_)))
            return False
        char = yield from _need(reader)
        if char == open_[-1]:
            reader.skip(1)
            open_.pop()
            emit("}" if char == "}" else "]")
        elif char == ",":
            reader.skip(1)
            yield from reader.drop_spaces()
            if (yield from _need(reader)) == open_[-1]:
                continue  # the last comma has no value behind it
            emit(", ")
            if open_[-1] == "}":
                yield from _key(reader, emit)
            return True
        else:
            raise NotJson
    return False


def _key(reader: AnswerReader, emit: Emit) -> Steps[None]:
    yield from reader.drop_spaces()
    yield from read_string(reader, emit)
    yield from reader.drop_spaces()
    yield from take(reader, ":")
    emit(": ")


def _need(reader: AnswerReader) -> Steps[str]:
    """The next character, not consumed; NotJson at the answer's end."""
    char = yield from reader.peek()
    if not char:
        raise NotJson
    return char
