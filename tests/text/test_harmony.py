"""Answers in harmony's form as a chat plans them: what the parser has to see, and where the grammar of a text stands."""

from __future__ import annotations

import itertools
from typing import Any

from llguidance import LLMatcher
from text_vocab import bpe

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTable
from pyspec.request import Grammar
from pyspec.server.api.prompts import opening
from pyspec.text.answer_plan import (
    AnswerPlan,
    CallPlan,
    ToolChoice,
    call_plan,
    plan_answer,
    text_grammar,
)
from pyspec.text.markup.dialect import AnswerMarkup, recognised, think_marks
from pyspec.text.markup.harmony import CALL, HARMONY, MARKS, RETURN
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

TEMPLATE = (
    "{%- for m in messages -%}<|start|>{{ m.role }}{%- if m.thinking and m.tool_calls and m.content -%}"
    "{{ raise_exception('both') }}{%- endif -%}{%- if m.thinking -%}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- endif -%}<|message|>{{ m.content }}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
CONTROL = (*MARKS, RETURN, CALL, "<|endoftext|>")
TOKENIZER = Tokenizer.from_metadata(bpe("gpt-4o", control=CONTROL, keys={"eos_token_id": 256 + 5}))
IDS = {mark: 256 + i for i, mark in enumerate(CONTROL)}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    for name in ("f", "g")
]  # fmt: skip
TEXT = Grammar(kind="json_schema", source='{"type": "object", "required": ["b"]}')


def planned(calls: CallPlan, *, has_grammar: bool) -> AnswerPlan:
    return plan_answer(
        TOKENIZER, calls, AnswerMarkup(think=HARMONY), lambda g: g, has_grammar=has_grammar
    )


def plan_of(choice: str, *, parallel: bool = True) -> CallPlan:
    dialect = recognised(TEMPLATE)
    return call_plan(TOOLS, ToolChoice(choice), dialect, parallel=parallel)  # type: ignore[arg-type]


def fits(grammar: Grammar, *pieces: str) -> bool:
    table = TokenTable.of(TOKENIZER, 256 + len(CONTROL))
    matcher = LLMatcher(table.build(lambda text: list(text.encode())), compile_text(grammar))
    ids = list(itertools.chain(*([IDS[p]] if p in IDS else p.encode() for p in pieces)))
    return matcher.validate_tokens([*ids, IDS[RETURN]]) == len(ids) + 1


THOUGHT = "<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", "assistant"
FINAL = "<|channel|>", "final", "<|message|>"
CALLED = "<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>"


def test_a_template_has_its_marks_and_the_parser_sees_them_without_tools_too() -> None:
    assert think_marks(TEMPLATE) is HARMONY and (recognised(TEMPLATE) or HARMONY).name == "harmony"  # type: ignore[union-attr]
    plan = planned(CallPlan(), has_grammar=False)
    assert set(plan.shown) >= {IDS[mark] for mark in MARKS} and plan.grammar is None
    said = bpe(
        "gpt-4o", control=CONTROL, keys={"eos_token_id": IDS[RETURN], "eot_token_id": IDS["<|end|>"]}
    )
    for tokenizer in (TOKENIZER, Tokenizer.from_metadata(said)):  # some files name it as an end
        assert tokenizer.eog >= {IDS[RETURN], IDS[CALL]} and IDS["<|end|>"] not in tokenizer.eog


def test_a_text_is_held_behind_the_final_header_alone() -> None:
    plan = planned(CallPlan(), has_grammar=True)
    grammar = text_grammar("response_format", TEXT, lambda g: g, plan.around())
    assert fits(grammar, *THOUGHT, *FINAL, '{"b": 1}') and fits(grammar, *FINAL, '{"b": 1}')
    assert not fits(grammar, *THOUGHT, *FINAL, '{"c": 1}') and not fits(grammar, '{"b": 1}')
    begun = text_grammar("response_format", TEXT, lambda g: g, plan.around('{"b"'))
    assert begun.lead == "" and begun.begun == '{"b"'


def test_a_call_may_come_instead_of_a_text_that_is_held() -> None:
    plan = planned(plan_of("auto"), has_grammar=True)
    grammar = text_grammar("response_format", TEXT, lambda g: g, plan.around())
    assert fits(grammar, *THOUGHT, *FINAL, '{"b": 1}') and fits(grammar, *THOUGHT, *CALLED, '{"a": 1}')
    assert not fits(grammar, *THOUGHT, *CALLED, '{"a": "x"}')


def test_calls_are_held_where_they_must_be() -> None:
    must = planned(plan_of("required"), has_grammar=False).grammar
    may = planned(plan_of("auto", parallel=False), has_grammar=False).grammar
    assert planned(plan_of("auto"), has_grammar=False).grammar is None
    for grammar in (must, may):
        assert grammar is not None and fits(grammar, *THOUGHT, *CALLED, '{"a": 1}')
        assert not fits(grammar, *THOUGHT, *CALLED, '{"a": "x"}')
        assert fits(grammar, *FINAL, "Hi.") == (grammar is may)


def test_reasoning_of_earlier_answers_goes_by_the_name_that_the_template_reads() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "b", "reasoning_content": "So."},
    ]
    text = ChatTemplate(TEMPLATE).render(chat)
    assert "<|message|>Hm.\n\nI look.<|end|>" in text
    assert "<|message|>So.<|end|><|message|>b<|end|>" in text


def test_answers_with_several_calls_go_apart_where_a_template_shows_one() -> None:
    """Each with its own result behind it, whatever the order of the results; a template that shows all gets them together."""
    one = (
        "{%- for m in messages -%}[{{ m.role }}]{%- if m.thinking -%}({{ m.thinking }}){%- endif -%}{{ m.content }}"
        "{%- if m.tool_calls -%}<{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}>{%- endif -%}{%- endfor -%}"
    )
    every = one.replace("{%- if m.tool_calls -%}", "{%- for c in m.tool_calls or [] -%}").replace(
        "m.tool_calls[0]", "c"
    )
    every = every.replace("{%- endif -%}{%- endfor -%}", "{%- endfor -%}{%- endfor -%}")
    calls = [
        {"type": "function", "id": f"id{name}", "function": {"name": name, "arguments": "{}"}}
        for name in "ab"
    ]
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "of b", "tool_call_id": "idb"},
        {"role": "tool", "content": "of a", "tool_call_id": "ida"},
        {"role": "user", "content": "bye"},
    ]
    text = "[user]hi[assistant](Hm.)<a{}>[tool]of a[assistant]<b{}>[tool]of b[user]bye"
    assert ChatTemplate(one).render(chat) == text
    assert (
        ChatTemplate(every).render(chat)
        == "[user]hi[assistant](Hm.)<a{}><b{}>[tool]of b[tool]of a[user]bye"
    )


def test_an_answer_that_has_begun_goes_on_in_its_message() -> None:
    last = {"content": "Once", "reasoning_content": "Hm."}
    start = "<|channel|>analysis<|message|>Hm."
    assert opening("<|start|>assistant", last, "reasoning_content", HARMONY) == start
    want = f"{start}<|end|><|start|>assistant<|channel|>final<|message|>Once"
    assert opening("<|start|>assistant", last, "content", HARMONY) == want
