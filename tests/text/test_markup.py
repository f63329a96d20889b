"""Answers with markup: the same parts for any split of the text, and valid JSON as arguments."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest
from sampling import few

from pyspec.text.markup import dialect as dialects
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.markup.harmony import HARMONY
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.markup.reasoning import (
    COHERE_THINK,
    GEMMA4_THINK,
    GRANITE_THINK,
    KIMI_K3_THINK,
    MISTRAL_THINK,
    MUSE_THINK,
    SEED_THINK,
    THINK,
    ThinkMarks,
)

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "at": {"type": ["number", "null"]},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array"},
            "unit": {"enum": ["c", "f"]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
}
BARS = "｜"


def parse(markup: AnswerMarkup, pieces: Sequence[str]) -> list[Part]:
    """The parts of an answer, with neighbours of one kind joined."""
    ids = (f"id{i}" for i in itertools.count())
    parser, joined = markup.parser(lambda: next(ids)), list[Part]()
    for part in [*(p for piece in pieces for p in parser.push(piece)), *parser.finish()]:
        last = joined[-1] if joined else None
        if isinstance(part, CallBegin) or type(last) is not type(part):
            joined.append(part)
        elif isinstance(part, CallArguments):
            joined[-1] = CallArguments(part.index, last.text + part.text)  # type: ignore[union-attr]
        else:
            joined[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
    return joined


def markup(
    name: str, *, think: bool = False, is_open: bool = False, is_shown: bool = False
) -> AnswerMarkup:
    return AnswerMarkup(dialects.dialect(name), THINK if think else None, is_open, is_shown, tools=TOOLS)


def chain(*, is_open: bool = False, is_shown: bool = False) -> AnswerMarkup:
    return AnswerMarkup(dialects.dialect("harmony"), HARMONY, is_open, is_shown, tools=TOOLS)


def is_of(markup: AnswerMarkup, name: str) -> bool:
    """The generic dialect parses as another one does."""
    own = dialects.dialect("hermes" if name == "generic" else name).name
    return markup.calls is not None and markup.calls.name == own


def call(i: int, name: str, arguments: object, id_: str = "") -> list[Part]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallBegin(i, id_ or f"id{i}", name), CallArguments(i, text)]


DSML_CALL = (
    f'<{BARS}DSML{BARS}tool_calls>\n<{BARS}DSML{BARS}invoke name="weather">\n<{BARS}DSML{BARS}parameter name="city" string="true">'
    f'Genève "1"\n</{BARS}DSML{BARS}parameter>\n<{BARS}DSML{BARS}parameter name="days" string="false">3</{BARS}DSML{BARS}parameter>\n'
    f'</{BARS}DSML{BARS}invoke>\n<{BARS}DSML{BARS}invoke name="write">\n</{BARS}DSML{BARS}invoke>\n</{BARS}DSML{BARS}tool_calls>'
)
CASES: dict[str, tuple[AnswerMarkup, str, list[Part]]] = {
    "hermes, two calls": (
        markup("hermes"),
        'I look.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"text": "a"}, "name": "write"}</tool_call>\n',
        [
            Content("I look."),
            *call(0, "weather", {"city": "Zürich", "days": 3}),
            *call(1, "write", {"text": "a"}),
        ],
    ),
    "granite, two calls in a list, then text": (
        markup("granite"),
        'Look.\n<|tool_call|>[{"name": "weather", "arguments": {"city": "Bern", "days": 2}}, {"name": "write", "arguments": {}}] done',
        [
            Content("Look."),
            *call(0, "weather", {"city": "Bern", "days": 2}),
            *call(1, "write", "{}"),
            Content("done"),
        ],
    ),
    "granite, Phi's end mark": (
        markup("granite"),
        '<|tool_call|>[{"name": "write", "arguments": {"text": "a"}}]<|/tool_call|>',
        call(0, "write", {"text": "a"}),
    ),
    "granite, an answer between marks behind reasoning": (
        AnswerMarkup(dialects.dialect("granite"), GRANITE_THINK, tools=TOOLS),
        "<think>a\n</think>\n<response>Yes, <b>.\n</response>\n",
        [Reasoning("a"), Content("Yes, <b>.")],
    ),
    "granite, an answer between marks without reasoning is content": (
        AnswerMarkup(None, GRANITE_THINK),
        "<response>x</response>",
        [Content("<response>x</response>")],
    ),
    "granite, no tools": (AnswerMarkup(None, GRANITE_THINK), "<think>a</think><response>x </res", [Reasoning("a"), Content("x </res")]),
    "seed, reasoning and two calls": (
        AnswerMarkup(dialects.dialect("seed_oss"), SEED_THINK, tools=TOOLS),
        "<seed:think>Hm.</seed:think>\nSo.\n\n<seed:tool_call>\n<function=weather>\n<parameter=city>New\nYork</parameter>\n<parameter=days>3</parameter>\n"
        "<parameter=exact>True</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=write>\n</function>\n</seed:tool_call>",
        [
            Reasoning("Hm."),
            Content("So."),
            *call(0, "weather", {"city": "New\nYork", "days": 3, "exact": True}),
            *call(1, "write", "{}"),
        ],
    ),
    "cohere, reasoning and two calls": (
        AnswerMarkup(dialects.dialect("cohere"), COHERE_THINK, tools=TOOLS),
        '<|START_THINKING|>I could <|START_ACTION|>.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        '"parameters": {"city": "Bern", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "write", "parameters": {}}\n]<|END_ACTION|>',
        [
            Reasoning("I could <|START_ACTION|>."),
            *call(0, "weather", {"city": "Bern", "days": 3}),
            *call(1, "write", "{}"),
        ],
    ),
    "cohere, a call ends reasoning": (
        AnswerMarkup(dialects.dialect("cohere"), COHERE_THINK, is_open=True, tools=TOOLS),
        'Hm.\n<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "write", "parameters": {"text": "a"}}]<|END_ACTION|>',
        [Reasoning("Hm."), *call(0, "write", {"text": "a"})],
    ),
    "cohere, an answer between marks": (
        AnswerMarkup(dialects.dialect("cohere"), COHERE_THINK, tools=TOOLS),
        "<|START_RESPONSE|>Yes, <b>.<|END_RESPONSE|>",
        [Content("Yes, <b>.")],
    ),
    "cohere, an answer between marks ends reasoning, without tools": (
        AnswerMarkup(None, COHERE_THINK, is_open=True),
        "Hm.\n<|START_TEXT|>Yes.\n<|END_TEXT|>",
        [Reasoning("Hm."), Content("Yes.")],
    ),
    "cohere, shown reasoning": (
        AnswerMarkup(None, COHERE_THINK, is_shown=True),
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        [Content("<|START_THINKING|>Hm.<|END_THINKING|>Yes.")],
    ),
    "muse, reasoning and two calls": (
        AnswerMarkup(dialects.dialect("muse"), MUSE_THINK, tools=TOOLS),
        ' to=self<|message|>I could <atem:invoke name="write">.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n'
        '<atem:invoke name="weather">\n<atem:parameter name="city">Bern</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=self<|message|>More.<|eom|><|start|>assistant to=write.write<|message|>"
        '<atem:function_calls>\n<atem:invoke name="write.write">\n</atem:invoke>\n</atem:function_calls><|eot|>',
        [
            Reasoning('I could <atem:invoke name="write">.'),
            *call(0, "weather", {"city": "Bern", "days": 3}),
            Reasoning("More."),
            *call(1, "write", "{}"),
        ],
    ),
    "muse, an answer that mentions a header": (
        AnswerMarkup(dialects.dialect("muse"), MUSE_THINK, tools=TOOLS),
        " to=user<|message|>Mail to=self, please.<|eot|>",
        [Content("Mail to=self, please.")],
    ),
    "muse, no tools": (
        AnswerMarkup(None, MUSE_THINK),
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>So, to=x.",
        [Reasoning("Hm."), Content("So, to=x.")],
    ),
    "ernie, an answer between marks and a call": (
        AnswerMarkup(dialects.dialect("hermes"), GRANITE_THINK, is_open=True, tools=TOOLS),
        'Hm.\n</think>\n\n<response>\nSo.\n</response>\n\n\n<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>\n',
        [Reasoning("Hm."), Content("So."), *call(0, "write", {"text": "a"})],
    ),
    "mistral, reasoning": (
        AnswerMarkup(dialects.dialect("mistral_args"), MISTRAL_THINK, tools=TOOLS),
        '[THINK]a <think> b[/THINK]So.[TOOL_CALLS]write[ARGS]{"text": "x"}',
        [Reasoning("a <think> b"), Content("So."), *call(0, "write", {"text": "x"})],
    ),
    "minimax, two calls of all types": (
        markup("minimax_m2"),
        'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">New\n"York"</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="where">{"a": [1]}</parameter>\n</invoke>\n<invoke name="write">\n'
        "</invoke>\n</minimax:tool_call>",
        [
            Content("I look."),
            *call(0, "weather", {"city": 'New\n"York"', "days": 3, "where": {"a": [1]}}),
            *call(1, "write", "{}"),
        ],
    ),
    "minimax, a call's text in a value": (
        markup("minimax_m2"),
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">use <parameter name="x"> and </invoke></parameter>\n</invoke>\n</minimax:tool_call>',
        call(0, "write", {"text": 'use <parameter name="x"> and </invoke>'}),
    ),
    "gemma4, reasoning, two calls, all types": (
        AnswerMarkup(dialects.dialect("gemma4"), GEMMA4_THINK, tools=TOOLS),
        '<|channel>thought\nI <b>look.\n<channel|>So.<|tool_call>call:weather{city:<|"|>New\n"York"<|"|>,days:3,'
        'where:{a:[1,true,null,-2.5],<|"|>b c<|"|>:{},"d":[]}}<tool_call|><|tool_call>call:write{}<tool_call|>',
        [
            Reasoning("I <b>look."),
            Content("So."),
            *call(
                0,
                "weather",
                {
                    "city": 'New\n"York"',
                    "days": 3,
                    "where": {"a": [1, True, None, -2.5], "b c": {}, "d": []},
                },
            ),
            *call(1, "write", "{}"),
        ],
    ),
    "gemma4, empty and repeated channels": (
        AnswerMarkup(dialects.dialect("gemma4"), GEMMA4_THINK, tools=TOOLS),
        "<|channel>thought\n<channel|>Hello <|channel>thought\nagain<channel|> you.<channel|>",
        [Content("Hello"), Reasoning("again"), Content("  you.")],
    ),
    "gemma4, no tools": (AnswerMarkup(None, GEMMA4_THINK), "<|channel>thought\na<channel|>b<channel|>", [Reasoning("a"), Content("b")]),
    "gemma4, a word without marks, spaces": (
        markup("gemma4"),
        "<|tool_call>call:write{ text : Paris }<tool_call|> done",
        [*call(0, "write", {"text": "Paris"}), Content("done")],
    ),
    "gemma4, a value without a key": (
        markup("gemma4"),
        "<|tool_call>call:write{text:no JSON, France }<tool_call|>done",
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "no JSON"France }'), Content("done")],
    ),
    "gemma4, cut off in a value": (
        markup("gemma4"),
        '<|tool_call>call:write{text:<|"|>Par',
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "Par')],
    ),
    "gemma4, a mark without a call": (markup("gemma4"), "a <|tool_call>no<tool_call|> b", [Content("a <|tool_call>no<tool_call|> b")]),
    "lfm2, two calls, Python's values": (
        markup("lfm2"),
        "<|tool_call_start|>[weather(city='it\\'s \"x\"', exact=True, at=None, tags=[1, (2, 'a')], where={'a': False}), write()]<|tool_call_end|>Done.",
        [
            *call(
                0,
                "weather",
                {
                    "city": 'it\'s "x"',
                    "exact": True,
                    "at": None,
                    "tags": [1, [2, "a"]],
                    "where": {"a": False},
                },
            ),
            *call(1, "write", "{}"),
            Content("Done."),
        ],
    ),
    "lfm2, a dotted name, spaces and line ends": (
        markup("lfm2"),
        "<|tool_call_start|>[ a.b (\n x = 1 ,\n y='2',\n) ] <|tool_call_end|>",
        [Content("<|tool_call_start|>[ a.b (\n x = 1 ,\n y='2',\n) ] <|tool_call_end|>")],
    ),
    "lfm2, JSON objects": (
        markup("lfm2"),
        '<|tool_call_start|>[{"name": "write", "arguments": {"text": "a"}}]<|tool_call_end|>',
        call(0, "write", {"text": "a"}),
    ),
    "lfm2, cut off in a value": (
        markup("lfm2"),
        "<|tool_call_start|>[write(text='Par",
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "Par')],
    ),
    "lfm2, an argument without a name": (
        markup("lfm2"),
        "<|tool_call_start|>[write('no JSON')]<|tool_call_end|>more",
        [CallBegin(0, "id0", "write"), CallArguments(0, "{'no JSON')]"), Content("more")],
    ),
    "lfm2, no calls": (markup("lfm2"), "a <|tool_call_start|>[]<|tool_call_end|> b", [Content("a  b")]),
    "hermes, marks in a string": (
        markup("hermes"),
        '<tool_call>{"name": "write", "arguments": {"text": "</tool_call> <tool_call>\\n{\\"name\\": 1} 👩🏽‍💻"}}</tool_call> done',
        [*call(0, "write", {"text": '</tool_call> <tool_call>\n{"name": 1} 👩🏽‍💻'}), Content("done")],
    ),
    "hermes, line ends and stray backslashes in a string": (
        markup("hermes"),
        '<tool_call>{"name": "write", "arguments": {"text": "a\nb\t\\d \\u12 \\u00e9"}}</tool_call>',
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "a\\nb\\t\\\\d \\\\u12 \\u00e9"}')],
    ),
    "hermes, no arguments, null, and a string with the object": (
        markup("hermes"),
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b", "arguments": null}</tool_call>'
        '<tool_call>{"name": "c", "arguments": "{\\"x\\": 1}"}</tool_call>',
        [*call(0, "a", "{}"), *call(1, "b", "{}"), *call(2, "c", {"x": 1})],
    ),
    "hermes, no calls": (
        markup("hermes"),
        'Write <tool_call> {"no": "name"} </tool_call>, or <tool_call>[1]; a < b, <tool_cal and <tool_call>{"name": 3}\n\n',
        [
            Content(
                'Write <tool_call> {"no": "name"} </tool_call>, or <tool_call>[1]; a < b, <tool_cal and <tool_call>{"name": 3}\n\n'
            )
        ],
    ),
    "hermes, cut off in the arguments": (
        markup("hermes"),
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        [CallBegin(0, "id0", "weather"), CallArguments(0, '{"city": "Par')],
    ),
    "hermes, cut off in the name": (markup("hermes"), 'so <tool_call>\n{"name": "wea', [Content('so <tool_call>\n{"name": "wea')]),
    "hermes, arguments that are no JSON": (
        markup("hermes"),
        '<tool_call>{"name": "write", "arguments": {text: 1}}</tool_call>more',
        [CallBegin(0, "id0", "write"), CallArguments(0, "{text: 1}}"), Content("more")],
    ),
    "qwen3_coder, all types": (
        markup("qwen3_coder"),
        'Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork "x\\\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=exact>\nTrue\n</parameter>\n<parameter=at>null</parameter>\n<parameter=where>\n{"a": [1]}\n</parameter>\n'
        "<parameter=tags>\nno list\n</parameter>\n<parameter=unit>\nc\n</parameter>\n<parameter=other>\n1.5\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=write>\n</function>\n</tool_call>",
        [
            Content("Sure."),
            *call(
                0,
                "weather",
                {
                    "city": 'New\nYork "x\\',
                    "days": 3,
                    "exact": True,
                    "at": None,
                    "where": {"a": [1]},
                    "tags": "no list",
                    "unit": "c",
                    "other": 1.5,
                },
            ),
            *call(1, "write", "{}"),
        ],
    ),
    "qwen3_coder, marks in a value": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=write>\n<parameter=text>\n\n<a>\n</parameter> x </function>\n</parameter>\ny</parameter>é\n\n</parameter>\n"
        "</function>\n</tool_call>",
        call(0, "write", {"text": "\n<a>\n</parameter> x </function>\n</parameter>\ny</parameter>é\n"}),
    ),
    "qwen3_coder, without the outer mark": (
        markup("qwen3_coder"),
        "<function=write>\n<parameter=text>1</parameter>\n</function> and <function=nobody> is text",
        [*call(0, "write", {"text": "1"}), Content("and <function=nobody> is text")],
    ),
    "qwen3_coder, cut off in a value": (
        markup("qwen3_coder"),
        "<tool_call><function=write><parameter=text>\nabc\n</param",
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "abc\\n</param')],
    ),
    "deepseek_v3, fenced": (
        markup("deepseek_v3"),
        f"Hm.<{BARS}tool▁calls▁begin{BARS}><{BARS}tool▁call▁begin{BARS}>function<{BARS}tool▁sep{BARS}>weather\n```json\n"
        f'{{"city": "<{BARS}tool▁call▁end{BARS}>"}}\n```<{BARS}tool▁call▁end{BARS}>\n<{BARS}tool▁call▁begin{BARS}>function'
        f"<{BARS}tool▁sep{BARS}>write\n```json\n{{}}\n```<{BARS}tool▁call▁end{BARS}><{BARS}tool▁calls▁end{BARS}>",
        [
            Content("Hm."),
            *call(0, "weather", {"city": f"<{BARS}tool▁call▁end{BARS}>"}),
            *call(1, "write", "{}"),
        ],
    ),
    "deepseek_v3, bare": (
        markup("deepseek_v3"),
        f"<{BARS}tool▁calls▁begin{BARS}><{BARS}tool▁call▁begin{BARS}>weather<{BARS}tool▁sep{BARS}>"
        f'{{"city": "Oslo"}}<{BARS}tool▁call▁end{BARS}><{BARS}tool▁call▁begin{BARS}>write<{BARS}tool▁sep{BARS}>{{}}'
        f"<{BARS}tool▁call▁end{BARS}><{BARS}tool▁calls▁end{BARS}>",
        [*call(0, "weather", {"city": "Oslo"}), *call(1, "write", "{}")],
    ),
    "deepseek_v32": (
        markup("deepseek_v32"),
        f"Yes.\n\n{DSML_CALL}",
        [
            Content("Yes."),
            *call(0, "weather", {"city": 'Genève "1"\n', "days": 3}),
            *call(1, "write", "{}"),
        ],
    ),
    "llama3_json, bare": (
        markup("llama3_json"),
        '\n{"type": "function", "name": "weather", "parameters": {"city": "Rom"}}; {"name": "write", "parameters": {}}',
        [*call(0, "weather", {"city": "Rom"}), *call(1, "write", "{}")],
    ),
    "llama3_json, with its tag": (
        markup("llama3_json"),
        'I see <|python_tag|>{"name": "other", "parameters": {"a": "{"}}',
        [Content("I see"), *call(0, "other", {"a": "{"})],
    ),
    "llama4, Python's form, and a bare object": (
        markup("llama4"),
        'So.\n[weather(city="Rom", days=2), write()]\nAnd <|python_start|>{"name": "write", "parameters": {"text": "a"}}<|python_end|>.',
        [
            Content("So."),
            *call(0, "weather", {"city": "Rom", "days": 2}),
            *call(1, "write", "{}"),
            Content("And"),
            *call(2, "write", {"text": "a"}),
            Content("."),
        ],
    ),
    "llama3_json, JSON that is no call": (
        markup("llama3_json"),
        '{"name": "nobody", "parameters": {}} {"name": "write", "parameters": {}}',
        [Content('{"name": "nobody", "parameters": {}} {"name": "write", "parameters": {}}')],
    ),
    "glm45, all types": (
        markup("glm45"),
        'Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New\nYork "x\\</arg_value>\n<arg_key>days</arg_key>\n'
        '<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"a": [1]}</arg_value>\n</tool_call>\n<tool_call>write\n</tool_call>',
        [
            Content("Sure."),
            *call(0, "weather", {"city": 'New\nYork "x\\', "days": 3, "where": {"a": [1]}}),
            *call(1, "write", "{}"),
        ],
    ),
    "glm45, without line ends, and marks in a value": (
        markup("glm45"),
        "<tool_call>write<arg_key>text</arg_key><arg_value></tool_call> </arg_value> é</arg_value></tool_call> done",
        [*call(0, "write", {"text": "</tool_call> </arg_value> é"}), Content("done")],
    ),
    "glm45, no calls": (
        markup("glm45"),
        'Write <tool_call> two words, <tool_call>{"name": 1}</tool_call> or <tool_call>write',
        [Content('Write <tool_call> two words, <tool_call>{"name": 1}</tool_call> or <tool_call>write')],
    ),
    "glm45, cut off in a value": (
        markup("glm45"),
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>\nabc\n</param",
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "\\nabc\\n</param')],
    ),
    "kimi_k2, two calls": (
        markup("kimi_k2"),
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "<|tool_call_end|>"}<|tool_call_end|>\n<|tool_call_begin|>write<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [
            Content("I look."),
            *call(0, "weather", {"city": "<|tool_call_end|>"}, "functions.weather:0"),
            *call(1, "write", "{}", "functions.write:1"),
        ],
    ),
    "kimi_k2, no calls": (
        markup("kimi_k2"),
        "a <|tool_calls_section_begin|> b <|tool_call_begin|>no name<|tool_call_argument_begin|>",
        [
            Content(
                "a <|tool_calls_section_begin|> b <|tool_call_begin|>no name<|tool_call_argument_begin|>"
            )
        ],
    ),
    "kimi_k3, reasoning, an answer and two calls": (
        AnswerMarkup(dialects.dialect("kimi_k3"), KIMI_K3_THINK, is_open=True, tools=TOOLS),
        "Hm <|open|>x.<|close|>think<|sep|><|open|>response<|sep|>I <b>look</b>.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>New "York"\n<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="write" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"text": "<|sep|>"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>',
        [
            Reasoning("Hm <|open|>x."),
            Content("I <b>look</b>."),
            *call(0, "weather", {"city": 'New "York"\n', "days": 3}),
            *call(1, "write", {"text": "<|sep|>"}),
        ],
    ),
    "kimi_k3, a call ends reasoning": (
        AnswerMarkup(dialects.dialect("kimi_k3"), KIMI_K3_THINK, is_open=True, tools=TOOLS),
        'I could `<|open|>tools<|sep|>`.\n<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|close|>call<|sep|>',
        [Reasoning("I could `<|open|>tools<|sep|>`."), *call(0, "write", "{}")],
    ),
    "kimi_k3, no tools": (
        AnswerMarkup(None, KIMI_K3_THINK),
        "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>x </b><|close|>response<|sep|><|close|>message<|sep|>",
        [Reasoning("a"), Content("x </b>")],
    ),
    "kimi_k3, no reasoning": (
        AnswerMarkup(None, KIMI_K3_THINK),
        "<|open|>response<|sep|>x<|close|>response<|sep|><|close|>message<|sep|>",
        [Content("x")],
    ),
    "kimi_k3, cut off in a value": (
        markup("kimi_k3"),
        '<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>argument key="text" type="string"<|sep|>abc</param',
        [CallBegin(0, "id0", "write"), CallArguments(0, '{"text": "abc</param')],
    ),
    "nemotron_v2, two calls": (
        markup("nemotron_v2"),
        'I look.\n\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zürich ]</TOOLCALL>"}}, {"name": "write", "arguments": {}}]</TOOLCALL>',
        [
            Content("I look."),
            *call(0, "weather", {"city": "Zürich ]</TOOLCALL>"}),
            *call(1, "write", "{}"),
        ],
    ),
    "nemotron_v2, none, one without its list, and no call": (
        markup("nemotron_v2"),
        '<TOOLCALL>[]</TOOLCALL> <TOOLCALL>{"name": "write", "arguments": {\'text\': "a"}}</TOOLCALL> b <TOOLCALL>[1]</TOOLCALL>',
        [*call(0, "write", {"text": "a"}), Content("b <TOOLCALL>[1]</TOOLCALL>")],
    ),
    "mistral, a list": (
        markup("mistral"),
        'Well. [TOOL_CALLS] [{"name": "weather", "arguments": {"days": 3}, "id": "abc123XYZ"}, {"name": "write", "arguments": {}}]',
        [Content("Well."), *call(0, "weather", {"days": 3}), *call(1, "write", "{}")],
    ),
    "mistral, an answer that speaks of it": (
        markup("mistral"),
        "The mark [TOOL_CALLS] stands before [TOOL_CALLS][1] and [TOOL_CALLS]nobody{}",
        [Content("The mark [TOOL_CALLS] stands before [TOOL_CALLS][1] and [TOOL_CALLS]nobody{}")],
    ),
    "mistral_args, calls with ids, without, and without the mark of the arguments": (
        markup("mistral_args"),
        '[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]write[ARGS]{"text": "b"}[TOOL_CALLS]write{"text": "c"}',
        [
            CallBegin(0, "abc123XYZ", "weather"),
            CallArguments(0, '{"city": "[TOOL_CALLS]"}'),
            CallBegin(1, "id0", "write"),
            CallArguments(1, '{"text": "b"}'),
            CallBegin(2, "id1", "write"),
            CallArguments(2, '{"text": "c"}'),
        ],
    ),
    "functionary_v31": (
        markup("functionary_v31"),
        'Hm. <function=weather>{"city": "</function>"}</function><function=write>{}</function> and <function=nobody>{}</function>',
        [
            Content("Hm."),
            *call(0, "weather", {"city": "</function>"}),
            *call(1, "write", "{}"),
            Content("and <function=nobody>{}</function>"),
        ],
    ),
    "firefunction_v2": (
        markup("firefunction_v2"),
        ' functools[{"name": "weather", "arguments": {"days": 1}}, {"name": "write", "arguments": {}}]',
        [*call(0, "weather", {"days": 1}), *call(1, "write", "{}")],
    ),
    "qwen3_coder, values without an end mark": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n<parameter=days>\n3\n<parameter=nothing>\nx\n</parameter>\n"
        "<parameter=unit>c<parameter=exact>TRUE</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=text>\na\n</tool_call>",
        [
            *call(
                0,
                "weather",
                {"city": "Rom", "days": "3\n<parameter=nothing>\nx", "unit": "c", "exact": True},
            ),
            *call(1, "write", {"text": "a"}),
        ],
    ),
    "qwen3_coder, other end marks": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter=city>\n<parameter=days>\n3\n</param>\n<parameter=exact>\nfalse\n"
        "</parameter >\n<parameter=unit>\nc\n</parameter>>\n<parameter=at>\n1.5\n</parameter\n</function>\n</tool_call>",
        call(0, "weather", {"city": "Rom", "days": 3, "exact": False, "unit": "c", "at": 1.5}),
    ),
    "qwen3_coder, a whole call in a value": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=write>\n<parameter=text>\nLike this:\n<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n"
        "</function>\n</tool_call>\nIt works.\n</parameter>\n</function>\n</tool_call>",
        call(
            0,
            "write",
            {
                "text": "Like this:\n<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n</function>\n</tool_call>\nIt works."
            },
        ),
    ),
    "qwen3_coder, the beginning of a call in a value": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=write>\n<parameter=text>\n<tool_call>\n<function=weather>\n</parameter>\n</function>\n</tool_call>",
        call(0, "write", {"text": "<tool_call>\n<function=weather>"}),
    ),
    "qwen3_coder, marks in quotes": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=weather>\n<parameter=city>\ngrep '<parameter=days>' a | sed \"s/<parameter=tags>/</function></tool_call>/\"\n"
        "</parameter>\n</function>\n</tool_call>",
        call(
            0,
            "weather",
            {"city": "grep '<parameter=days>' a | sed \"s/<parameter=tags>/</function></tool_call>/\""},
        ),
    ),
    "glm45, values without an end mark": (
        markup("glm45"),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom\n<arg_key>days</arg_key>\n<arg_value>3\n</tool_call>",
        call(0, "weather", {"city": "Rom", "days": 3}),
    ),
    "deepseek_v32, values without an end mark": (
        markup("deepseek_v32"),
        DSML_CALL.replace(f"\n</{BARS}DSML{BARS}parameter>", "").replace(
            f"</{BARS}DSML{BARS}parameter>", ""
        ),
        [*call(0, "weather", {"city": 'Genève "1"', "days": 3}), *call(1, "write", "{}")],
    ),
    "deepseek_v32, JSON that is a string, and Python": (
        markup("deepseek_v32"),
        f'<{BARS}DSML{BARS}tool_calls>\n<{BARS}DSML{BARS}invoke name="weather">\n<{BARS}DSML{BARS}parameter name="city" string="false">"Rom"'
        f'</{BARS}DSML{BARS}parameter>\n<{BARS}DSML{BARS}parameter name="tags" string="false">(1, None, [\'a"\',])</{BARS}DSML{BARS}parameter>\n'
        f"</{BARS}DSML{BARS}invoke>\n</{BARS}DSML{BARS}tool_calls>",
        call(0, "weather", {"city": "Rom", "tags": [1, None, ['a"']]}),
    ),
    "hermes, Python at every depth": (
        markup("hermes"),
        "<tool_call>{'name': 'weather', 'arguments': {'where': {'a': [True, NONE, (1, .5,),], 'b': 'it\\'s \"x\"'}, \"exact\": FALSE,}}</tool_call>",
        call(0, "weather", {"where": {"a": [True, None, [1, 0.5]], "b": 'it\'s "x"'}, "exact": False}),
    ),
    "qwen3_coder, Python in values": (
        markup("qwen3_coder"),
        "<tool_call>\n<function=weather>\n<parameter=where>\n{'a': {'b': None}}\n</parameter>\n<parameter=tags>\n['x', True]\n</parameter>\n"
        "<parameter=city>\n{'a': 1}\n</parameter>\n<parameter=at>\nNONE\n</parameter>\n</function>\n</tool_call>",
        call(
            0,
            "weather",
            {"where": {"a": {"b": None}}, "tags": ["x", True], "city": "{'a': 1}", "at": None},
        ),
    ),
    "a call ends reasoning, hermes": (
        markup("hermes", think=True, is_open=True),
        'I look.\n<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>\n</think>\n\nDone.',
        [Reasoning("I look."), *call(0, "write", {"text": "a"}), Content("Done.")],
    ),
    "a call ends reasoning that the model opened": (
        markup("mistral", think=True),
        '<think>\nI look. [TOOL_CALLS][{"name": "write", "arguments": {}}]',
        [Reasoning("I look."), *call(0, "write", "{}")],
    ),
    "a call ends reasoning, nemotron_v2": (
        markup("nemotron_v2", think=True, is_open=True),
        'I look.\n<TOOLCALL>[{"name": "write", "arguments": {}}]</TOOLCALL>',
        [Reasoning("I look."), *call(0, "write", "{}")],
    ),
    "a call ends reasoning, glm45": (
        markup("glm45", think=True, is_open=True),
        "I look.<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
        [Reasoning("I look."), *call(0, "write", {"text": "a"})],
    ),
    "a call ends reasoning, kimi_k2 and deepseek_v3": (
        markup("kimi_k2", think=True, is_open=True),
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [Reasoning("Hm."), *call(0, "write", "{}", "functions.write:0")],
    ),
    "a call ends reasoning that stays in the content": (
        markup("qwen3_coder", think=True, is_open=True, is_shown=True),
        "I look.\n<tool_call>\n<function=write>\n</function>\n</tool_call>",
        [Content("I look."), *call(0, "write", "{}")],
    ),
    "a thought that speaks of calls": (
        markup("qwen3_coder", think=True, is_open=True),
        "I write `<tool_call>\n<function=write>\n`, or\n```xml\n<tool_call>\n<function=write>\n```\nor <tool_call>, <function=nobody>.\n</think>\nHi",
        [
            Reasoning(
                "I write `<tool_call>\n<function=write>\n`, or\n```xml\n<tool_call>\n<function=write>\n```\nor <tool_call>, <function=nobody>."
            ),
            Content("Hi"),
        ],
    ),
    "reasoning, opened in the prompt": (
        markup("hermes", think=True, is_open=True),
        '\nSo <tool_call>{"name": "write"} …\n</think>\n\nHi <think> there\n',
        [Reasoning('So <tool_call>{"name": "write"} …'), Content("Hi <think> there\n")],
    ),
    "reasoning, opened by the model, and a call": (
        markup("qwen3_coder", think=True),
        "<think>\na < b\n</think>\n\n<tool_call>\n<function=write>\n</function>\n</tool_call>",
        [Reasoning("a < b"), *call(0, "write", "{}")],
    ),
    "reasoning that does not end": (markup("hermes", think=True), "<think>a </thin", [Reasoning("a </thin")]),
    "reasoning left in the content": (
        markup("hermes", think=True, is_shown=True),
        '<think>\n<tool_call>{"name": "write"}</think>\n\nHi',
        [Content('<think>\n<tool_call>{"name": "write"}</think>\n\nHi')],
    ),
    "reasoning in the content whose first mark stands in the prompt": (
        AnswerMarkup(None, THINK, is_open=True, is_shown=True, is_whole=True),
        "\na</think>\n\nHi",
        [Content("<think>\na</think>\n\nHi")],
    ),
    "no reasoning": (markup("hermes", think=True), "\n <b> <think>x</think>", [Content("\n <b> <think>x</think>")]),
    "reasoning alone": (AnswerMarkup(None, THINK, True), "a</think>\n\n<tool_call>\n", [Reasoning("a"), Content("<tool_call>\n")]),
    "harmony, reasoning and content": (
        chain(),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi <b>",
        [Reasoning("Hm."), Content("Hi <b>")],
    ),
    "harmony, a preamble, a call with its recipient behind the channel": (
        chain(),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.weather <|constrain|>json<|message|>{"city": "Zürich"}<|call|>',
        [Reasoning("a\n\nb"), Content("I look."), *call(0, "weather", {"city": "Zürich"})],
    ),
    "harmony, a call with its recipient before the channel": (
        chain(),
        ' to=functions.write<|channel|>analysis<|message|>{"text": "<|x|>"}',
        call(0, "write", {"text": "<|x|>"}),
    ),
    "harmony, a tool of the model's own is dropped": (
        chain(),
        "<|channel|>analysis to=python code<|message|>1 + 1<|end|><|start|>assistant<|channel|>final<|message|>2",
        [Content("2")],
    ),
    "harmony, a stray channel, a result that the model made up, and an answer to the user": (
        chain(),
        "<|channel|>commentary<|channel|>analysis<|message|>a<|end|><|start|>functions.write to=assistant<|channel|>commentary"
        "<|message|>made up<|end|><|start|>assistant to=user<|channel|>final<|message|>b",
        [Reasoning("a"), Content("b")],
    ),
    "harmony, a header that is cut, and two contents": (
        chain(),
        "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|end|>"
        "<|start|>assistant<|chan",
        [Content("a\n\n{}")],
    ),
    "harmony, inside a message that the prompt began": (chain(), " and so on", [Content(" and so on")]),
    "harmony, inside reasoning": (
        chain(is_open=True),
        "so<|end|>\nand then<|channel|>final<|message|>x",
        [Reasoning("so"), Content("\nand then\n\nx")],
    ),
    "harmony, reasoning left in the content": (
        chain(is_shown=True),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        [Content("<|channel|>analysis<|message|>a<|end|>b")],
    ),
    "harmony without tools": (
        AnswerMarkup(None, HARMONY),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        [Reasoning("a"), Content("b")],
    ),
    "nothing to be read": (AnswerMarkup(), "<think>a</think>", [Content("<think>a</think>")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_answer_gives_its_parts_wherever_it_is_cut(name: str) -> None:
    markup, text, want = CASES[name]
    assert parse(markup, [text]) == want
    assert parse(markup, list(text)) == want, "one character at a time"
    for cut in range(len(text) + 1):
        assert parse(markup, [text[:cut], text[cut:]]) == want, f"cut at {cut}"


@pytest.mark.parametrize("name", few(CASES, *(name for name in CASES if "," not in name)))
def test_any_prefix_gives_the_same_parts_in_one_piece_and_in_many(name: str) -> None:
    markup, text, _ = CASES[name]
    for n in range(len(text)):
        assert parse(markup, [text[:n]]) == parse(markup, list(text[:n])), f"the first {n} characters"


@pytest.mark.parametrize("n_text", few([10, 60], 10))
def test_scrambled_markup_gives_the_same_parts_however_it_is_cut(n_text: int) -> None:
    rng = random.Random(7)
    for name in dialects.NAMES:
        own = "".join(text for markup, text, _ in CASES.values() if is_of(markup, name))
        for _ in range(n_text):
            pieces = [
                own[(at := rng.randrange(len(own))) : at + rng.randrange(1, 40)] for _ in range(12)
            ]
            text = "".join(pieces)
            reader = markup(name, think=rng.random() < 0.5, is_open=rng.random() < 0.3)
            want = parse(reader, [text])
            assert parse(reader, list(text)) == want, (name, text)
            assert parse(reader, pieces) == want, (name, text)


@pytest.mark.parametrize("name", sorted({dialects.dialect(name).name for name in dialects.NAMES}))
def test_arguments_that_are_complete_are_json(name: str) -> None:
    for markup, text, _ in CASES.values():
        if is_of(markup, name) and "no JSON" not in text and not text.endswith(("Par", "</param")):
            for part in parse(markup, [text]):
                if isinstance(part, CallArguments) and part.text != "{text: 1}}":
                    assert isinstance(json.loads(part.text), dict)


HOSTILE = {
    "open marks": "<tool_call>" * 2_000,
    "open calls": '<tool_call>{"name": "a", "arguments": ' * 800,
    "deep lists": '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 20_000,
    "arguments before a name that never comes": '<tool_call>{"arguments": "' + "a" * 100_000,
    "spaces": "<tool_call>" + " " * 20_000,
    "half marks": "<tool_cal" * 3_000,
    "values that may have ended": "<tool_call><function=write><parameter=text>" + "\n</parameter>\n" * 2_000,
    "names": "<function=" * 3_000,
    "numbers": '<tool_call>{"name": "a", "arguments": ' + "1" * 20_000,
    "think marks": "<think>" * 4_000,
    "bars": f"<{BARS}tool▁calls▁begin{BARS}><{BARS}tool▁call▁begin{BARS}>" * 600,
    "invocations": f'<{BARS}DSML{BARS}tool_calls><{BARS}DSML{BARS}invoke name="' * 600,
    "pairs": "<tool_call>a<arg_key>" * 600 + "<tool_call>write<arg_key>text</arg_key><arg_value>" + "</arg_value>\n" * 2_000,
    "sections": "<|tool_calls_section_begin|><|tool_call_begin|>" * 600,
    "lists of calls": "<TOOLCALL>[{" * 800,
    "values that may end without a mark": "<tool_call><function=write><parameter=text>" + "\n</function>\n" * 2_000,
    "whole calls in a value": "<tool_call><function=write><parameter=text>" + "<tool_call>\n<function=a>" * 2_000,
    "odd end marks": "<tool_call><function=write><parameter=text>" + "</parameter" * 2_000,
    "calls in a thought": "<think>" + "<tool_call>\n<function=" * 2_000,
    "quotes": """<tool_call>{"name": 'a', "arguments": {'""" + "'\"\\'" * 4_000,
    "headers": "<|start|>assistant<|channel|>" * 800,
    "messages": "<|channel|>analysis<|message|>a<|end|>" * 800,
    "bare objects": '{"name": "write", "parameters": ' * 800,
}  # fmt: skip


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("name", sorted({dialects.dialect(name).name for name in dialects.NAMES}))
def test_hostile_answers_hold_little_back_and_have_the_same_parts_for_any_split(name: str) -> None:
    for what, text in HOSTILE.items():
        markup_ = markup(name, think=True)
        parser = markup_.parser()
        pieces = [text[at : at + 11] for at in range(0, len(text), 11)]
        for piece in pieces:
            parser.push(piece)
            held = parser._reader._text  # type: ignore[attr-defined]
            assert len(held) < 512, f"{what}: {len(held)} characters wait"
        assert parse(markup_, pieces) == parse(markup_, [text]), what


def test_a_call_with_many_spaces_is_cut_alike() -> None:
    for n in (255, 256, 257, 1000):
        text = (
            "a"
            + " " * n
            + "<tool_call>"
            + " " * n
            + '{"name": "write"}'
            + " " * n
            + "</tool_call>"
            + "\n" * n
            + "b"
        )
        assert parse(markup("hermes"), [text]) == parse(markup("hermes"), list(text)), n
        assert parse(markup("qwen3_coder"), [text]) == parse(markup("qwen3_coder"), list(text)), n


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value></tool_call> arguments", "glm45"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
        ('<|open|>message role="{{ role }}"<|sep|>{{ content }}<|close|>message<|sep|><|end_of_msg|>', "kimi_k3"),
        ('<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        ("<tool_call>arguments <arg_key> </tool_call>", None),
        ("{{ messages }}", None),
        ('<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">', "minimax_m2"),
        ("<|turn>model <|tool_call>call:{{ name }}{ <|\"|> <|channel>thought", "gemma4"),
        ("<|im_start|>system List of tools: <|tool_list_start|>[", "lfm2"),
        ("<|start_of_role|> respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ('<AVAILABLE_TOOLS></AVAILABLE_TOOLS><TOOLCALL>[{"name": "x", "arguments": {}}]</TOOLCALL> <think>', "nemotron_v2"),
        ('[AVAILABLE_TOOLS] [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "..."}]', "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "mistral_args"),
        ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}", "mistral_args"),
        ('<|header_start|>system<|header_end|> [func_name1(params_name1=params_value1)] {"name": "f", "parameters": {}}<|eot|>', "llama4"),
        ("<|start_header_id|> <function={{ name }}>{{ arguments }}</function>", "functionary_v31"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ m }}<|end|> <|call|>", "harmony"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call> <seed:think>", "seed_oss"),
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>', "cohere"),
        ("<assistant>\n<think> </think><tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n</tool_call>\n</assistant>", "glm45"),
        ("<|im_start|>assistant\n<think>\n</think>\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call> <tools>", "qwen3_coder"),
        ('to=self<|message|> <|eom|> <atem:function_calls>\n<atem:invoke name="f">\n</atem:invoke>\n</atem:function_calls>', "muse"),
        ("<own:tool_call><function=f><parameter=a></function>", None),
        ('<|start_of_role|>system <tools></tools> <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('<role>SYSTEM</role> <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('[|assistant|]<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "hermes"),
        ('<global_setting> <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call> <response>', "hermes"),
        ('<|start_header_id|> functools[{"name": ...}] "parameters"', "firefunction_v2"),
    ],
)  # fmt: skip
def test_a_template_tells_its_dialect(template: str, name: str | None) -> None:
    found = dialects.recognised(template)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("<think> </think>", THINK),
        ("<think> <response>", None),
        ("]~b]ai <think> </think> <response>", THINK),
        ("<|start_of_role|> <think> </think> <response>", GRANITE_THINK),
        ("<global_setting>think_mode=True <response> <|im_start|>assistant <think>", GRANITE_THINK),
        ("<seed:think> </seed:think>", SEED_THINK),
        ("<|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|>", COHERE_THINK),
        ("[THINK] [/THINK] <think> </think>", MISTRAL_THINK),
        ("<|turn>model <|channel>thought <channel|>", GEMMA4_THINK),
        ("<|start|> <|channel|> <|message|>", HARMONY),
    ],
)
def test_a_template_tells_its_marks_of_reasoning(template: str, marks: ThinkMarks | None) -> None:
    assert dialects.think_marks(template) is marks
