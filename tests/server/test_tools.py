"""Tool calls, reasoning and answers that go on, through chat completions as OpenAI's own client sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from server_client import App, app_of
from server_fakes import FakeEngine, Script

from pyspec.constrain.trie import TokenTable
from pyspec.text.left_out import NO_IMAGE

HERMES = 'Calls: <tool_call>{"name": ..., "arguments": {}}</tool_call>; thoughts: <think> </think> enable_thinking'
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "clock"}},
]  # fmt: skip
BYTES = TokenTable([bytes([i]) for i in range(256)] + [b"</s>"], (256,), (256,)).build(
    lambda text: list(text.encode())
)
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
ANSWER = (
    '<think>\nSunny?\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.info = replace(engine.info, chat_template=HERMES)
    engine.script = Script(text=ANSWER)
    return engine


def ask(app: App, status: int = 200, **body: Any) -> Any:
    response = app.post("/v1/chat/completions", {"messages": HELLO} | body)
    assert response.status_code == status, response.text
    return response.json()


def prompt_of(engine: FakeEngine) -> str:
    return bytes(i for i in engine.seen[-1].prompt if i < 256).decode()


# -- calls -----------------------------------------------------------------------------------------------------------


def test_the_client_gets_calls_whole(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(model="x", messages=HELLO, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning_content": "Sunny?"}
    calls = choice.message.tool_calls
    assert calls is not None
    found = [(c.function.name, json.loads(c.function.arguments)) for c in calls if c.type == "function"]
    assert found == [("weather", {"city": "Zürich"}), ("clock", {})]
    assert calls[0].id.startswith("call_") and calls[0].id != calls[1].id


@pytest.mark.parametrize("width", [1, 2, 7, 1000])
def test_the_client_gets_calls_in_pieces(gpt: openai.OpenAI, engine: FakeEngine, width: int) -> None:
    engine.script = Script(text=ANSWER, width=width)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    content = reasoning = finish = ""
    for chunk in gpt.chat.completions.create(model="x", messages=HELLO, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.function.name:
                assert call.id and call.type == "function" and call.index == len(names)
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert (content, reasoning, finish) == ("I look.", "Sunny?", "tool_calls")
    assert names == {0: "weather", 1: "clock"}
    assert {i: json.loads(text) for i, text in arguments.items()} == {0: {"city": "Zürich"}, 1: {}}


def test_an_answer_of_calls_alone_has_no_content(app: App, engine: FakeEngine) -> None:
    engine.script = Script(text='<tool_call>{"name": "clock"}</tool_call>')
    message = ask(app, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["function"] == {
        "name": "clock",
        "arguments": "{}",
    }


def test_a_call_that_is_cut_off_ends_with_length(app: App, engine: FakeEngine) -> None:
    choice = ask(app, tools=TOOLS, max_tokens=90)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Z'


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "cut",
    ["<", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool'],
)
def test_half_a_mark_is_no_content_where_the_answer_is_calls(
    app: App, engine: FakeEngine, cut: str, is_streamed: bool
) -> None:
    engine.script = Script(text=cut)
    for choice in ("required", "auto"):
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
        if is_streamed:
            events = [
                e["choices"][0]["delta"]
                for e in app.events("/v1/chat/completions", body)
                if e != "[DONE]" and e["choices"]
            ]
            content = "".join(delta.get("content") or "" for delta in events)
        else:
            content = (
                ask(app, **{k: v for k, v in body.items() if k != "messages"})["choices"][0]["message"][
                    "content"
                ]
                or ""
            )
        is_call = "clock" in cut  # the call is whole, and what stands behind it is its end
        assert content in cut and bool(content) == (choice == "auto" and not is_call)


@pytest.mark.parametrize(
    "body", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "parse_tool_calls": False}]
)
def test_calls_that_nobody_asked_for_stay_text(app: App, body: dict[str, Any]) -> None:
    message = ask(app, **body)["choices"][0]["message"]
    assert "tool_calls" not in message and message["content"].startswith("I look.\n<tool_call>")


def test_a_server_that_reads_no_calls_refuses_tools(engine: FakeEngine) -> None:
    said = ask(app_of(engine, tool_call_parser="none"), 400, tools=TOOLS)["error"]["message"]
    assert "--tool-call-parser" in said and "hermes" in said
    engine.info = replace(engine.info, chat_template="plain")
    app = app_of(engine, tool_call_parser="hermes")
    assert len(ask(app, tools=TOOLS)["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "no tool 'other'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tools": TOOLS, "tool_choice": "required", "parse_tool_calls": False}, "parse_tool_calls"),
    ],
)  # fmt: skip
def test_a_choice_that_can_not_be_made_is_refused(app: App, body: dict[str, Any], said: str) -> None:
    assert said in ask(app, 400, **body)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "is_held"),
    [
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}}, True),
        ({"tools": TOOLS, "parallel_tool_calls": False}, True),
        ({"tools": [{"type": "function", "function": {"name": "clock", "strict": True}}]}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
    ],
)
def test_calls_that_must_be_or_are_strict_are_held_by_a_grammar(
    app: App, engine: FakeEngine, body: dict[str, Any], is_held: bool
) -> None:
    ask(app, **body)
    assert (engine.seen[-1].grammar is not None) == is_held


FORM: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "says", "calls"),
    [("auto", "{}", True), ("none", "{}", False), ("required", "", True), ({"type": "function", "function": {"name": "clock"}}, "", True)],
    ids=["auto", "none", "required", "named"],
)  # fmt: skip
def test_an_answer_is_held_to_a_schema_or_calls_tools(
    app: App, engine: FakeEngine, choice: Any, says: str, calls: bool
) -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    body = {"tools": TOOLS, "tool_choice": choice, "response_format": FORM}
    for text in ('{"a": 3}', call):
        engine.script = Script(text=text)
        message = ask(app, **body)["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == (calls and text == call)
        if text != call:
            assert message["content"] == text
    grammar = engine.seen[-1].grammar
    assert grammar is not None and not LLMatcher.validate_grammar(grammar.source)
    matcher = LLMatcher(BYTES, grammar.source)
    for text, fits in (
        ('{"a": 3}', bool(says)),
        (call, calls),
        ('{"a": "x"}', False),
        ('{"a": 3, "b": 1}', False),
        ("text", False),
        ('{"a": 3}' + call, False),
    ):
        tokens = [*text.encode(), 256]
        assert (matcher.validate_tokens(tokens) == len(tokens)) == fits, text
    wrong = ask(
        app,
        400,
        **body
        | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wombat"}}}},
    )
    assert "response_format" in wrong["error"]["message"]


def test_a_text_that_speaks_of_calls_is_no_call_under_a_schema(app: App, engine: FakeEngine) -> None:
    said = json.dumps({"a": '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'})
    engine.script = Script(text=said)
    message = ask(app, tools=TOOLS, response_format={"type": "json_object"})["choices"][0]["message"]
    assert message["content"] == said and not message.get("tool_calls")


def test_tools_whose_schemas_can_not_be_kept_take_any_arguments_unless_they_must_be(
    app: App, engine: FakeEngine
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "wombat"}}}}
    engine.script = Script(text="{}")
    ask(app, tools=[{"type": "function", "function": function}], response_format=FORM)
    said = ask(
        app,
        400,
        tools=[{"type": "function", "function": {**function, "strict": True}}],
        response_format=FORM,
    )
    assert said["error"]["message"].startswith(
        "tools: their schemas can not be enforced beside response_format"
    )


def test_schemas_that_can_not_be_kept_are_refused(app: App, engine: FakeEngine) -> None:
    function = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}}  # fmt: skip
    tools = [{"type": "function", "function": function}]
    ask(app, tools=tools)
    engine.info = replace(engine.info, chat_template="<tool_call> <function= <parameter=")
    assert "pattern of argument 'a'" in ask(app, 400, tools=tools)["error"]["message"]


# -- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "stream", "content", "reasoning"),
    [
        (None, False, "Hi", "a"),
        ("auto", False, "Hi", "a"),
        ("deepseek", True, "Hi", "a"),
        ("deepseek-legacy", False, "Hi", "a"),
        ("deepseek-legacy", True, "<think>a</think>\n\nHi", ""),
        ("none", False, "<think>a</think>\n\nHi", ""),
    ],
)
def test_reasoning_goes_where_its_format_says(
    app: App, engine: FakeEngine, form: str | None, stream: bool, content: str, reasoning: str
) -> None:
    engine.script = Script(text="<think>a</think>\n\nHi")
    body = {"messages": HELLO, "stream": stream} | ({"reasoning_format": form} if form else {})
    if stream:
        deltas = [
            e["choices"][0]["delta"] for e in app.events("/v1/chat/completions", body) if e != "[DONE]"
        ]
    else:
        deltas = [app.post("/v1/chat/completions", body).json()["choices"][0]["message"]]
    assert "".join(d.get("content") or "" for d in deltas) == content
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == reasoning


@pytest.mark.parametrize(
    ("settings", "body", "passed"),
    [
        ({}, {}, "enable_thinking=True"),
        ({}, {"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking=False"),
        ({"reasoning": "off"}, {}, "enable_thinking=False"),
        ({"reasoning": "off"}, {"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking=True"),
        ({}, {"reasoning_effort": "none"}, "enable_thinking=False"),
        ({}, {"reasoning_effort": "high"}, "reasoning_effort=high"),
        ({"chat_template_kwargs": {"x": 1}}, {"chat_template_kwargs": {"x": 2}}, "x=2"),
    ],
)  # fmt: skip
def test_the_template_hears_whether_to_think(
    engine: FakeEngine, settings: dict[str, Any], body: dict[str, Any], passed: str
) -> None:
    ask(app_of(engine, **settings), **body)
    assert passed in prompt_of(engine).split("\n")


def test_a_budget_reaches_the_engine(app: App, engine: FakeEngine) -> None:
    ask(app, reasoning_budget_tokens=5, reasoning_budget_message="Enough.")
    budget = engine.seen[-1].think_budget
    assert budget is not None and (budget.n_tokens, budget.end, budget.is_open) == (5, "</think>", False)
    assert bytes(budget.forced) == b"Enough.</think>"
    ask(app)
    assert engine.seen[-1].think_budget is None
    ask(app_of(engine, reasoning_budget=0))
    assert engine.seen[-1].think_budget is not None


# -- answers that go on ----------------------------------------------------------------------------------------------


def test_an_assistants_message_at_the_end_is_continued(app: App, engine: FakeEngine) -> None:
    last = {"role": "assistant", "content": "Well, "}
    for body in (
        {},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
    ):
        ask(app, messages=[*HELLO, last], **body)
        assert prompt_of(engine).endswith("\nassistant: Well, ")
    kept = ask(app_of(engine, prefill_assistant=False), messages=[*HELLO, last])
    assert kept["choices"] and prompt_of(engine).endswith(
        "assistant: Well, \nenable_thinking=True\nassistant: "
    )
    shown = app.post("/apply-template", {"messages": [*HELLO, last]}).json()["prompt"]
    assert shown.endswith("\nassistant: Well, ")


def test_reasoning_at_the_end_is_continued(app: App, engine: FakeEngine) -> None:
    engine.script = Script(text=" more</think>Hi")
    last = {"role": "assistant", "content": "", "reasoning_content": "I think"}
    message = ask(app, messages=[*HELLO, last])["choices"][0]["message"]
    assert prompt_of(engine).endswith("assistant: <think>\nI think")
    assert (message["reasoning_content"], message["content"]) == ("more", "Hi")
    ask(app, messages=[*HELLO, last | {"content": "So"}])
    assert prompt_of(engine).endswith("assistant: <think>\nI think\n</think>\n\nSo")


@pytest.mark.parametrize(
    ("messages", "body", "said"),
    [
        ([*HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], {}, "2 or more assistant"),
        (HELLO, {"continue_final_message": True}, "not the assistant's"),
        ([{"role": "assistant", "content": "a"}], {"continue_final_message": True, "add_generation_prompt": True}, "together"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], {}, "tool calls"),
    ],
)  # fmt: skip
def test_what_can_not_be_continued_is_refused(
    app: App, messages: list[Any], body: dict[str, Any], said: str
) -> None:
    assert said in ask(app, 400, messages=messages, **body)["error"]["message"]


# -- older clients ---------------------------------------------------------------------------------------------------


def test_functions_are_tools_under_their_first_name(app: App, engine: FakeEngine) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = ask(app, functions=functions)["choices"][0]
    want = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == want and "tool_calls" not in choice["message"]
    history: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": want},
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    ask(app, messages=history, functions=functions, function_call="none")
    assert "sun" in prompt_of(engine)
    ask(app, functions=functions, function_call={"name": "clock"})
    assert engine.seen[-1].grammar is not None and "weather" not in engine.seen[-1].grammar.source
    ask(app, 400, functions=functions, tools=TOOLS)


def test_functions_are_called_in_a_stream(app: App) -> None:
    body = {"messages": HELLO, "functions": [tool["function"] for tool in TOOLS], "stream": True}
    text = app.post("/v1/chat/completions", body).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    calls = [each["delta"]["function_call"] for each in choices if "function_call" in each["delta"]]
    assert "".join(call.get("name", "") for call in calls) == "weather"
    assert json.loads("".join(call["arguments"] for call in calls)) == {"city": "Zürich"}
    assert choices[-1]["finish_reason"] == "function_call" and "tool_calls" not in text


def test_an_image_that_a_tool_returned_is_a_line(app: App, engine: FakeEngine) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    turns: list[Any] = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Shot:"}, image]}
    ask(app, messages=[*turns, result])
    assert NO_IMAGE in prompt_of(engine)
    ask(app, 400, messages=[{"role": "user", "content": [image]}])


def test_openapis_nullable_allows_null(app: App, engine: FakeEngine) -> None:
    city = {"type": "string", "nullable": True}
    weather = {"name": "weather", "strict": True, "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]}}  # fmt: skip
    ask(app, tools=[{"type": "function", "function": weather}])
    assert '"null"' in engine.seen[-1].grammar.source.replace("\\", "")  # type: ignore[union-attr]
