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


def escaped(text: str) -> str:
    """A text as the value of an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _token(token: str) -> Lookahead:
    """It may be there twice, lack its last sign, and have spaces behind it."""
    return (token, token[:-1]), GAP, (token, ""), GAP


_SEP: Lookahead = ((SEP, SEP[:-1]), (SEP, ""))


def _head(names: Step) -> Lookahead:
    """The mark of a call of one of these tools."""
    before: Lookahead = (GAP, (SEP, ""), GAP, *_token(OPEN), ("call",), GAP, ("tool",), GAP, ("=",), GAP)
    return (*before, _QUOTE, names, _QUOTE, INSIDE, *_SEP)


def _end(*words: str) -> Lookahead:
    """The mark that ends such an element."""
    return (GAP, *_token(CLOSE), words, GAP, (SEP, SEP[:-1], ""), (SEP, ""))


_KEY: Lookahead = (*_token(OPEN), ("argument",))
_AFTER = (  # what ends a value
    (*_token(CLOSE), ("argument", "call", "tools")),
    (*_token(OPEN), ("argument", "call")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Xtml(Syntax):
    """The one dialect of this form."""

    @property
    def ends(self) -> Step:
        return (*map(ends, ("call", "argument", "json")), *self.close)

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        forms = [_head(Names(map(escaped, tools)))] + ([_head(NAME)] if is_open else [])
        if not (found := (yield from reader.take(*forms))):
            return None
        reader.begin_call(name := offered(_plain(found.name), tools))
        yield from self._arguments(reader, tools.get(name, {}))
        while (yield from reader.take(_end("argument", "json", "call"))):
            pass
        yield from reader.drop_spaces()
        if not (yield from reader.look(*self.close)):
            yield from reader.take(_end("tools"))
        return ""

    def _arguments(self, reader: AnswerReader, schema: Schema) -> Steps[None]:
        yield from reader.drop_spaces()
        is_json = (yield from self._mark(reader, (*_token(OPEN), ("json",)))) is not None
        if is_json or (yield from reader.peek()) == "{":
            yield from read_arguments(reader)
            return
        arguments = ArgumentWriter(reader, schema)
        while (own := (yield from self._mark(reader, _KEY))) is not None:
            kind = own.get("type")
            is_text = None if kind is None else kind == "string"
            value = arguments.value(own.get("key", ""), is_text=is_text)
            while mark := (yield from reader.find((OPEN[:-1], CLOSE[:-1]), value)):
                if (yield from reader.sees(*_AFTER, cut_fits=True)):
                    break
                value((yield from reader.take_mark(mark)))
            else:
                return  # cut off
            value.end()
            while (yield from reader.take(_end("argument"))):
                pass
            yield from reader.drop_spaces()
        arguments.end()

    def _mark(self, reader: AnswerReader, mark: Lookahead) -> Steps[Mapping[str, str] | None]:
        """Take a mark that begins an element. Returns its attributes; None if another text follows."""
        if not (yield from reader.take(mark)):
            return None
        text, _ = yield from reader.take_until(SEP[:-1], most=MOST_ATTRIBUTES)
        yield from reader.take(((SEP[-1], ""), (SEP, "")))
        return attributes(text)

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        known = _head(Names(map(escaped, tools)))
        return ((self.open, *known), known[3:])

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        end = literal(ends("call"))
        return [
            concat(
                literal(f'call tool="{escaped(name)}" index="'),
                "/[0-9]{1,3}/",
                literal(f'"{SEP}'),
                self._lark(lark, schema),
                end,
            )
            for name, schema in tools.items()
        ]

    def _lark(self, lark: Lark, schema: Schema) -> str:
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
                kinds_ = sorted({"number" if each == "integer" else each for each in kinds})
                kind, value = "", concat(lark.json(own), literal(end))
                head = concat(
                    literal(head), either([literal(each) for each in kinds_]), literal(f'"{SEP}')
                )
            rule = lark.rule(concat(head if not kind else literal(f'{head}{kind}"{SEP}'), value))
            out.append(rule if is_needed else f"{rule}?")
        return concat(*out)


KIMI_K3 = Xtml(
    open=(begins("tools"), *(f"{OPEN}{gap}tools{SEP}" for gap in (" ", "\n", OPEN))),
    starts=(f"{OPEN[:-1]}call", *(f"{OPEN}{gap}call" for gap in ("", " ", "\n", OPEN))),
    close=(ends("tools"),),
    inner=(OPEN, CLOSE, SEP),
    is_section=True,
    lead=literal(OPEN),
    between="SPACE?",
    gap="",
)
