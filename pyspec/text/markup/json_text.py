"""Reads one JSON value while it arrives, passes it on, and repairs mistakes that models often make.

Line ends, other control characters and stray backslashes in strings are escaped. Python's syntax becomes JSON: True, None, single
quotes, tuples, a comma behind the last item, numbers such as .5. If the model meant JSON, the output is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pyspec.text.markup.ahead import AHEAD, GAP, WORD, Found, Lookahead, LookaheadTree, Names, Step
from pyspec.text.markup.reader import AnswerReader, Emit, Steps

DEPTH = 64  # of nested lists and objects
WORD_CHARS = 512  # of a number

_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}


def _inside(quote: str, *, has_names: bool) -> LookaheadTree:
    """What stands behind a quote inside a string only: models forget to escape them. has_names: bare names may follow a comma."""
    mark, word = (quote,), (GAP, WORD)
    behind: tuple[Lookahead, ...] = (word, (mark,), (GAP, tuple("/\\|&$%!?+*;")))
    words: tuple[Lookahead, ...] = () if has_names else (word, (*word, *word))
    behind += tuple((GAP, (",",), *each, GAP, mark) for each in words)
    return LookaheadTree((mark, *each) for each in behind)


_INSIDE = {(quote, has): _inside(quote, has_names=has) for quote in _PLAIN for has in (False, True)}
_WORD = re.compile(r"[-+._0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>0|[1-9][0-9]*(?:_[0-9]+)*)?"
    r"(?:\.(?P<part>[0-9]*))?(?P<power>[eE][-+]?[0-9]+)?"
)
_BARE, _BARE_IN_ROUND = re.compile(r"[^,\[\]{}<\n]+"), re.compile(r"[^,\[\]{}()<\n]+")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_HEX = frozenset("0123456789abcdefABCDEF")


Open = list[tuple[str, str]]
"""Brackets that close the open lists and objects: as they are written, and in JSON."""
See = Callable[..., Steps[Found | None]]


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


@dataclass(frozen=True, slots=True)
class Style:
    """Values in another form than JSON's and Python's.

    names   keys of the outermost object that are known; they may be bare
    colons  what stands behind them
    quote   a mark around texts, which have no escapes then; with it keys and texts may be bare at any depth
    """

    names: Names
    colons: Step
    quote: str = ""


def read_value(reader: AnswerReader, emit: Emit) -> Steps[None]:
    """Read one value, without spaces before it. Raises NotJson, also if the answer ends inside the value.

    At one of the reader's `ends`, and at the end of an answer that has such, the open brackets are closed.
    """
    yield from _values(reader, emit, [], None)


def read_members(reader: AnswerReader, emit: Emit, style: Style) -> Steps[None]:
    """The same for an object in curly or round brackets."""
    end = _CLOSING[(yield from reader.take_mark("{", "("))]
    emit("{")
    yield from _values(reader, emit, [(end, "}")], style)


def _values(reader: AnswerReader, emit: Emit, open_: Open, style: Style | None) -> Steps[None]:
    is_inside = bool(open_)  # directly behind an opening bracket
    while True:
        if not is_inside:
            yield from reader.drop_spaces()
            char = yield from _need(reader)
            if char in _CLOSING:
                if len(open_) == DEPTH:
                    raise NotJson
                reader.skip(1)
                emit("{" if char == "{" else "[")
                open_.append((_CLOSING[char], "}" if char == "{" else "]"))
                is_inside = True
            else:
                yield from _scalar(reader, emit, open_, style)
        if is_inside:
            is_inside = False
            if not (yield from _is_closing(reader, open_, style)):
                if open_[-1][1] == "}":
                    yield from _key(reader, emit, open_, style, "")
                continue
        if not (yield from _behind_value(reader, emit, open_, style)):
            return


def _is_closing(reader: AnswerReader, open_: Open, style: Style | None) -> Steps[bool]:
    """True if the last bracket closes here, behind spaces."""
    if (yield from _named(reader, open_, style, reader.sees)):
        return False
    yield from reader.drop_spaces()
    is_end = bool(reader.ends) and bool((yield from reader.look(*reader.ends)))
    return is_end or (yield from _need(reader)) == open_[-1][0]


def _named(reader: AnswerReader, open_: Open, style: Style | None, see: See) -> Steps[Found | None]:
    """A known key and its colon, if they are next; names may begin with a space."""
    if style is None or len(open_) > 1:
        return None
    return (yield from see((style.names, style.colons), ((" ",), style.names, style.colons)))


def _scalar(reader: AnswerReader, emit: Emit, open_: Open, style: Style | None) -> Steps[None]:
    """Read a text, a number or a word."""
    quote, char = style.quote if style else "", (yield from reader.peek())
    if quote and (yield from reader.take_mark(quote)):
        yield from reader.take(((quote,), AHEAD, WORD))  # it is there twice
        ends = [bracket + mark for bracket in _CLOSING.values() for mark in reader.ends]
        emit('"')
        marks = (quote, *(() if reader.is_constrained else ends))
        if not (yield from reader.find(marks, lambda text: emit(_escaped(text)))):
            raise NotJson
        while (yield from reader.take_mark(quote)):
            pass
        emit('"')
    elif char in _PLAIN:
        yield from read_string(reader, emit, has_names=bool(style and not quote))
    elif quote:
        word, pattern = "", _BARE_IN_ROUND if open_[-1][0] == ")" else _BARE
        while more := (yield from reader.take_while(pattern, WORD_CHARS - len(word))):
            word += more
        if not word or not (yield from reader.peek()):
            emit(word)
            raise NotJson
        emit(as_json(word) or json.dumps(word.strip(), ensure_ascii=False))
        yield from reader.take_mark(quote)  # the first one is missing
    else:
        yield from _word(reader, emit)
        if open_ and not (yield from reader.peek()):
            raise NotJson  # perhaps more of it was to come


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(reader: AnswerReader, emit: Emit, *, has_names: bool = False) -> Steps[None]:
    """Read a string with its quotes, single or double. has_names: a bare name may follow a comma behind it."""
    quote = yield from reader.peek()
    if quote not in _PLAIN:
        raise NotJson
    reader.skip(1)
    emit('"')
    inside = _INSIDE[quote, has_names]
    while True:
        char = yield from _need(reader)
        if char == quote and (reader.is_constrained or not (yield from reader.sees(inside))):
            break
        if char == "\\":
            reader.skip(1)
            yield from _escape(reader, emit)
        elif char < " " or char in _PLAIN:
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
        yield from reader.take_mark("null", "None")
    if fence:
        yield from reader.take_spaces()
        yield from reader.take_mark("```")


def as_object(text: str) -> str:
    """Arguments as an object: null, an empty list or an empty string is an empty one, and a string contains the object, or is its only value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if value in (None, [], ""):
        return "{}"
    if not isinstance(value, str):
        return text
    inner = as_json(value)
    return inner if inner is not None and inner.startswith("{") else json.dumps({"value": value})


