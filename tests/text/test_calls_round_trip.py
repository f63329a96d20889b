"""The parser reads the calls that a grammar allows: the same names and values, for any split of the text."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher
from sampling import few
from text_vocab import bpe

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTable
from pyspec.request import Grammar
from pyspec.text.markup import dialect as dialects
from pyspec.text.markup import harmony
from pyspec.text.markup.answer_grammar import grammar_of_calls, shown_tokens
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.markup.elements import DSML, Elements
from pyspec.text.markup.members import GEMMA4
from pyspec.text.markup.named import DEEPSEEK, KIMI
from pyspec.text.markup.parts import CallArguments, CallBegin, Content
from pyspec.text.markup.reasoning import COHERE_THINK, MUSE_THINK
from pyspec.text.markup.xtml import begins, ends, escaped
from pyspec.text.tokenizer import Tokenizer

BYTES = TokenTable([bytes([i]) for i in range(256)] + [b"</s>"], (256,), (256,)).build(
    lambda text: list(text.encode())
)
KEYS = (
    "plain", "my key", "a.b", 'say "hi"', "it's", "a>b", "ключ", "名前", "a:b", "x-y_z", "ends here ", " begins", "{x}", "a<b",
    "a\\b", "$ref", "1", "a>", "parameter=", "</parameter>", '" string="true">', "[ARGS]", "e\u0301", "🦊",
)  # fmt: skip
TOOL_NAMES = (
    "bash", "mcp__files__read", "a.b-c", "read file", "f:1", "ask>er", "mcp/go", "名前", 'q"q', "f<x",
)  # fmt: skip
TEXTS = (
    "", "ls", " spaced ", "two\nlines\n", "\n\nfirst", "True", "null", "3", '{"a": 1}', "'x'", "it's \"quoted\" \\ \t",
    "</parameter>", "<parameter=plain>\n5", "x\n</function>\n</tool_call>", "</tool_call>", "<tool_call>\n<function=bash>\n",
    "<arg_key>plain</arg_key>\n<arg_value>1", "</arg_value></tool_call>", "</｜DSML｜parameter></｜DSML｜invoke>",
    "[TOOL_CALLS]bash[ARGS]{}", "]</TOOLCALL>", "<think>a</think>", "grep -n '</parameter>' notes.txt", "日本語 🦊",
)  # fmt: skip
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "integer": (0, -7, 10**12),
    "number": (1.5, -2e-7, 3),
    "boolean": (True, False),
    "array": ([], [1, "a", None, [True]], ["</parameter>\n", "x\n"]),
    "object": ({}, {"A": 1, "b c": [True, None]}, {"t": "</tool_call>\n</function>"}),
    "null": (None,),
}
Call = tuple[str, dict[str, Any]]
SINGLE = ("llama3_json", "llama4", "harmony")  # one call an answer


def _xml(call: Call, line: str = "\n") -> str:
    rows = [f"<parameter={k}>{line}{_bare(v)}{line}</parameter>\n" for k, v in call[1].items()]
    return f"\n<function={call[0]}>\n{''.join(rows)}</function>\n"


def _dsml(call: Call) -> str:
    rows = [
        f'{DSML.key_marks[0]}{k}" string="{str(isinstance(v, str)).lower()}">{_bare(v)}{DSML.value_end}'
        for k, v in call[1].items()
    ]
    return f"\n{DSML.call_marks[0]}{call[0]}{DSML.call_marks[1]}{''.join(rows)}{DSML.end}"


def _glm(call: Call) -> str:
    rows = [f"<arg_key>{k}</arg_key>\n<arg_value>{_bare(v)}</arg_value>\n" for k, v in call[1].items()]
    return f"{call[0]}\n{''.join(rows)}</tool_call>"


def _invoke(call: Call, of: str = "") -> str:
    rows = [f'<{of}parameter name="{k}">{_bare(v)}</{of}parameter>\n' for k, v in call[1].items()]
    return f'\n<{of}invoke name="{call[0]}">\n{"".join(rows)}</{of}invoke>'


def _xtml(i: int, call: Call) -> str:
    kinds = {str: "string", bool: "boolean", list: "array", dict: "object", type(None): "null"}
    rows = [
        f'<|open|>argument key="{escaped(k)}" type="{kinds.get(type(v), "number")}"<|sep|>{_bare(v)}{ends("argument")}'
        for k, v in call[1].items()
    ]
    return f'<|open|>call tool="{escaped(call[0])}" index="{i}"<|sep|>{"".join(rows)}{ends("call")}'


def _python(call: Call) -> str:
    return (
        f"{call[0]}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in call[1].items())})"
    )


def _gemma4(call: Call) -> str:
    pairs = sorted(call[1].items(), key=lambda pair: pair[0].lower())
    return f"{GEMMA4.before[0]}{call[0]}{{{','.join(f'{k}:{_marked(v)}' for k, v in pairs)}}}{GEMMA4.close[0]}"


def _marked(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA4.quote}{value}{GEMMA4.quote}"
    if isinstance(value, dict):
        keys = {k: k if k.isalnum() else _marked(k) for k in value}
        return "{" + ",".join(f"{keys[k]}:{_marked(v)}" for k, v in value.items()) + "}"
    return "[" + ",".join(map(_marked, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(call: Call, key: str = "arguments", name: str = "name") -> str:
    return json.dumps({name: call[0], key: call[1]}, ensure_ascii=False)


def _numbered(i: int, call: Call) -> str:
    return f'\n    {{"tool_call_id": "{i}", {_object(call, "parameters", "tool_name")[1:]}'


def _arguments(call: Call) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def written(name: str, calls: list[Call]) -> str:
    """Calls in the form of a model."""
    first = calls[0]
    return {
        "qwen3_coder": lambda: "\n".join(f"<tool_call>{_xml(c)}</tool_call>" for c in calls),
        "seed_oss": lambda: "\n".join(f"<seed:tool_call>{_xml(c, '')}</seed:tool_call>" for c in calls),
        "glm45": lambda: "<tool_call>" + "\n<tool_call>".join(map(_glm, calls)),
        "deepseek_v32": lambda: DSML.open[0] + "".join(map(_dsml, calls)) + "\n" + DSML.close[0],
        "deepseek_v3": lambda: DEEPSEEK.open[0] + "".join(f"{DEEPSEEK.mark[0]}{c[0]}{DEEPSEEK.separators[0]}{_arguments(c)}{DEEPSEEK.end[0]}" for c in calls) + DEEPSEEK.close[0],
        "kimi_k2": lambda: KIMI.open[0] + "".join(f"{KIMI.mark[0]}functions.{c[0]}:{i}{KIMI.separators[0]}{_arguments(c)}{KIMI.end[0]}" for i, c in enumerate(calls)) + KIMI.close[0],
        "kimi_k3": lambda: begins("tools") + "".join(_xtml(i, c) for i, c in enumerate(calls, 1)) + ends("tools"),
        "hermes": lambda: "<tool_call>" + "\n<tool_call>".join(f"\n{_object(c)}\n</tool_call>" for c in calls),
        "nemotron_v2": lambda: "<TOOLCALL>[" + ", ".join(map(_object, calls)) + "]</TOOLCALL>",
        "cohere": lambda: "<|START_ACTION|>[" + ",".join(_numbered(i, c) for i, c in enumerate(calls)) + "\n]<|END_ACTION|>",
        "firefunction_v2": lambda: "functools[" + ", ".join(map(_object, calls)) + "]",
        "mistral": lambda: "[TOOL_CALLS] [" + ", ".join(_object(c)[:-1] + ', "id": "abcDEF123"}' for c in calls) + "]",
        "mistral_args": lambda: "".join(f"[TOOL_CALLS]{c[0]}[CALL_ID]abcDEF12{i}[ARGS]{_arguments(c)}" for i, c in enumerate(calls)),
        "functionary_v31": lambda: "<function=" + "\n<function=".join(f"{c[0]}>{_arguments(c)}</function>" for c in calls),
        "granite": lambda: "<|tool_call|>[" + ", ".join(map(_object, calls)) + "]",
        "minimax_m2": lambda: "<minimax:tool_call>" + "".join(map(_invoke, calls)) + "\n</minimax:tool_call>",
        "muse": lambda: "<atem:function_calls>" + "".join(_invoke(c, "atem:") for c in calls) + "\n</atem:function_calls>",
        "lfm2": lambda: "<|tool_call_start|>[" + ", ".join(map(_python, calls)) + "]<|tool_call_end|>",
        "gemma4": lambda: GEMMA4.open[0] + GEMMA4.open[0].join(map(_gemma4, calls)),
        "llama3_json": lambda: _object(first, "parameters"),
        "llama4": lambda: _object(first, "parameters"),
        "harmony": lambda: f" to=functions.{first[0]}<|channel|>commentary <|constrain|>json<|message|>{_arguments(first)}",
    }["hermes" if name == "generic" else name]()  # fmt: skip


def schema_of(kinds: Mapping[str, str], needed: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}, "required": needed}  # fmt: skip


def some(rng: random.Random) -> tuple[dict[str, Any], list[Call]]:
    """Tools with hostile names, and calls of them."""
    names = rng.sample(TOOL_NAMES, rng.choice((1, 1, 3)))
    kinds = {
        name: {
            key: rng.choice(["string", "string", *OTHERS])
            for key in rng.sample(KEYS, rng.randrange(1, 5))
        }
        for name in names
    }
    calls = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(names)
        values = {
            key: rng.choice(TEXTS if kind == "string" else OTHERS[kind])
            for key, kind in kinds[name].items()
        }
        calls.append((name, values))
    return {name: schema_of(kinds[name], list(kinds[name])) for name in names}, calls


def takes(source: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, compile_text(Grammar(kind="lark", source=source)))
    ids = [*text.encode(), 256]
    return matcher.validate_tokens(ids) == len(ids)


def read(markup: AnswerMarkup, pieces: list[str]) -> tuple[list[Call], str]:
    parser = markup.parser()
    names, texts, content = list[str](), list[str](), ""
    for part in [*(p for piece in pieces for p in parser.push(piece)), *parser.finish()]:
        if isinstance(part, CallBegin):
            names.append(part.name)
            texts.append("")
        elif isinstance(part, CallArguments):
            texts[part.index] += part.text
        elif isinstance(part, Content):
            content += part.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)], content


def cut(text: str, rng: random.Random) -> list[str]:
    at = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.choice((0, 3, 20))))})
    return [text[a:b] for a, b in itertools.pairwise(at)]


ALL = sorted({dialects.dialect(name).name for name in dialects.NAMES})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", few([25, 150], 25))
def test_calls_that_a_grammar_takes_are_read_as_they_were_meant(name: str, n: int) -> None:
    rng, speaks, n_taken = random.Random(35), dialects.dialect(name), 0
    for _ in range(n):
        tools, calls = some(rng)
        calls = calls[:1] if name in SINGLE else calls
        lark = Lark()
        source = lark.calls(speaks.rules(lark, tools, is_single=len(calls) == 1))
        text = written(name, calls)
        if not takes(source, text):  # a value that holds the mark which ends it can not be written in it
            assert speaks.is_bare, (text, tools)
            continue
        n_taken += 1
        for is_calls_only in (True, False):
            markup = AnswerMarkup(
                calls=speaks, tools=tools, is_constrained=True, is_calls_only=is_calls_only
            )
            assert read(markup, cut(text, rng)) == (calls, ""), (text, tools)
    assert n_taken > 2 * n / 3


@pytest.mark.sampled(most=6)
@pytest.mark.parametrize("name", ALL)
def test_free_calls_under_any_name_are_read_alike(name: str) -> None:
    """Without a grammar, with values that contain no markup."""
    rng, speaks = random.Random(7), dialects.dialect(name)
    plain = [text for text in TEXTS if "<" not in text and "[" not in text]
    for _ in range(100):
        tools, calls = some(rng)
        calls = [
            (tool, {k: rng.choice(plain) if isinstance(v, str) else v for k, v in values.items()})
            for tool, values in calls
        ]
        calls = calls[:1] if name in SINGLE else calls
        text = written(name, calls)
        assert read(AnswerMarkup(calls=speaks, tools=tools), cut(text, rng)) == (calls, ""), (
            text,
            tools,
        )


@pytest.mark.parametrize("name", [name for name in ALL if dialects.dialect(name).is_bare])
def test_a_word_that_a_value_can_not_be_is_not_among_those_a_grammar_takes(name: str) -> None:
    syntax = dialects.dialect(name).syntax
    end = (
        syntax.value_end
        if isinstance(syntax, Elements)
        else {"kimi_k3": ends("argument")}.get(name, GEMMA4.quote)
    )
    words = ["a", f"b{end}c", "d"]
    tools = {"f": {"type": "object", "properties": {"w": {"enum": words}}, "required": ["w"]}}
    lark = Lark()
    source = lark.calls(dialects.dialect(name).rules(lark, tools, is_single=True))
    found = [takes(source, written(name, [("f", {"w": word})])) for word in words]
    assert found == [True, False, True]


HARMONY = {mark: 257 + i for i, mark in enumerate(harmony.MARKS)}
OF_HARMONY = TokenTable(
    [bytes([i]) for i in range(256)] + [b"<|return|>", *(mark.encode() for mark in HARMONY)],
    (256, *HARMONY.values()),
    (256,),
).build(lambda text: list(text.encode()))
SPLIT = re.compile("(" + "|".join(map(re.escape, HARMONY)) + ")")


@pytest.mark.parametrize("control", [HARMONY, {}], ids=["control tokens", "texts"])
def test_chains_of_messages_are_held_from_their_first_mark_on(control: dict[str, int]) -> None:
    """Reasoning and preambles are free; then comes a call in either form of its header, or a final message, free or held itself."""
    tools = {"f": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    thought = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    calls = [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}',
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": "x"}',
        ' to=functions.f<|channel|>analysis<|message|>{"a": "x"}',
        '<|channel|>commentary to=functions.f json<|message|>{"a": "x"}',
    ]
    final, held = "<|channel|>final<|message|>", '<|channel|>final <|constrain|>json<|message|>{"b": 1}'

    def fits(grammar: Grammar, text: str) -> bool:
        parts = SPLIT.split(text) if control else [text]
        ids = [id_ for part in parts for id_ in ([control[part]] if part in control else part.encode())]
        matcher = LLMatcher(OF_HARMONY if control else BYTES, compile_text(grammar))
        assert not matcher.is_error(), matcher.get_error()
        return matcher.validate_tokens([*ids, 256]) == len(ids) + 1

    def grammar(**options: Any) -> Grammar:
        return Grammar(kind="lark", source=harmony.answer(Lark(control), tools, **options))

    schema = json.dumps({"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]})
    lead = harmony.answer(Lark(control), {}, body="body")
    text = Grammar(kind="json_schema", source=schema, lead=lead)
    must, may = grammar(is_calls_only=True), grammar()
    for before in ("", thought, thought + said, said):
        assert all(fits(must, before + call) and fits(may, before + call) for call in calls)
        assert fits(may, before + final + "So.") and not fits(must, before + final + "So.")
        assert fits(text, before + held) and not fits(text, before + final + "So.")
        assert not fits(text, before + calls[0])
    for grammar_ in (must, may):
        assert not fits(grammar_, calls[0].replace('"x"', "1")) and not fits(grammar_, calls[1][:-1])
        assert not fits(grammar_, calls[0].replace("functions.f", "functions.g"))
        assert not fits(grammar_, calls[0] + calls[0]) and not fits(grammar_, thought)
    opened = grammar(is_open=True)
    assert fits(opened, thought.removeprefix("<|channel|>analysis<|message|>") + calls[0])


@pytest.mark.parametrize("name", ["muse", "cohere"])
def test_control_tokens_around_reasoning_and_text_may_stand_in_an_answer(name: str) -> None:
    """Of a real vocabulary: the grammar of an answer takes what the model writes, and its parser sees the marks."""
    think, end = (MUSE_THINK, "<|eot|>") if name == "muse" else (COHERE_THINK, "<|END_OF_TURN_TOKEN|>")
    marks = (
        "<|start|> <|message|> <|eom|>"
        if name == "muse"
        else " ".join((think.start, think.end, *think.strays))
    )
    marks += "" if name == "muse" else " <|START_ACTION|> <|END_ACTION|>"
    keys = {"eos_token_id": 256}
    tokenizer = Tokenizer.from_metadata(bpe(control=[end, *marks.split()], keys=keys))
    tools = {"f": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    thought = {
        "muse": " to=self<|message|>Hm.<|eom|><|start|>assistant",
        "cohere": "<|START_THINKING|>Hm.<|END_THINKING|>",
    }[name]
    head, said = {
        "muse": (" to=f<|message|>", " to=user<|message|>Hi."),
        "cohere": ("", "<|START_RESPONSE|>Hi.<|END_RESPONSE|>"),
    }[name]
    called = head + written(name, [("f", {"a": "x"})])
    pieces = [tokenizer.piece(i).encode() for i in range(256, 256 + 1 + len(marks.split()))]
    table = TokenTable(
        [bytes([i]) for i in range(256)] + pieces, tuple(range(256, 256 + len(pieces))), (256,)
    ).build(lambda text: list(text.encode()))
    for must in (True, False):
        markup = AnswerMarkup(dialects.dialect(name), think, tools=tools, is_calls_only=must)
        grammar = grammar_of_calls(tokenizer, markup, is_single=False)

        def fits(text: str, grammar: Grammar = grammar) -> bool:
            ids = tokenizer.encode(text, add_special=False)
            matcher = LLMatcher(table, compile_text(grammar))
            assert not matcher.is_error(), matcher.get_error()
            return matcher.validate_tokens([*ids, 256]) == len(ids) + 1

        assert fits(called) and fits(thought + called)
        assert fits(said) is fits(thought + said) is not must
        for wrong in (called.replace('"f"', '"g"'), called.replace('"a"', '"b"'), called + "x"):
            assert not fits(wrong) and not fits(thought + wrong)
        assert {tokenizer.piece(i) for i in shown_tokens(tokenizer, markup)} >= {*marks.split()}
        assert read(markup, [thought + called]) == ([("f", {"a": "x"})], "")


CONTROL = {"[TOOL_CALLS]": 257, "[CALL_ID]": 258, "[ARGS]": 259}
TOKENS = TokenTable(
    [bytes([i]) for i in range(256)] + [b"</s>", *(mark.encode() for mark in CONTROL)],
    (256, *CONTROL.values()),
    (256,),
).build(lambda text: list(text.encode()))


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
def test_a_mark_that_is_a_control_token_is_allowed_as_one_where_it_may_stand(
    name: str, must_call: bool
) -> None:
    tools = {"f": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    lark = Lark(CONTROL)
    rules = dialects.dialect(name).rules(lark, tools, is_single=False)
    source = lark.calls(rules) if must_call else lark.text_or_calls(rules)

    def fits(*pieces: str) -> bool:
        tokens = [
            token
            for piece in pieces
            for token in ([CONTROL[piece]] if piece in CONTROL else piece.encode())
        ]
        matcher = LLMatcher(TOKENS, compile_text(Grammar(kind="lark", source=source)))
        return matcher.validate_tokens([*tokens, 256]) == len(tokens) + 1

    call = {
        "mistral": ("[TOOL_CALLS]", '[{"name": "f", "arguments": {"a": "x"}}]'),
        "mistral_args": ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "x"}'),
    }[name]
    assert fits(*call) and fits("".join(call))
    assert not fits(*call[:-1], '{"a": 1}') and not fits("[ARGS]") and not fits(*call, " and more")
    assert fits("Well. ", *call) == fits("Well.") == (not must_call)
    if name == "mistral_args":
        assert fits(
            "[TOOL_CALLS]", "f", "[CALL_ID]", "abc123XYZ", "[ARGS]", '{"a": "[ARGS] <f>"}', *call
        )
        assert not fits(*call[:-1], '{"a": "', "[ARGS]", '"}')


def test_nested_values_of_gemma4_are_held_to_their_schemas() -> None:
    speaks, q = dialects.dialect("gemma4"), GEMMA4.quote
    point = {"type": "object", "properties": {"y": {"type": "integer"}, "X": {"type": "number"}}, "required": ["y"]}  # fmt: skip
    schema = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/point"},
            "list": {"type": "array", "items": {"enum": ["a", "b"]}},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["at"],
        "$defs": {"point": point},
    }
    lark = Lark()
    source = lark.calls(speaks.rules(lark, {"f": schema, "g": {"type": "object"}}, is_single=False))

    def call(text: str) -> str:
        return f"{GEMMA4.open[0]}call:{text}{GEMMA4.close[0]}"

    good = [
        "f{at:{y:3}}",
        f"f{{at:{{X:1.5,y:3}},list:[{q}a{q},{q}b{q}],maybe:null}}",
        f"f{{at:{{y:-1}},maybe:{q}x,y{q}}}",
        f"g{{any:{{{q}b c{q}:[1,true,{{}}]}}}}",
        "g{}",
    ]
    bad = [
        "f{}", "f{at:{y:1.5}}", "f{at:{X:1}}", f"f{{at:{{y:1}},list:[{q}c{q}]}}", "f{at:{y:1},maybe:2}", "h{}",
    ]  # fmt: skip
    assert [takes(source, call(text)) for text in good] == [True] * len(good)
    assert [takes(source, call(text)) for text in bad] == [False] * len(bad)
    assert takes(source, "".join(map(call, good)))


def test_schemas_of_several_tools_may_refer_to_definitions_of_one_name_beside_a_text() -> None:
    own = {"properties": {"a": {"$ref": "#/$defs/p"}}, "required": ["a"]}
    tools = {kind: {**own, "$defs": {"p": {"type": kind}}} for kind in ("integer", "string")}
    for name in ("llama3_json", "hermes", "lfm2", "gemma4"):
        source, _ = dialects.dialect(name).in_place(tools, is_single=True, control={})
        for kind, value in itertools.product(tools, (1, "x")):
            is_right = isinstance(value, str) == (kind == "string")
            assert takes(source, written(name, [(kind, {"a": value})])) == is_right
