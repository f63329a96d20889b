"""Tools of templates that know of none: described in the prompt, called in blocks that are held, and shown in histories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher
from server_client import App, app_of
from server_fakes import ByteTokenizer, FakeEngine, Script

from pyspec.constrain.trie import TokenTable
from pyspec.server.api import prompts
from pyspec.server.api.schema import ChatBody, validate
from pyspec.server.settings import ServerSettings
from pyspec.text.markup.dialect import dialect_reason
from pyspec.text.template import ChatTemplate

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LISTS = "{% for t in tools %}[tool]{{ t.function.name }}[/]{% endfor %}" + PLAIN
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a <b>city</b>. </s>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Genève"}'}}  # fmt: skip
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "Sun."}]},
    {"role": "user", "content": "So?"},
]
BYTES = TokenTable([bytes([i]) for i in range(256)] + [b"</s>"], (256,), (256,)).build(
    lambda text: list(text.encode())
)


def rendered(template: str, settings: ServerSettings | None = None, **body: Any) -> str:
    engine: Any = SimpleNamespace(
        template=ChatTemplate(template),
        info=SimpleNamespace(chat_template=template),
        tokenizer=ByteTokenizer(),
    )
    whole = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS} | body
    return prompts.rendering(engine, validate(ChatBody, whole), settings or ServerSettings()).text()


def test_the_prompt_describes_the_tools_and_how_to_call_them() -> None:
    text = rendered(PLAIN)
    assert text.startswith("<|im_start|>system\nYou can call these tools:\n")
    assert '"name": "weather"' in text
    assert '"name": "clock"' in text
    assert "<tool_call>" in text
    assert text.count("Hi") == 1
    assert "<b>" not in text and "</s>" not in text and "\\u003cb" in text, (
        "a description holds no control token"
    )
    beside = rendered(
        PLAIN, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert beside.count("<|im_start|>system") == 1 and "Be brief.\n\nYou can call" in beside
    assert "You can call" not in rendered(PLAIN, tool_choice="none") + rendered(PLAIN, tools=None)
    assert rendered(PLAIN, ServerSettings(tool_call_parser="hermes")) == rendered(PLAIN, tools=None)


def test_tools_that_a_template_with_a_dialect_of_its_own_leaves_out_are_listed() -> None:
    """DeepSeek R1's writes calls of a history and no tools."""
    source = PLAIN + "{% if false %}<tool_call></tool_call>arguments{% endif %}"
    text = rendered(source)
    assert text.startswith("<|im_start|>system\nYou can call these tools:\n")
    assert text.count('"name": "weather"') == 1
    assert "To call a tool" not in text, "how to call is the model's own"
    shown = source.replace(
        "{% for", "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}{% for", 1
    )
    assert rendered(shown).startswith("weather,clock,<|im_start|>user")
    assert rendered(source, tool_choice="none") == rendered(source, tools=None)


def test_a_template_that_lists_tools_is_left_to_it() -> None:
    text = rendered(LISTS)
    assert "[tool]weather[/][tool]clock[/]" in text
    assert "You can call" not in text
    assert "To call a tool" in text


def test_calls_and_results_of_a_history_are_shown() -> None:
    text = rendered(PLAIN, messages=HISTORY)
    block = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève"}}\n</tool_call>'
    assert f"assistant\nI look.\n{block}\n{block}<|im_end|>" in text
    assert (
        "user\n<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response>\nSo?<|im_end|>"
        in text
    )
    alone = rendered(PLAIN, messages=HISTORY, tools=None)
    assert block in alone and "Rain." in alone and "You can call" not in alone


def test_a_template_of_turns_without_a_system_gets_them_all_the_same() -> None:
    text = rendered(TURNS, messages=HISTORY[1:])
    assert text.startswith("[user]You can call these tools:")
    assert "Weather?[/]" in text
    assert text.endswith("So?[/][assistant]")


@pytest.mark.parametrize("arguments", ["null", "", None, {}, "{}", "no json", '{"a": NaN}'])
def test_any_arguments_of_a_history_are_shown(arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    text = rendered(
        PLAIN,
        messages=[
            *HISTORY[:2],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            HISTORY[-1],
        ],
    )
    assert '<tool_call>\n{"name": "clock", "arguments": ' in text


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def app(engine: FakeEngine) -> App:
    engine.info = replace(engine.info, chat_template=PLAIN, n_ctx=4096)
    return app_of(engine)


def fits(engine: FakeEngine, texts: Sequence[str]) -> Mapping[str, bool]:
    grammar = engine.seen[-1].grammar
    assert grammar is not None
    found = {}
    for text in texts:
        tokens = [*text.encode(), 256]
        found[text] = LLMatcher(BYTES, grammar.source).validate_tokens(tokens) == len(tokens)
    return found


WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"city": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "more", "fit"),
    [
        (None, {}, {"Hello": True, WEATHER: True, f"Well. {WEATHER}\n{CLOCK}": True, WRONG: False}),
        ("auto", {"parallel_tool_calls": False}, {"Hello": True, WEATHER: True, WEATHER + CLOCK: False}),
        ("required", {}, {"Hello": False, CLOCK: True, WEATHER + CLOCK: True, WRONG: False}),
        ({"type": "function", "function": {"name": "clock"}}, {}, {"Hello": False, CLOCK: True, WEATHER: False}),
    ],
    ids=["auto", "one", "required", "named"],
)  # fmt: skip
def test_calls_are_held(
    app: App, engine: FakeEngine, choice: Any, more: dict[str, Any], fit: dict[str, bool]
) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": choice,
        **more,
    }
    engine.script = Script(text=CLOCK)
    answer = app.post("/v1/chat/completions", body).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    assert fits(engine, list(fit)) == fit


def test_without_a_call_the_answer_is_text_and_none_stays_free(app: App, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    answer = app.post("/v1/chat/completions", body).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Hello, world", "stop")
    engine.script = Script(text=CLOCK)
    none = app.post("/v1/chat/completions", body | {"tool_choice": "none"}).json()["choices"][0]
    assert none["message"]["content"] == CLOCK and engine.seen[-1].grammar is None


def test_calls_are_streamed(app: App, engine: FakeEngine) -> None:
    engine.script = Script(text=f"Well.\n{WEATHER}\n{CLOCK}", width=2)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    deltas = [
        e["choices"][0]["delta"]
        for e in app.events("/v1/chat/completions", body)
        if e != "[DONE]" and e["choices"]
    ]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["weather", "clock"]  # fmt: skip
    texts = ["".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in range(2)]
    assert [json.loads(text) for text in texts] == [{"city": "Rom"}, {}]


def test_schemas_that_can_not_be_kept_leave_the_form_unless_they_must_be(
    app: App, engine: FakeEngine
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "wombat"}}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}  # fmt: skip
    assert app.post("/v1/chat/completions", body).status_code == 200
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert fits(engine, [text, "Hello"]) == {text: True, "Hello": True}
    assert app.post("/v1/chat/completions", body | {"tool_choice": "required"}).status_code == 400


@pytest.mark.parametrize(
    ("template", "parser", "want"),
    [
        (PLAIN, "auto", "generic: the chat template has no dialect"),
        ("[TOOL_CALLS]", "auto", "mistral: the chat template says so"),
        (PLAIN, "kimi", "kimi_k2: --tool-call-parser kimi"),
        (PLAIN, "generic", "generic: --tool-call-parser generic"),
        (PLAIN, "none", "not read"),
    ],
)
def test_the_log_says_which_dialect_and_why(template: str, parser: str, want: str) -> None:
    assert want in dialect_reason(template, parser)
