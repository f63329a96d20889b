"""Calls as a name and its arguments in JSON, between marks.

DeepSeek V3 and R1 write a kind, the name and a fenced block of JSON, V3.1 the name and the JSON. Kimi K2 writes an id that contains the
name, and its template shows earlier calls by their ids alone, so the model's own ids are kept. Functionary v3.1 writes <function=name>,
Mistral's newer models [TOOL_CALLS], the name, perhaps an id, and [ARGS].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pyspec.text.markup.ahead import AHEAD, GAP, NAME, NUMBER, OVER, Found, Lookahead, Names, Step
from pyspec.text.markup.call_grammar import Lark, concat, literal
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.objects import ID_IN_LARK
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import AnswerReader, Steps, Tools, offered

_NUMBERED = re.compile(r"(.+?)(?::(\d+))?")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Written = Callable[[str], list[tuple[str, str]]]
"""Lark for the texts before and behind the arguments of a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(Syntax):
    """The marks of a dialect.

    mark     before each call; (): one of `open` or `starts` stands there
    before   what may stand between that and the name
    separators  marks between the name and the arguments
    end      marks behind the arguments
    written  the texts that grammars write
    id       mark of an id behind the name
    prefix   of the name in ids that contain it; "": ids are made here
    """

    end: Step
    separators: Step
    written: Written
    mark: Step = ()
    before: Lookahead = ()
    id: str = ""
    prefix: str = ""

    @property
    def ends(self) -> Step:
        return (*self.end, *self.close)

    @property
    def _behind(self) -> Lookahead:
        """The marks between the name and the arguments, once or twice."""
        return (self.separators, GAP, (*self.separators, ""))

    def _forms(self, names: Step, marks: Step) -> tuple[Lookahead, ...]:
        number = (NUMBER,) if self.prefix else ()
        begin = (marks, GAP, *self.before, names, *number, GAP)
        marked: Lookahead = (*begin, *self._behind, *((AHEAD, GAP, ("{",)) if self.starts else ()))
        if self.starts:
            return marked, (*begin, *self._behind, *marked), (*begin, AHEAD, ("{",))
        if self.id:
            return ((*begin, AHEAD, (self.id,)), marked, (*begin, AHEAD, ("{",)))
        behind = ("{", '"', "```", *(self.ends if isinstance(names, Names) else ()))
        return marked, (*begin, AHEAD, behind if self.mark else ("{",))

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        marks = self.mark or (*self.open, *self.starts)
        marks = ("",) if opened in marks else marks
        found = yield from reader.take(*self._forms(Names(tools), marks))
        # behind the mark of all calls, or behind a call
        if not found and is_open and (opened or self.id):
            known = self._forms(Names(tools), ("",))
            found = yield from reader.take(*(known if opened else known[:2]))
        if not found and is_open:
            forms = self._forms(NAME, marks)
            found = yield from reader.take(*(forms[:2] if self.id else reversed(forms)))
        if not found:
            return None
        name, id_ = offered(found.name, tools), ""
        mark: Step = (self.id,)
        if self.id and (own := (yield from reader.take((mark, GAP, (self.id, ""), GAP, NAME), (mark,)))):
            id_ = own.name if _SHORT_ID.fullmatch(own.name) else ""
            yield from reader.take((GAP, *self._behind))
        elif self.prefix:
            name, id_ = self._id(reader, found, tools)
        reader.begin_call(name, id_)
        yield from read_arguments(reader)
        stray: Lookahead = (("}", "]"), AHEAD, GAP)
        yield from reader.take_spaces()
        while (yield from reader.take((*stray, (*self.ends, *self.open, "}", "]")), (*stray, OVER))):
            yield from reader.take_spaces()
        return ""

    def _id(self, reader: AnswerReader, found: Found, tools: Tools) -> tuple[str, str]:
        """The name, and the model's id in the form that templates know, once in an answer."""
        name, number = found.name, found.attributes.strip(":._-")
        if name not in tools and (match := _NUMBERED.fullmatch(name)):
            name, number = offered(match[1], tools), match[2] or ""
        numbers = re.findall(r"\d+", number)
        n = int(numbers[0]) if numbers else reader.n_calls
        while (id_ := f"{self.prefix}{name}:{n}") in reader.ids:
            n += 1
        return name, id_

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        forms = self._forms(Names(tools), (*self.mark, ""))
        return tuple(((*self.open, *self.starts), GAP, *form) for form in forms)

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        return [
            concat(before, lark.json(schema), behind)
            for name, schema in tools.items()
            for before, behind in self.written(name)
        ]


def _spelled(words: str) -> Step:
    """A mark of DeepSeek, and the same as distilled models write it, of whose tokens it is none."""
    return tuple(f"<｜{words.replace(' ', sign)}｜>" for sign in ("▁", "_", " ", "\\_"))


DEEPSEEK_CALL, DEEPSEEK_SEP = _spelled("tool call begin"), _spelled("tool sep")
DEEPSEEK_END = _spelled("tool call end")


def _deepseek(name: str) -> list[tuple[str, str]]:
    """Both forms of the arguments: each model knows its own."""
    sep, end = DEEPSEEK_SEP[0], DEEPSEEK_END[0]
    fenced = literal(f"function{sep}{name}\n```json\n"), literal(f"\n```{end}")
    return [(literal(f"{name}{sep}"), literal(end)), fenced]


_section = partial(NamedCalls, is_section=True, between="SPACE?", gap="")
DEEPSEEK = _section(
    open=(*_spelled("tool calls begin"), *DEEPSEEK_CALL),
    close=_spelled("tool calls end"),
    end=DEEPSEEK_END,
    inner=(*DEEPSEEK_SEP, *DEEPSEEK_END),
    mark=DEEPSEEK_CALL,
    lead=literal(DEEPSEEK_CALL[0]),
    before=((*(f"function{gap}{sep}" for sep in DEEPSEEK_SEP for gap in ("", " ", "\n")), ""), GAP, (*DEEPSEEK_SEP, ""), GAP),
    separators=DEEPSEEK_SEP,
    written=_deepseek,
)  # fmt: skip

KIMI_CALL, KIMI_SEP, KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
KIMI = _section(
    open=("<|tool_calls_section_begin|>", KIMI_CALL),
    close=("<|tool_calls_section_end|>",),
    end=(KIMI_END,),
    inner=(KIMI_SEP, KIMI_END),
    mark=(KIMI_CALL,),
    lead=literal(KIMI_CALL),
    before=(("functions", "function", ""), (".", "_", ":", "")),
    separators=(KIMI_SEP,),
    prefix="functions.",
    written=lambda name: [
        (concat(literal(f"functions.{name}:"), "/[0-9]{1,4}/", literal(KIMI_SEP)), literal(KIMI_END))
    ],
)

FUNCTIONARY = NamedCalls(
    starts=("<function=",),
    inner=("<function=",),
    lead="",
    end=("</function",),
    before=(("", '"'),),
    separators=(">", '">'),
    written=lambda name: [(literal(f"{name}>"), literal("</function>"))],
)

CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
MISTRAL = NamedCalls(
    open=("[TOOL_CALLS]",),
    lead="",
    end=(),
    inner=(CALL_ID, ARGS),
    separators=(ARGS,),
    id=CALL_ID,
    written=lambda name: [
        (concat(literal(name), f"({concat(literal(CALL_ID), ID_IN_LARK)})?", literal(ARGS)), "")
    ],
)
