"""A turn with tools through Anthropic's and OpenAI's own clients: the model thinks and calls, its calls' results go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from server_client import app_of
from server_fakes import FakeEngine, Script

TEMPLATE = 'Calls: <tool_call>{"name": ..., "arguments": {}}</tool_call>; thoughts: <think> </think> enable_thinking'
ANSWER = (
    "<think>\nSunny?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
OUTPUT_FORMAT = {"type": "json_schema", "schema": SCHEMA}
SAME = {"name": "out", "schema": SCHEMA, "strict": True}


@pytest.fixture
def engine(engine: FakeEngine) -> FakeEngine:
    engine.info = replace(engine.info, chat_template=TEMPLATE)
    engine.script = Script(text=ANSWER)
    return engine


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def test_anthropics_client_gets_thoughts_and_calls_and_gives_results(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    asked = {"model": "x", "max_tokens": 200, "tools": tools}
    whole = claude.messages.create(messages=messages, **asked)
    with claude.messages.stream(messages=messages, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, said, call = message.content
        assert (thought.type, thought.thinking) == ("thinking", "Sunny?") and (said.type, said.text) == (
            "text",
            "I look.",
        )
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Zürich"})
        assert message.stop_reason == "tool_use"
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    engine.script = Script(text="Sunny.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun", "is_error": False}
    messages += [
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(messages=messages, **asked)
    assert (last.content[0].text, last.stop_reason) == ("Sunny.", "end_turn")
    assert "tool: sun" in prompt_of(engine)


def test_openais_client_gets_thoughts_and_calls_and_gives_results(
    gpt: openai.OpenAI, engine: FakeEngine
) -> None:
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    whole = gpt.responses.create(model="x", input=items, tools=tools)
    with gpt.responses.stream(model="x", input=items, tools=tools) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thought, said, call = answer.output
        assert thought.type == "reasoning" and thought.content[0].text == "Sunny?"
        assert said.type == "message" and answer.output_text == "I look."
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "weather",
            '{"city": "Zürich"}',
        )
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Sunny?")
    engine.script = Script(text="Sunny.")
    kept = [item.to_dict(exclude_none=True) for item in whole.output]
    items += [
        *kept,
        {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "sun"},
    ]
    last = gpt.responses.create(model="x", input=items, tools=tools)
    assert last.output_text == "Sunny." and "tool: sun" in prompt_of(engine)


def test_without_a_choice_calls_are_text(claude: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    answer = claude.messages.create(
        model="x", max_tokens=200, messages=messages, tools=tools, tool_choice={"type": "none"}
    )
    assert [block.type for block in answer.content] == ["thinking", "text"] and answer.stop_reason == "end_turn"  # fmt: skip


def test_thoughts_have_their_budget_and_can_be_switched_off(engine: FakeEngine) -> None:
    app = app_of(engine)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    assert (
        app.post(
            "/v1/messages", body | {"thinking": {"type": "enabled", "budget_tokens": 7}}
        ).status_code
        == 200
    )
    budget = engine.seen[-1].think_budget
    assert budget is not None and budget.n_tokens == 7
    assert "enable_thinking=True" in prompt_of(engine)
    assert app.post("/v1/messages", body | {"thinking": {"type": "disabled"}}).status_code == 200
    assert engine.seen[-1].think_budget is None and "enable_thinking=False" in prompt_of(engine)
    assert app.post("/v1/responses", {"input": "Hi", "reasoning": {"effort": "none"}}).status_code == 200
    assert "enable_thinking=False" in prompt_of(engine)


def test_an_assistants_message_at_the_end_goes_on(engine: FakeEngine) -> None:
    engine.info = replace(engine.info, chat_template="")
    app = app_of(engine)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is ("}]
    assert app.post("/v1/messages", {"messages": messages}).status_code == 200
    assert prompt_of(engine) == "user: Hi\nassistant: The answer is ("


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "output_config": {"format": OUTPUT_FORMAT}}),
        ("/v1/responses", {"input": "Hi", "text": {"format": OUTPUT_FORMAT | {"name": "out"}}}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_object"}}}),
    ],
)  # fmt: skip
def test_a_format_holds_the_answer_as_it_does_a_chats(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.info = replace(engine.info, chat_template="")
    app = app_of(engine)
    response = app.post(path, body)
    assert response.status_code == 200, response.text
    held = engine.seen[-1].grammar
    wanted = (
        {"type": "json_object"}
        if "json_object" in str(body)
        else {"type": "json_schema", "json_schema": SAME}
    )
    chat = {"messages": [{"role": "user", "content": "Hi"}], "response_format": wanted}
    assert app.post("/v1/chat/completions", chat).status_code == 200
    assert held is not None and held == engine.seen[-1].grammar
