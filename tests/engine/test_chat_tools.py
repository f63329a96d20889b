"""Chats with tools from Python: calls, streamed parts, and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_rig import DEMO

from pyspec.engine.api import Engine
from pyspec.engine.chat_tools import AnswerReading, ChatDelta, ChatResult, choice_of, tools_of
from pyspec.errors import ConfigError, RequestError
from pyspec.request import Delta, Done
from pyspec.text.answer_plan import ToolChoice
from pyspec.text.markup.dialect import AnswerMarkup, dialect
from pyspec.text.markup.reasoning import THINK

WEATHER = {
    "name": "weather",
    "description": "The weather of a few days.",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"type": "integer", "minimum": 2, "maximum": 7},
            "unit": {"enum": ["c", "f"]},
        },
        "required": ["days", "unit"],
        "additionalProperties": False,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": WEATHER}, CLOCK]
ASKED = [{"role": "user", "content": "How warm will it be?"}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 150}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(DEMO, np=2, ctx=512, warm_up=False, device="cpu") as engine:
        yield engine


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45", "llama3_json"])
@pytest.mark.parametrize(
    "tools", [TOOLS, [WEATHER, CLOCK["function"]]], ids=["as sent to OpenAI", "functions alone"]
)
def test_a_named_tool_is_called_with_arguments_that_fit(
    engine: Engine, parser: str, tools: list[Any]
) -> None:
    answer = engine.chat(ASKED, tools=tools, tool_choice="weather", tool_call_parser=parser, **SHORT)
    (call,) = answer.tool_calls
    assert call.name == "weather"
    assert call.values().keys() == {"days", "unit"}
    assert 2 <= call.values()["days"] <= 7
    assert answer.content == ""
    assert answer.finish in ("stop", "eos")
    assert call.arguments in json.dumps(answer.message).replace('\\"', '"')


def test_a_stream_tells_of_each_call_once_it_is_complete(engine: Engine) -> None:
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "tool_call_parser": "hermes",
        **SHORT,
    }
    events = list(engine.chat_stream(ASKED, **options))
    *deltas, done = events
    assert isinstance(done, Done) and all(isinstance(event, ChatDelta) for event in deltas)
    whole = engine.chat(ASKED, **options)
    told = [call for delta in deltas for call in delta.tool_calls]
    assert [(c.name, c.arguments) for c in told] == [
        (c.name, c.arguments) for c in whole.tool_calls
    ] and told
    assert "".join(delta.text for delta in events) == whole.text and len({c.id for c in told}) == len(
        told
    )

    async def again() -> tuple[ChatResult, list[Any]]:
        return await engine.achat(ASKED, **options), [
            e async for e in engine.achat_stream(ASKED, **options)
        ]

    answer, heard = asyncio.run(again())
    assert answer.text == whole.text and [c.name for c in answer.tool_calls] == [c.name for c in told]
    assert "".join(e.text for e in heard) == whole.text


def test_the_chat_goes_on_behind_a_call(engine: Engine) -> None:
    first = engine.chat(ASKED, tools=TOOLS, tool_choice="clock", tool_call_parser="hermes", **SHORT)
    (call,) = first.tool_calls
    assert call.values() == {}
    chat = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert engine.chat(chat, **SHORT).n_predicted > 0


def test_without_tools_an_answer_is_what_it_was(engine: Engine) -> None:
    for prompt in ("What is 3 x 4?", "Count from 1 to 10.", "\u00e4\u00f6 <tool_call>"):
        chat = [{"role": "user", "content": prompt}]
        answer = engine.chat(chat, **SHORT)
        assert answer.text == answer.content == engine.generate(chat, **SHORT).text
        assert not answer.tool_calls
        assert answer.message == {"role": "assistant", "content": answer.text}
    assert engine.chat(ASKED, tools=TOOLS, tool_choice="none", **SHORT).tool_calls == ()


def test_calls_stand_in_the_place_of_a_text_with_a_schema(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = engine.chat(ASKED, tools=TOOLS, tool_call_parser="hermes", json_schema=schema, **SHORT)
    assert answer.tool_calls or set(json.loads(answer.content)) == {"ok"}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tools": TOOLS, "tool_call_parser": "herms"}, RequestError, "tool_call_parser is 'herms'"),
        ({"tools": "weather"}, RequestError, "tools is 'weather'; want a list"),
        ({"tools": [3]}, RequestError, r"tools\[0\] is 3"),
        ({"tools": [{"function": {"name": ""}}]}, RequestError, r"tools\[0\].function.name is ''"),
        ({"tools": [WEATHER | {"parameters": []}]}, RequestError, "want a JSON Schema"),
        ({"tools": [WEATHER, WEATHER]}, RequestError, "two of them have the same name"),
        ({"tool_choice": "required"}, RequestError, "no tools to choose from"),
        ({"tools": TOOLS, "tool_choice": "sleep"}, RequestError, "tool_choice is 'sleep'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, RequestError, "tool_choice: a word, or an object"),
        ({"tool_chioce": "auto"}, ConfigError, "'tool_chioce'; did you mean 'tool_choice'"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_with_a_sentence(
    engine: Engine, options: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.chat(ASKED, **options)


def test_a_request_is_taken_in_place_of_a_prompt(engine: Engine) -> None:
    request = engine.request(ASKED, **SHORT)
    assert engine.generate(request).tokens == engine.generate(ASKED, **SHORT).tokens
    assert engine.encode(request) == request.prompt
    with pytest.raises(ConfigError, match="seed belongs where it is made"):
        engine.generate(request, seed=7)


@pytest.mark.parametrize("width", [1, 2, 5, 1000])
def test_an_answer_is_taken_apart_wherever_it_is_cut(width: int) -> None:
    text = 'so so</think>\n\nLook: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'
    reading = AnswerReading(
        AnswerMarkup(
            calls=dialect("hermes"), think=THINK, is_open=True, tools={"clock": {}, "weather": {}}
        )
    )
    heard = [reading.delta(Delta("r", (1,), text[i : i + width])) for i in range(0, len(text), width)]
    heard += [rest] if (rest := reading.rest("r")) is not None else []
    assert "".join(d.reasoning for d in heard) == "so so"
    assert "".join(d.content for d in heard).strip() == "Look:"
    calls = [call for d in heard for call in d.tool_calls]
    assert [(c.name, c.values()) for c in calls] == [("clock", {}), ("weather", {"days": 3})]


def test_arguments_that_were_cut_short_are_said_to_be() -> None:
    reading = AnswerReading(AnswerMarkup(calls=dialect("hermes"), tools={"weather": {}}))
    reading.delta(Delta("r", (1,), '<tool_call>\n{"name": "weather", "arguments": {"days": 3, "un'))
    rest = reading.rest("r")
    assert rest is not None
    with pytest.raises(RequestError, match="the arguments of weather are not JSON"):
        rest.tool_calls[0].values()


def test_choices_are_read_as_openai_s_clients_write_them() -> None:
    tools = tools_of(TOOLS)
    assert choice_of(None, tools) == ToolChoice() and choice_of("none", tools) == ToolChoice("none")
    named = ToolChoice("required", ("clock",), is_named=True)
    assert (
        choice_of({"type": "function", "function": {"name": "clock"}}, tools)
        == choice_of("clock", tools)
        == named
    )
