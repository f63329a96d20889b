"""Calls constrained by their tools' schemas, in every dialect: text under the grammar parses, and fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, Rig, plain_rig, rig
from known_texts import demo_prompts
from llguidance import LLMatcher

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTable
from pyspec.request import Grammar, SamplingParams
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import DIALECTS, AnswerMarkup, Dialect, dialect
from pyspec.text.markup.parts import CallArguments, CallBegin, Content

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "exact": {"type": "boolean"},
        },
        "required": ["days", "unit"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
B = "｜"
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"days": 3, "unit": "c"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n"
    "</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"days": 3, "unit": "c"}<|tool_call_end|><|tool_calls_section_end|>',
    "llama3_json": '{"name": "weather", "parameters": {"days": 3, "unit": "c"}}',
    "deepseek_v3": f"<{B}tool▁calls▁begin{B}><{B}tool▁call▁begin{B}>weather<{B}tool▁sep{B}>"
    f'{{"days": 3, "unit": "c"}}<{B}tool▁call▁end{B}><{B}tool▁calls▁end{B}>',
    "deepseek_v32": f'<{B}DSML{B}tool_calls>\n<{B}DSML{B}invoke name="weather">\n<{B}DSML{B}parameter name="days" string="false">3'
    f'</{B}DSML{B}parameter>\n<{B}DSML{B}parameter name="unit" string="true">c</{B}DSML{B}parameter>\n</{B}DSML{B}invoke>\n'
    f"</{B}DSML{B}tool_calls>",
}
BYTES = TokenTable([bytes([i]) for i in range(256)] + [b"</s>"], (256,), (256,)).build(
    lambda text: list(text.encode())
)


def required(spoken: Dialect, *, is_single: bool = False, thought: tuple[str, str] | None = None) -> str:
    lark = Lark()
    return lark.calls(spoken.rules(lark, TOOLS, is_single=is_single), thought)


def auto(spoken: Dialect) -> str:
    lark = Lark()
    return lark.text_or_calls(spoken.rules(lark, TOOLS, is_single=False))


def takes(source: str, text: str, after: str = "") -> bool:
    """Whether a grammar accepts all of a text, and an end there."""
    matcher = LLMatcher(BYTES, compile_text(Grammar(kind="lark", source=source, after=after)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = [*text.encode(), 256]
    return matcher.validate_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_grammar_takes_calls_as_the_dialect_writes_them_and_nothing_else(name: str) -> None:
    spoken, text = dialect(name), WRITTEN[name]
    must, may = required(spoken), auto(spoken)
    assert takes(must, text) and not takes(must, "So: " + text) and not takes(must, "text")
    assert takes(may, text) and takes(may, "So: " + text) and takes(may, "text") and takes(may, "")
    for wrong in ("weather", "days", "3", '"c"' if '"c"' in text else "c<" if "c<" in text else "c\n"):
        spoilt = text.replace(wrong, "x" + wrong)
        assert not takes(must, spoilt) and not takes(may, spoilt), spoilt
    assert takes(must, "hm</think>\n\n" + text, after="</think>")
    thinking = required(spoken, thought=("<think>", "</think>"))
    assert takes(thinking, "<think>hm</think>\n" + text) and takes(thinking, text)
    assert not takes(required(spoken, is_single=True), text + text)
    if name in ("hermes", "qwen3_coder"):
        assert takes(must, text + "\n" + text) and takes(may, "a" + text + text)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_may_stand_in_place_of_a_text_that_is_held_to_a_schema(name: str) -> None:
    """Either the call or the text, each valid: also behind reasoning."""
    spoken = dialect(name)
    calls, trigger = spoken.in_place(TOOLS, is_single=False, control={})
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    for after, before in (("", ""), ("</think>", "hm</think>\n")):
        held = Grammar(kind="json_schema", source=schema, calls=calls, after=after)
        matcher = LLMatcher(BYTES, compile_text(held))
        answer = '{"a": "' + WRITTEN[name].replace('"', "'").replace("\n", " ") + '"}'
        for text, fits in (
            (WRITTEN[name], True),
            (answer, True),
            ("So: " + WRITTEN[name], False),
            ('{"b": 1}', False),
            (answer + WRITTEN[name], False),
        ):
            tokens = [*(before + text).encode(), 256]
            assert (matcher.validate_tokens(tokens) == len(tokens)) == fits, text
        parser = AnswerMarkup(calls=spoken, tools=TOOLS, trigger=trigger).parser
        told = [part for p in [parser()] for part in (*p.push(answer), *p.finish())]
        assert "".join(part.text for part in told if isinstance(part, Content)) == answer
        assert len(told) == 1
        told = [part for p in [parser()] for part in (*p.push("\n" + WRITTEN[name]), *p.finish())]
        assert isinstance(told[0], CallBegin) and not any(isinstance(part, Content) for part in told)


@pytest.mark.parametrize("name", ["qwen3_coder", "deepseek_v32"])
def test_a_tool_that_names_no_arguments_takes_any(name: str) -> None:
    lark = Lark()
    source = lark.calls(dialect(name).rules(lark, {"weather": {}}, is_single=True))
    assert takes(source, WRITTEN[name].replace('"false"', '"true"'))


@pytest.fixture(scope="module")
def plain() -> Rig:
    return plain_rig(DEMO, ctx=512)


@pytest.fixture(scope="module")
def drafted() -> Rig:
    return rig(DEMO, np=4, ctx=512, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_model_calls_parses_and_fits_and_does_not_depend_on_drafts(
    plain: Rig, drafted: Rig, seed: int
) -> None:
    prompt = demo_prompts()[0][0]
    params = SamplingParams(seed=seed, temperature=0.9) if seed else replace(GREEDY, ignore_eos=False)
    asked = [
        (spoken, Grammar(kind="lark", source=required(spoken, is_single=True))) for spoken in DIALECTS
    ]
    want = [plain.generate(prompt, 160, params, grammar=grammar) for _, grammar in asked]
    found = [drafted.submit(prompt, 160, params, grammar=grammar) for _, grammar in asked]
    drafted.run()
    for (spoken, _), a, b in zip(asked, want, found, strict=True):
        assert (a.tokens, a.finish, a.text) == (b.tokens, b.finish, b.text), spoken.name
        parser = AnswerMarkup(calls=spoken, tools=TOOLS).parser()
        parts = [*parser.push(b.text), *parser.finish()]
        assert b.finish in ("stop", "eos"), f"{spoken.name}: {b.text!r}"
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        arguments = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
        assert len(names) == 1 and not [part for part in parts if isinstance(part, Content)], spoken.name
        jsonschema.validate(arguments, TOOLS[names[0]])
