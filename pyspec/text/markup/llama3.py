"""Llama 3: a call is an answer that is a JSON object with "name" and "parameters", bare or behind <|python_tag|>.

A bare object is a call only if it names an offered tool, because answers in JSON look alike.
"""

from __future__ import annotations

from pyspec.text.markup.ahead import GAP, Lookahead
from pyspec.text.markup.call_grammar import CallRules, Lark, Schema, named_object
from pyspec.text.markup.json_text import NotJson
from pyspec.text.markup.objects import read_call
from pyspec.text.markup.prose import Prose
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, Trimmed
from pyspec.text.schemas import closed

TAG = "<|python_tag|>"


def machine(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    content = Trimmed(reader.content, trims_start=trims_start)
    prose, may_be_bare = Prose(content), True
    reader.ends = (TAG,)
    while True:
        if may_be_bare:
            prose((yield from reader.take_spaces()))
        tag = yield from reader.take_mark(TAG)
        if tag and prose.quotes():
            prose(tag)
        elif tag or (may_be_bare and (yield from reader.peek()) == "{"):
            text = yield from _call(reader, tools, tag)
            if text is None:
                content.drop()
                prose.begin()
                yield from reader.take_spaces()
                yield from reader.take_mark(";")  # a separator between calls
                continue
            prose(text)
        may_be_bare = False
        if not (yield from reader.find((TAG,), prose)):
            break
    content.flush()


def _call(reader: AnswerReader, tools: Tools, tag: str) -> Steps[str | None]:
    """Read one call. Returns None if it was emitted, or its text if it is not a call."""
    spaces = yield from reader.take_spaces()
    try:
        text = yield from read_call(reader, tools, is_known=not tag)
    except NotJson:
        yield from reader.until((TAG,), reader.arguments)
        return None
    return None if text is None else tag + spaces + text


def as_schema(tools: Tools) -> Schema:
    """A call as a JSON Schema. Beside other JSON, a literal for the call's start would be one lexeme, and the lexer could not choose."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": {"type": "object", **closed(schema)},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    return {"anyOf": calls}


def heads(tools: Tools) -> tuple[Lookahead, ...]:
    return (((TAG,), GAP, ("{",)),)


def rules(lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
    """One call, because templates of these models know no more."""
    begin = '{"name": "'
    return CallRules(begin, named_object(lark, tools, "parameters", begin))
