"""The dialects by name, and the one that a chat template uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyspec.text.markup import harmony, reasoning
from pyspec.text.markup.ahead import Lookahead
from pyspec.text.markup.call_grammar import CallRules, Lark, Schema
from pyspec.text.markup.elements import DSML, GLM, MINIMAX, MUSE, QWEN, SEED
from pyspec.text.markup.members import GEMMA4, LFM2
from pyspec.text.markup.named import ARGS, DEEPSEEK, FUNCTIONARY, KIMI, MISTRAL
from pyspec.text.markup.objects import BareObjects, Objects, as_schema, in_list, new_id
from pyspec.text.markup.parts import AnswerParser, Content, Part
from pyspec.text.markup.prose import Syntax, pass_stray, strays_of
from pyspec.text.markup.reader import AnswerReader, MarkupParser, Steps, Tools, Trimmed, beginnings
from pyspec.text.markup.reasoning import MUSE_THINK, THINK, ThinkMarks, ThoughtForm, read_reasoning
from pyspec.text.markup.xtml import CLOSE, KIMI_K3, OPEN, SEP


@dataclass(frozen=True, slots=True)
class Dialect:
    """A syntax of calls, and how it is recognised.

    signs  texts that all its chat templates contain
    also   other syntax that models write behind its marks
    lacks  texts that its templates do not contain, unlike other templates with these signs
    is_bare  strings are written without quotes or escapes, between marks
    as_schema  a call as a JSON Schema, if it is only JSON
    is_prompted  the prompt explains the syntax, because the template does not
    new_id  makes a call's id, if templates want a form of their own
    """

    name: str
    syntax: Syntax
    signs: tuple[str, ...]
    also: tuple[Syntax, ...] = ()
    lacks: tuple[str, ...] = ()
    is_bare: bool = False
    as_schema: Callable[[Tools], Schema] | None = None
    is_prompted: bool = False
    new_id: Callable[[], str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Its texts that may be control tokens, which answers otherwise hide."""
        return self.syntax.marks

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        """Starts of calls of these tools."""
        return self.syntax.heads(tools)

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        """The grammar of calls of these tools."""
        return self.syntax.rules(lark, tools, is_single=is_single)

    def read(self, reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
        """Parse an answer behind its reasoning."""
        yield from self.syntax.read(reader, tools, self.also, trims_start=trims_start)

    def in_place(self, tools: Tools, *, is_single: bool, control: Mapping[str, int]) -> tuple[str, str]:
        """Lark for calls that may replace another text, and their first characters. control: as in Lark."""
        lark = Lark(control)
        if self.as_schema is not None:
            return lark.value(self.as_schema(tools)), "{"
        rules = self.rules(lark, tools, is_single=is_single)
        return lark.calls(rules), rules.trigger


_OBJECTS = Objects(is_known=True)
_HERMES = Objects(open=("<tool_call>",), close=("</tool_call>",))
_TOOLCALL = in_list(("<TOOLCALL>",), ("</TOOLCALL>",))
_GRANITES = in_list(("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>"))
_GRANITE = replace(_GRANITES, is_closed=False)
_COHERE = replace(
    in_list(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    keys=("tool_call_id", "tool_name", "parameters"),
    lead="SPACE? SPACE?",  # a line's end and four spaces
    between='","',
    last='SPACE? "]"',
)
_FUNCTOOLS = replace(in_list(("functools[",), ()), first="")
_LISTS = replace(in_list(MISTRAL.open, ()), has_ids=True)
_LLAMA3, _PYTHON = BareObjects(open=("<|python_tag|>",)), replace(LFM2, starts=("[",))
_LLAMA4 = replace(_LLAMA3, open=("<|python_start|>",), close=("<|python_end|>",))

DIALECTS: tuple[Dialect, ...] = (  # the first whose signs are in a template is used
    Dialect("harmony", harmony.HARMONY_CALLS, (harmony.START, harmony.CHANNEL, harmony.MESSAGE)),
    Dialect("deepseek_v32", DSML, DSML.inner, (_OBJECTS,), is_bare=True),
    Dialect("deepseek_v3", DEEPSEEK, DEEPSEEK.open[:1], (_OBJECTS,)),
    Dialect("kimi_k2", KIMI, (*KIMI.mark, *KIMI.separators), (_OBJECTS,)),
    Dialect("kimi_k3", KIMI_K3, (OPEN, CLOSE, SEP), (_OBJECTS,), is_bare=True),
    Dialect("glm45", GLM, (*GLM.open, "<arg_key>", "<arg_value>"), (_OBJECTS, QWEN), is_bare=True),
    Dialect("qwen3_coder", QWEN, (*QWEN.open, "<function=", "<parameter="), (_OBJECTS, GLM), is_bare=True),
    Dialect("seed_oss", SEED, (*SEED.open, "<function=", "<parameter="), (_OBJECTS,), is_bare=True),
    Dialect("mistral_args", MISTRAL, (*MISTRAL.open, ARGS), (_LISTS,), new_id=new_id),
    Dialect("mistral", _LISTS, MISTRAL.open, (MISTRAL,), new_id=new_id),
    Dialect("minimax_m2", MINIMAX, (*MINIMAX.open, '<invoke name="'), (_OBJECTS,), is_bare=True),
    Dialect("muse", MUSE, (MUSE.open[0], MUSE_THINK.end), (_OBJECTS,), is_bare=True),
    Dialect("gemma4", GEMMA4, (*GEMMA4.open, GEMMA4.quote), (_OBJECTS,), is_bare=True),
    Dialect("lfm2", LFM2, ("List of tools: ", "<|im_start|>"), (Objects(),)),
    Dialect("granite", _GRANITE, _GRANITE.open[:1]),
    Dialect("nemotron_v2", _TOOLCALL, _TOOLCALL.open),
    Dialect("cohere", _COHERE, _COHERE.open),
    # GLM's family and MiniMax use the same marks with another content
    Dialect("hermes", _HERMES, (*_HERMES.marks, "arguments"), (QWEN, GLM), lacks=("<arg_key>", "minimax")),
    Dialect("functionary_v31", FUNCTIONARY, (*FUNCTIONARY.starts, "</function>"), lacks=("<parameter=",)),
    Dialect("firefunction_v2", _FUNCTOOLS, _FUNCTOOLS.open),
    Dialect("llama3_json", _LLAMA3, ("<|start_header_id|>", '"parameters"'), (_PYTHON,), as_schema=as_schema),
    Dialect("llama4", _LLAMA4, ("<|header_start|>", '"parameters"'), (_PYTHON,), as_schema=as_schema),
)  # fmt: skip
GENERIC = replace(
    next(each for each in DIALECTS if each.name == "hermes"),
    name="generic",
    signs=(),
    is_prompted=True,
)
"""For templates without a known dialect: the prompt explains the syntax, which is that of Hermes."""

ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "nemotron": "qwen3_coder",
    "nemotron_json": "nemotron_v2",
    "deepseek_v31": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v4": "deepseek_v32",
    "qwen": "hermes",
    "llama3": "llama3_json",
    "glm46": "glm45",
    "poolside_v1": "glm45",
    "step3p5": "qwen3_coder",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "kimi": "kimi_k2",
    "mistral_nemo": "mistral",
    "devstral": "mistral_args",
    "minimax": "minimax_m2",
    "phi4_mini_json": "granite",
    "openai": "harmony",
    "gpt_oss": "harmony",
}
"""Names in other servers, and models with the syntax of another."""

NAMES = tuple(sorted([*(dialect.name for dialect in (*DIALECTS, GENERIC)), *ALIASES]))
_BY_NAME = {dialect.name: dialect for dialect in (*DIALECTS, GENERIC)}


def dialect(name: str) -> Dialect:
    """The dialect with this name. KeyError if there is none."""
    return _BY_NAME[ALIASES.get(name, name)]


def recognised(template: str) -> Dialect | None:
    """The dialect that a chat template's text uses; None if none is recognised."""
    for each in DIALECTS:
        is_excluded = any(sign in template for sign in each.lacks)
        if all(sign in template for sign in each.signs) and not is_excluded:
            return each
    return None


def dialect_for(template: str, parser: str) -> Dialect | None:
    """The dialect of an answer; None if calls are not parsed.

    parser  the name of a dialect; "auto": recognise it in the template; "none": calls are not parsed
    """
    if parser == "auto":
        return recognised(template) or GENERIC
    return None if parser == "none" else dialect(parser)


def dialect_reason(template: str, parser: str) -> str:
    """A sentence for the log: the dialect and the reason for it."""
    found = dialect_for(template, parser)
    if found is None:
        return "tool calls are not read: --tool-call-parser none"
    if parser != "auto":
        return f"tool calls are written as {found.name}: --tool-call-parser {parser}"
    if found is GENERIC:
        return (
            "tool calls are written as generic: the chat template has no dialect that is known"
            " (--tool-call-parser names one)"
        )
    return f"tool calls are written as {found.name}: the chat template says so"


# the first whose signs are in a template is used
_THINKING: tuple[tuple[tuple[str, ...], ThinkMarks], ...] = (
    ((harmony.START, harmony.CHANNEL, harmony.MESSAGE), harmony.HARMONY),
    ((OPEN, CLOSE, SEP), reasoning.KIMI_K3_THINK),
    ((reasoning.MISTRAL_THINK.start, reasoning.MISTRAL_THINK.end), reasoning.MISTRAL_THINK),
    (GEMMA4.inner[1:], reasoning.GEMMA4_THINK),
    ((reasoning.SEED_THINK.start, reasoning.SEED_THINK.end), reasoning.SEED_THINK),
    ((reasoning.COHERE_THINK.start, reasoning.COHERE_THINK.end), reasoning.COHERE_THINK),
    ((MUSE.open[0], MUSE_THINK.end), MUSE_THINK),
    # other templates have <response> around the results of tools
    ((THINK.start, THINK.end, "<response>", "<|start_of_role|>"), reasoning.GRANITE_THINK),
    ((THINK.start, "<response>", "<global_setting>"), reasoning.GRANITE_THINK),
    ((THINK.start, THINK.end), THINK),
)


def think_marks(template: str) -> ThinkMarks | None:
    """The marks around reasoning, if the template contains them."""
    fits = (marks for signs, marks in _THINKING if all(sign in template for sign in signs))
    return next(fits, None)


@dataclass(frozen=True, slots=True)
class AnswerMarkup:
    """The markup of one answer. Without a dialect and without think marks, all of it is content.

    calls     the syntax of calls; None: calls are not parsed
    think     marks around reasoning; None: reasoning is not parsed
    is_open   the prompt ends inside the reasoning
    is_shown  reasoning stays in the content
    is_whole  with is_shown: the first mark, too, even if it is part of the prompt
    tools     the schema of each tool's arguments, by its name
    is_calls_only   the answer is calls only
    is_constrained  a grammar holds the calls to the tools' schemas
    trigger   only an answer that begins with this has calls; "": calls may stand anywhere
    """

    calls: Dialect | None = None
    think: ThinkMarks | None = None
    is_open: bool = False
    is_shown: bool = False
    is_whole: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_calls_only: bool = False
    is_constrained: bool = False
    trigger: str = ""

    def parser(self, new_id: Callable[[], str] | None = None) -> AnswerParser:
        """A new parser for one answer."""
        if self.calls is None and self.think is None:
            return PlainParser()
        return MarkupParser(self._machine, new_id or (self.calls.new_id if self.calls else None))

    def _machine(self, reader: AnswerReader) -> Steps[None]:
        if self.think is not None and self.think.is_chain:
            tools = None if self.calls is None else self.tools
            yield from harmony.read(reader, tools, is_open=self.is_open, is_shown=self.is_shown)
            return
        thought = False
        if self.think is not None:
            if self.is_open and self.is_shown and self.is_whole:
                reader.content(self.think.start)
            form = ThoughtForm(self.is_open, self.is_shown, self._heads())
            thought = yield from read_reasoning(reader, self.think, form)
        trims_start = thought and not self.is_shown
        reader.is_constrained = self.is_constrained and not reader.strays
        if self.think is not None:
            shown = self.think.end if self.is_shown else ""
            reader.strays += tuple(mark for mark in self.think.strays if mark != shown)
            reader.headers = self.think.headers
        if trims_start and self.think is not None and self.think.answer is not None:
            yield from reader.drop_spaces()
            if (yield from reader.take_mark(self.think.answer[0])):
                reader.strays = reader.strays or self.think.answer[1:]
        is_calls = self.calls is not None
        if is_calls and self.trigger:
            spaces = yield from reader.take_spaces()
            is_calls = bool((yield from reader.look(self.trigger)))
            reader.content("" if is_calls or trims_start else spaces)
        machine = self.calls.read if self.calls is not None and is_calls else _content
        reader.marks = self.calls.marks if self.calls is not None and self.is_calls_only else ()
        yield from machine(reader, self.tools, trims_start=trims_start)

    def _heads(self) -> tuple[Lookahead, ...]:
        """Starts of calls that end the reasoning; none if a grammar allows no call there."""
        if self.calls is None or not self.tools or self.is_calls_only or self.trigger:
            return ()
        if self.think is not None and self.think.headers:
            return ()
        return self.calls.heads(self.tools)


def _content(reader: AnswerReader, tools: Tools, *, trims_start: bool) -> Steps[None]:
    if not reader.strays:
        if trims_start:
            yield from reader.drop_spaces()
        yield from reader.rest(reader.content)
        return
    content = Trimmed(reader.content, trims_start=trims_start)
    marks = beginnings(strays_of(reader))
    while mark := (yield from reader.find(marks, content)):
        if not (yield from pass_stray(reader, mark, content)):
            content((yield from reader.take_mark(mark)))
    content.flush()


class PlainParser:
    """All of the text is the answer."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