def take(reader: AnswerReader, char: str) -> Steps[None]:
    """Skip `char`, or raise NotJson."""
    if (yield from reader.peek()) != char:
        raise NotJson
    reader.skip(1)


def _escape(reader: AnswerReader, emit: Emit) -> Steps[None]:
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
    if word.lower() in _WORDS or word in _NOT_FINITE:
        return _WORDS.get(word.lower(), "null")
    if _NUMBER.fullmatch(word):
        return word
    match = _PYTHON_NUMBER.fullmatch(word)
    if match is None or not (match["whole"] or match["part"]):
        return None
    part = f".{match['part']}" if match["part"] else ".0" if match["part"] is not None else ""
    sign = "-" if match["sign"] == "-" else ""
    return f"{sign}{(match['whole'] or '0').replace('_', '')}{part}{match['power'] or ''}"


def _behind_value(reader: AnswerReader, emit: Emit, open_: Open, style: Style | None) -> Steps[bool]:
    """Read closing brackets and a comma. Returns whether another value follows."""
    while open_:
        yield from reader.drop_spaces()
        if reader.ends and (yield from reader.look(*reader.ends)) is not None:
            emit("".join(bracket for _, bracket in reversed(open_)))
            return False
        char = yield from _need(reader)
        if char == open_[-1][0]:
            reader.skip(1)
            emit(open_.pop()[1])
        elif char == ",":
            reader.skip(1)
            if (yield from _is_closing(reader, open_, style)):
                continue  # the last comma has no value behind it
            if open_[-1][1] == "}":
                yield from _key(reader, emit, open_, style, ", ")
            else:
                emit(", ")
            return True
        else:
            raise NotJson
    return False


def _key(reader: AnswerReader, emit: Emit, open_: Open, style: Style | None, comma: str) -> Steps[None]:
    """Read a key and its colon, and pass them on behind `comma`."""
    if style is None or (len(open_) > 1 and not style.quote):
        yield from reader.drop_spaces()
        emit(comma)
        yield from read_string(reader, emit)
        yield from reader.drop_spaces()
        yield from take(reader, ":")
        emit(": ")
        return
    if found := (yield from _named(reader, open_, style, reader.take)):
        name = found.name
    elif style.quote and (quote := (yield from reader.take_mark(style.quote, '"', "'"))):
        name, end = yield from reader.take_until(quote, most=WORD_CHARS)
        yield from reader.drop_spaces()
        if not end or not (yield from reader.take_mark(*style.colons)):
            raise NotJson
    else:
        taken: list[str] = []
        mark = yield from reader.find((*style.colons, "\n", *reader.ends), taken.append)
        name = "".join(taken)
        if mark not in style.colons:
            emit(name)
            raise NotJson
        yield from reader.take_mark(mark)
        name = name.strip()
        name = bare if (bare := name.strip("\"'")) in style.names else name
    emit(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")


def _need(reader: AnswerReader) -> Steps[str]:
    """The next character, not consumed; NotJson at the answer's end."""
    char = yield from reader.peek()
    if not char:
        raise NotJson
    return char
