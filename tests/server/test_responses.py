"""`/v1/responses` as OpenAI's own client sees it, and to the letter where it does not look."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_client import App
from server_fakes import FakeEngine, Script

from pyspec.server.api.pictures import SentPictures
from pyspec.server.api.prompts import plain_message
from pyspec.server.api.responses import to_chat
from pyspec.server.api.schema import Message
from pyspec.server.settings import Limits
from pyspec.text.left_out import NO_IMAGE

LIMITS = Limits()
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def events(app: App, body: dict[str, Any]) -> list[dict[str, Any]]:
    return app.named_events("/v1/responses", body)


# -- answers ---------------------------------------------------------------------------------------------------------


def test_a_whole_response_has_openais_fields(gpt: openai.OpenAI) -> None:
    answer = gpt.responses.create(
        model="fake-1",
        input="Say hello",
        instructions="Be brief.",
        max_output_tokens=50,
        metadata={"a": "b"},
        store=True,
    )
    assert answer.id.startswith("resp_") and (answer.object, answer.status) == ("response", "completed")
    assert answer.output_text == "Hello, world" and answer.output[0].id.startswith("msg_")
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == (
        "Be brief.",
        50,
        {"a": "b"},
    )
    assert answer.error is None and answer.incomplete_details is None and answer.tools == []
    used = answer.usage
    assert used is not None and used.total_tokens == used.input_tokens + used.output_tokens
    assert used.output_tokens == len("Hello, world") and used.input_tokens_details.cached_tokens > 0
    assert used.output_tokens_details.reasoning_tokens == 0
    counted = gpt.responses.input_tokens.count(
        model="fake-1", input="Say hello", instructions="Be brief."
    )
    assert counted.input_tokens == used.input_tokens


def test_a_streams_events_come_in_openais_order_with_one_id_each(gpt: openai.OpenAI) -> None:
    found = list(gpt.responses.create(model="fake-1", input="Say hello", stream=True))
    kinds = [event.type.removeprefix("response.") for event in found]
    n = kinds.count("output_text.delta")
    assert n > 1
    assert kinds == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * n,
        ),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    answers = [event.response for event in found if hasattr(event, "response")]
    assert len({answer.id for answer in answers}) == 1 and answers[-1].output_text == "Hello, world"
    named = {event.item_id for event in found if hasattr(event, "item_id")}
    assert (
        named
        == {event.item.id for event in found if hasattr(event, "item")}
        == {answers[-1].output[0].id}
    )
    assert "".join(event.delta for event in found if hasattr(event, "delta")) == "Hello, world"


def test_the_limit_of_tokens_leaves_a_response_incomplete(app: App) -> None:
    whole = app.post("/v1/responses", {"input": "Say hello", "max_output_tokens": 4}).json()
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {
        "reason": "max_output_tokens"
    }
    assert whole["output"][0]["status"] == "incomplete" and whole["usage"]["output_tokens"] == 4
    last = events(app, {"input": "Say hello", "max_output_tokens": 4})[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


def test_progress_and_timings_are_in_the_events_llama_server_has_them_in(app: App) -> None:
    found = events(app, {"input": "Say hello" * 9, "return_progress": True, "timings_per_token": True})
    progress = [event for event in found if "prompt_progress" in event]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert progress and {event["type"] for event in progress} == {"response.in_progress"}
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    assert all(event["timings"]["predicted_per_second"] >= 0 for event in deltas)
    assert "timings" in found[-1] and "usage" in found[-1]["response"]


def test_a_failing_round_ends_a_stream_with_a_failed_response(app: App, engine: FakeEngine) -> None:
    engine.script = Script(fail_after=2)
    last = events(app, {"input": "Say hello"})[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "round failed"}


def test_errors_before_the_first_token_come_in_openais_envelope(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="previous_response_id"):
        gpt.responses.create(model="x", input="Go on", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="input"):
        gpt.responses.create(model="x", input=5)  # type: ignore[call-overload]


# -- requests --------------------------------------------------------------------------------------------------------


def chat(items: Any = "hi", **fields: Any) -> dict[str, Any]:
    return to_chat({"input": items} | fields, LIMITS)


def test_instructions_are_a_system_message_and_developers_keep_their_role_for_the_template() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
        {"role": "user", "content": "Three."},
        {"role": "user", "content": [{"type": "input_text", "text": "Four."}, {"type": "input_text", "text": "Five."}]},
    ]  # fmt: skip
    assert chat(items, instructions="One.")["messages"] == [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": "Two."},
        {"role": "user", "content": "Three."},
        {"role": "user", "content": "Four.\nFive."},
    ]


def test_thoughts_text_and_calls_of_one_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": "Look"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
    ]  # fmt: skip

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}

    assert chat(items)["messages"] == [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("c1", "{}"), call("c2", '{"at": 1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]


def test_tools_choice_effort_and_format_are_those_of_chat_completions() -> None:
    asked = chat(
        tools=[TOOL], tool_choice={"type": "function", "name": "look"}, reasoning={"effort": "low"}
    )
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert asked["reasoning_effort"] == "low"
    form = {"type": "json_schema", "name": "out", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": form})["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat(text={"format": {"type": "text"}, "verbosity": "low"})


def test_what_agents_send_along_is_no_reason_to_refuse() -> None:
    asked = chat(
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        truncation="disabled",
        seed=3,
    )
    assert asked.keys() == {"messages", "seed"}


@pytest.mark.parametrize("image", [{"image_url": "data:image/png;base64,AAAA"}, {"file_id": "f"}])
def test_an_image_that_a_tool_returned_is_a_line(image: dict[str, str]) -> None:
    parts = [{"type": "input_text", "text": "Shot:"}, {"type": "input_image", **image}]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    sent = {"input": [call, {"type": "function_call_output", "call_id": "a", "output": parts}]}
    value = to_chat(sent, Limits())["messages"][-1]
    message = Message.model_validate(value)
    assert plain_message(message, 0, SentPictures(None))["content"] == f"Shot:\n{NO_IMAGE}"
