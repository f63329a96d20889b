"""A call as one JSON object, {"name": ..., "arguments": {...}}, which several dialects use between their own marks."""

from __future__ import annotations

import json
from collections.abc import Callable

from pyspec.text.markup.json_text import NotJson, as_json, read_string, read_value, take
from pyspec.text.markup.reader import HELD_CHARS, NO_LIMIT, AnswerReader, Steps

ARGUMENTS = ("arguments", "parameters")


class _Call:
    """A call while its object is read. Nothing is emitted before its name is known.

    held   the object's text so far, in case it is not a call
    """

    def __init__(self, reader: AnswerReader, is_tool: Callable[[str], bool]) -> None:
        self.reader, self.is_tool = reader, is_tool
        self.held: list[str] = []
        self.has_begun = False
        self.arguments: str | None = None  # arguments that precede the name

    def hold(self, text: str) -> None:
        if not self.has_begun:
            self.held.append(text)

    def begin(self, name: object) -> None:
        if self.has_begun:
            return
        if not isinstance(name, str) or not name or not self.is_tool(name):
            raise NotJson
        self.has_begun, self.reader.room = True, NO_LIMIT
        self.held.clear()
        self.reader.begin_call(name)
        if self.arguments is not None:
            self.reader.arguments(self.arguments)


def read_call(
    reader: AnswerReader, is_tool: Callable[[str], bool] = lambda name: True
) -> Steps[str | None]:
    """Read the next object as a call. Returns None if it was emitted, or its text if it is not a call.

    Raises NotJson if it is malformed behind its name.
    """
    call, reader.room = _Call(reader, is_tool), HELD_CHARS
    try:
        yield from _object(call)
    except NotJson:
        if call.has_begun:
            raise
    finally:
        reader.room = NO_LIMIT
    return None if call.has_begun else "".join(call.held)


def _object(call: _Call) -> Steps[None]:
    reader = call.reader
    yield from take(reader, "{")
    call.hold("{")
    has_arguments = False
    while True:
        call.hold((yield from reader.take_spaces()))
        key = yield from _string(call)
        call.hold((yield from reader.take_spaces()))
        yield from take(reader, ":")
        call.hold(":")
        call.hold((yield from reader.take_spaces()))
        if key in ARGUMENTS and not has_arguments:
            has_arguments = True
            yield from _arguments(call)
        elif key == "name":
            call.begin((yield from _string(call)))
        else:
            yield from read_value(reader, call.hold)
        call.hold((yield from reader.take_spaces()))
        if (yield from reader.peek()) == "}":
            reader.skip(1)
            call.hold("}")
            break
        yield from take(reader, ",")
        call.hold(",")
    if call.has_begun and not has_arguments:
        reader.arguments("{}")


def _string(call: _Call) -> Steps[str]:
    text: list[str] = []

    def emit(piece: str) -> None:
        text.append(piece)
        call.hold(piece)

    yield from read_string(call.reader, emit)
    return str(json.loads("".join(text)))


def _arguments(call: _Call) -> Steps[None]:
    """The arguments: an object, null instead of an empty one, or a string that contains the object."""
    reader = call.reader
    if (yield from reader.peek()) == "{" and call.has_begun:
        yield from read_value(reader, reader.arguments)
        return
    taken: list[str] = []

    def emit(piece: str) -> None:
        taken.append(piece)
        call.hold(piece)

    yield from read_value(reader, emit)
    call.arguments = _as_object("".join(taken))
    if call.has_begun:
        reader.arguments(call.arguments)


def _as_object(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, str):
        return "{}" if value is None else text
    inner = as_json(value)
    return inner if inner is not None and inner.startswith("{") else json.dumps({"value": value})
