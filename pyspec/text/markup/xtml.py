"""Calls as elements between control tokens, with one element for each argument (Kimi K3).

An element is <|open|>word name="value"<|sep|> .. <|close|>word<|sep|>. The answer itself is such an element, and so is reasoning. A call names its tool
and its number; an argument its key and its type, and its text has no escapes. A call may have one element of JSON in place of arguments.
A value ends, too, where the mark of another argument, or of the end of its call, stands without its own end mark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pyspec.text.markup.ahead import GAP, INSIDE, NAME, Lookahead, Names, Step
from pyspec.text.markup.call_grammar import (
    Lark,
    Schema,
    concat,
    either,
    literal,
    properties_of,
    takes_any,
    words_of,
)
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, offered
from pyspec.text.markup.typed import ArgumentWriter, types_of

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MOST_ATTRIBUTES = 1024  # characters
_QUOTE: Step = ("", '"', "'")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_TOKEN = re.compile(r"<\|\w+\|>")
_JSON_TYPES = {
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}


def begins(word: str) -> str:
    """The mark that begins an element without attributes."""
    return f"{OPEN}{word}{SEP}"


def ends(word: str) -> str:
    """The mark that ends an element."""
    return f"{CLOSE}{word}{SEP}"


def attributes(text: str) -> Mapping[str, str]:
    """Those of a mark: its text between the word and the end."""
    every = _ATTRIBUTE.findall(text)
    return {key: _plain(quoted or single or bare) for key, quoted, single, bare in every}


def _plain(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def loose(mark: str) -> Step:
    """A mark, and the same without the last sign of one of its tokens."""
    every = (mark, *(mark[: m.end() - 1] + mark[m.end() :] for m in _TOKEN.finditer(mark)))
    return tuple(dict.fromkeys(every))


def escaped(text: str) -> str:
    """A text as the value of an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _head(names: Step) -> Lookahead:
    """The mark of a call of one of these tools."""
    return (loose(f"{OPEN}call tool="), _QUOTE, names, _QUOTE, INSIDE, loose(SEP))


_KEYS = loose(f"{OPEN}argument")
_AFTER = (  # what ends a value
    *_KEYS,
    *(form for word in ("argument", "call", "tools") for form in loose(f"{CLOSE}{word}")),
    *loose(f"{OPEN}call tool="),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Xtml(Syntax):
    """The one dialect of this form."""

    @property
    def ends(self) -> Step:
        every = (*map(ends, ("call", "argument", "json")), *self.close)
        return tuple(form for mark in every for form in loose(mark))

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        forms = [_head(Names(map(escaped, tools)))] + ([_head(NAME)] if is_open else [])
        if not (yield from reader.sees(*forms)):
            return None
        name = offered((yield from self._mark(reader, "call")).get("tool", ""), tools)
        reader.begin_call(name)
        yield from reader.drop_spaces()
        if (yield from reader.look(*loose(f"{OPEN}json"))):
            yield from self._mark(reader, "json")
            yield from read_arguments(reader)
            return ""
        if (yield from reader.peek()) == "{":
            yield from read_arguments(reader)
            return ""
        arguments = ArgumentWriter(reader, tools.get(name, {}))
        while (yield from reader.look(*_KEYS)):
            own = yield from self._mark(reader, "argument")
            kind = own.get("type")
            is_text = None if kind is None else kind == "string"
            value = arguments.value(own.get("key", ""), is_text=is_text)
            if not (yield from reader.find(_AFTER, value)):
                return ""  # cut off
            value.end()
            yield from reader.take((loose(f"{CLOSE}argument"), loose(SEP)))
            yield from reader.drop_spaces()
        arguments.end()
        return ""

    def _mark(self, reader: AnswerReader, word: str) -> Steps[Mapping[str, str]]:
        """Take the mark that begins an element."""
        yield from reader.take_mark(*loose(f"{OPEN}{word}"))
        text, _ = yield from reader.take_until(SEP[:-1], most=MOST_ATTRIBUTES)
        yield from reader.take_mark(SEP[-1])
        return attributes(text)

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        known = _head(Names(map(escaped, tools)))
        return ((self.open, GAP, *known), known)

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        end = literal(ends("call"))
        return [
            concat(
                literal(f'call tool="{escaped(name)}" index="'),
                "/[0-9]{1,3}/",
                literal(f'"{SEP}'),
                self._arguments(lark, schema),
                end,
            )
            for name, schema in tools.items()
        ]

    def _arguments(self, lark: Lark, schema: Schema) -> str:
        """In the schema's order, and no others; JSON if the schema neither names nor forbids some."""
        if takes_any(schema):
            return concat(
                literal(f'{OPEN}json type="object"{SEP}'), lark.json(schema), literal(ends("json"))
            )
        out, end = [], ends("argument")
        for name, own, is_needed in properties_of(schema):
            head, kinds = f'{OPEN}argument key="{escaped(name)}" type="', types_of(schema, name)
            if words := words_of(own, lambda text: CLOSE not in text):
                kind, value = "string", concat(either([literal(word) for word in words]), literal(end))
            elif "string" in kinds:
                kind, value = "string", lark.text_before(end)
            else:
                kinds_ = sorted({_JSON_TYPES[each] for each in kinds})
                kind, value = "", concat(lark.json(own), literal(end))
                head = concat(
                    literal(head), either([literal(each) for each in kinds_]), literal(f'"{SEP}')
                )
            rule = lark.rule(concat(head if not kind else literal(f'{head}{kind}"{SEP}'), value))
            out.append(rule if is_needed else f"{rule}?")
        return concat(*out)


KIMI_K3 = Xtml(
    open=(begins("tools"),),
    starts=loose(f"{OPEN}call tool="),
    close=(ends("tools"),),
    inner=(OPEN, CLOSE, SEP),
    is_section=True,
    lead=literal(OPEN),
    between="SPACE?",
    gap="",
)
