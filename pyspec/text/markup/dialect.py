"""The dialects by name, and which of them a chat template speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyspec.text.markup import deepseek, dsml, glm, hermes, kimi, llama3, qwen_xml
from pyspec.text.markup.call_grammar import CallRules, Lark, Schema
from pyspec.text.markup.parts import AnswerParser, Content, Part
from pyspec.text.markup.reader import AnswerReader, MarkupParser, Steps, Tools
from pyspec.text.markup.reasoning import THINK, ThinkMarks, read_reasoning


class AnswerMachine(Protocol):
    """Reads an answer behind its reasoning."""

    def __call__(self, reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]: ...


class MakeRules(Protocol):
    """How calls of these tools look, as a grammar."""

    def __call__(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to write calls.

    marks  texts of it that may be tokens of their own, which answers else do not show
    signs  what its chat templates contain, all of them
    is_bare  strings are written as they are, with no more than marks around them
    as_schema  a call as a JSON Schema, where it is JSON and nothing else
    """

    name: str
    machine: AnswerMachine
    rules: MakeRules
    marks: tuple[str, ...]
    signs: tuple[str, ...]
    is_bare: bool = False
    as_schema: Callable[[Tools], Schema] | None = None

    def in_place(self, tools: Tools, *, is_single: bool) -> tuple[str, str]:
        """Calls that may stand in place of another text, as lark, and what they begin with."""
        lark = Lark()
        if self.as_schema is not None:
            return lark.value(self.as_schema(tools)), "{"
        rules = self.rules(lark, tools, is_single=is_single)
        return lark.calls(rules), rules.trigger


DIALECTS: tuple[Dialect, ...] = (  # the first whose signs a template has is taken
    Dialect("deepseek_v32", dsml.machine, dsml.rules, (dsml.WORD,), (dsml.WORD,), is_bare=True),
    Dialect(
        "deepseek_v3",
        deepseek.machine,
        deepseek.rules,
        (deepseek.OPEN, deepseek.CLOSE, deepseek.CALL, deepseek.SEP, deepseek.END_CALL),
        (deepseek.OPEN,),
    ),
    Dialect(
        "kimi_k2",
        kimi.machine,
        kimi.rules,
        (kimi.OPEN, kimi.CLOSE, kimi.CALL, kimi.SEP, kimi.END_CALL),
        (kimi.CALL, kimi.SEP),
    ),
    Dialect(
        "glm45",
        glm.machine,
        glm.rules,
        (glm.OPEN, glm.CLOSE, glm.KEY, glm.END_KEY, glm.VALUE, glm.END_VALUE),
        (glm.OPEN, glm.KEY, glm.VALUE),
        is_bare=True,
    ),
    Dialect(
        "qwen3_coder",
        qwen_xml.machine,
        qwen_xml.rules,
        (qwen_xml.OPEN, qwen_xml.CLOSE),
        (qwen_xml.OPEN, qwen_xml.FUNCTION, qwen_xml.PARAMETER),
        is_bare=True,
    ),
    Dialect(
        "hermes", hermes.machine, hermes.rules, (hermes.OPEN, hermes.CLOSE), (hermes.OPEN, hermes.CLOSE, "arguments")
    ),
    Dialect(
        "llama3_json",
        llama3.machine,
        llama3.rules,
        (llama3.TAG,),
        ("<|start_header_id|>", '"parameters"'),
        as_schema=llama3.as_schema,
    ),
)
NOT_HERMES = ("<arg_key>", "minimax")  # GLM's kin and MiniMax write other things into the same marks
ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "nemotron": "qwen3_coder",
    "deepseek_v31": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
    "qwen": "hermes",
    "llama3": "llama3_json",
    "glm46": "glm45",
    "kimi": "kimi_k2",
}
"""Other servers' names, and models whose calls look like another's."""

NAMES = tuple(sorted([*(dialect.name for dialect in DIALECTS), *ALIASES]))
_BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


def dialect(name: str) -> Dialect:
    """The dialect of that name. KeyError if there is none."""
    return _BY_NAME[ALIASES.get(name, name)]


def recognised(template: str) -> Dialect | None:
    """The dialect that a chat template's text speaks, if any does."""
    for each in DIALECTS:
        if all(sign in template for sign in each.signs):
            return None if each.name == "hermes" and any(sign in template for sign in NOT_HERMES) else each
    return None


def think_marks(template: str) -> ThinkMarks | None:
    """What reasoning stands between, if the template knows of it."""
    return THINK if THINK.start in template and THINK.end in template else None


@dataclass(frozen=True, slots=True)
class AnswerMarkup:
    """What one answer may contain, and how it is told. Without a dialect and without think marks all of it is content.

    calls     how calls are written; None: there are none to be read
    think     what reasoning stands between; None: there is none to be read
    is_open   the prompt ends within the reasoning
    is_shown  reasoning stays in the content
    is_whole  and its first mark, too, where that stands in the prompt
    tools     the schema of each tool's arguments, by its name
    is_bound  the answer is calls and nothing else
    trigger   the answer is calls, and begins with this, or it has none: text that looks like a call is text; "": calls stand anywhere
    """

    calls: Dialect | None = None
    think: ThinkMarks | None = None
    is_open: bool = False
    is_shown: bool = False
    is_whole: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_bound: bool = False
    trigger: str = ""

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A new parser for one answer."""
        if self.calls is None and self.think is None:
            return PlainParser()
        return MarkupParser(self._machine, new_id)

    def _machine(self, reader: AnswerReader) -> Steps[None]:
        thought = False
        if self.think is not None:
            if self.is_open and self.is_shown and self.is_whole:
                reader.content(self.think.start)
            thought = yield from read_reasoning(reader, self.think, is_open=self.is_open, is_shown=self.is_shown)
        trims_start = thought and not self.is_shown
        is_calls = self.calls is not None
        if is_calls and self.trigger:
            spaces = yield from reader.take_spaces()
            is_calls = bool((yield from reader.look(self.trigger)))
            reader.content("" if is_calls or trims_start else spaces)
        machine = self.calls.machine if self.calls is not None and is_calls else _content
        reader.marks = self.calls.marks if self.calls is not None and self.is_bound else ()
        yield from machine(reader, self.tools, trims_start=trims_start)


def _content(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    if trims_start:
        yield from reader.drop_spaces()
    yield from reader.rest(reader.content)


class PlainParser:
    """All of the text is the answer."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
