"""`/v1/messages` as Anthropic's own client sees it, and to the letter where it does not look."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from server_client import App, app_of, refusal
from server_fakes import FakeEngine, Script

from pyspec.errors import NotSupported
from pyspec.server.api.anthropic import to_chat
from pyspec.server.api.pictures import SentPictures
from pyspec.server.api.prompts import plain_message
from pyspec.server.api.schema import Message, image_part
from pyspec.server.app import create_app
from pyspec.server.settings import Limits, ServerSettings
from pyspec.text.left_out import NO_IMAGE

if TYPE_CHECKING:
    import anthropic  # imports for two seconds: tests that use it do so when they run

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]
LIMITS = Limits()
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


def events(app: App, body: dict[str, Any]) -> list[dict[str, Any]]:
    return app.named_events("/v1/messages", body)


def test_models_are_listed_in_anthropics_form(claude: anthropic.Anthropic, app: App) -> None:
    (found,) = claude.models.list()
    assert (found.type, found.id, found.display_name) == ("model", "fake-1", "fake-1")
    assert found.created_at.year > 2000 and found.created_at.tzinfo is not None
    assert claude.models.retrieve("fake-1") == found
    page = app.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("fake-1", "fake-1", False)
    assert app.get("/v1/models").json()["data"][0]["object"] == "model"


# -- answers ---------------------------------------------------------------------------------------------------------


def test_a_whole_message_has_anthropics_fields(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="fake-1", max_tokens=50, system="Be brief.", messages=HELLO)
    assert message.id.startswith("msg_") and (message.type, message.role) == ("message", "assistant")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [
        ("text", "Hello, world")
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    used = message.usage
    assert used.cache_read_input_tokens is not None and used.cache_creation_input_tokens == 0
    counted = claude.messages.count_tokens(model="fake-1", system="Be brief.", messages=HELLO)
    assert used.input_tokens + used.cache_read_input_tokens == counted.input_tokens
    assert used.output_tokens == len("Hello, world")


def test_a_stream_adds_up_to_the_whole_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model="fake-1", max_tokens=50, messages=HELLO)
    with claude.messages.stream(model="fake-1", max_tokens=50, messages=HELLO) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert "".join(texts) == "Hello, world" and len(texts) > 1
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert streamed.stop_reason == whole.stop_reason


def test_a_streams_events_come_in_anthropics_order(app: App) -> None:
    found = events(app, {"max_tokens": 50, "messages": HELLO})
    kinds = [event["type"] for event in found]
    n = kinds.count("content_block_delta")
    assert n > 1
    deltas = ["content_block_delta"] * n
    assert kinds == [
        *(
            "message_start",
            "content_block_start",
            *deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ),
    ]
    start = found[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    assert {event["index"] for event in found if "index" in event} == {0}
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_a_stop_sequence_and_the_limit_of_tokens_are_told(claude: anthropic.Anthropic) -> None:
    stopped = claude.messages.create(
        model="x", max_tokens=50, messages=HELLO, stop_sequences=["wor", "zzz"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")
    cut = claude.messages.create(model="x", max_tokens=4, messages=HELLO)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)


def test_a_silent_stream_is_pinged(app: App, engine: FakeEngine) -> None:
    engine.script = Script(prefill_s=0.3)
    found = events(app, {"max_tokens": 5, "messages": HELLO, "sse_ping_interval": 0.05})
    kinds = [event["type"] for event in found]
    assert "ping" in kinds and kinds[0] == "message_start"


def test_a_failing_round_ends_a_stream_with_anthropics_error(
    claude: anthropic.Anthropic, engine: FakeEngine
) -> None:
    import anthropic

    engine.script = Script(fail_after=2)
    with (
        pytest.raises(anthropic.APIStatusError, match="round failed"),
        claude.messages.stream(model="x", max_tokens=50, messages=HELLO) as stream,
    ):
        list(stream.text_stream)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors_come_in_anthropics_envelope(app: App, engine: FakeEngine) -> None:
    def error(response: Any) -> tuple[int, str]:
        body = response.json()
        assert body["type"] == "error"
        assert body["error"]["message"]
        assert set(body["error"]) == {"type", "message"}
        return response.status_code, body["error"]["type"]

    post = app.post
    assert error(post("/v1/messages", {"max_tokens": 5})) == (400, "invalid_request_error")
    assert error(post("/v1/messages", {"messages": HELLO, "mcp_servers": [{}]})) == (400, "invalid_request_error")  # fmt: skip
    assert error(app.get("/v1/messages")) == (405, "invalid_request_error")
    too_long = [{"role": "user", "content": "x" * 600}]
    assert error(post("/v1/messages", {"messages": too_long})) == (400, "invalid_request_error")
    keyed = app_of(engine, api_keys=("secret",))
    assert error(keyed.post("/v1/messages", {"messages": HELLO})) == (401, "authentication_error")
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    assert keyed.post("/v1/messages", {"messages": HELLO}, headers=headers).status_code == 200
    small = app_of(engine, limits=Limits(body=100))
    assert error(small.post("/v1/messages", {"messages": HELLO * 9})) == (413, "request_too_large")
    engine.is_alive = False
    assert error(post("/v1/messages", {"messages": HELLO})) == (529, "overloaded_error")
    assert error(post("/v1/messages/count_tokens", {"messages": []})) == (400, "invalid_request_error")


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_several_answers_are_refused(app: App, name: str) -> None:
    assert refusal(app.post("/v1/messages", {"messages": HELLO, name: 2})).startswith(
        f"{name}: there is one answer"
    )
    assert app.post("/v1/messages", {"messages": HELLO, name: 1}).status_code == 200


def test_a_full_queue_is_a_rate_limit_with_a_time_to_come_back(engine: FakeEngine) -> None:
    engine.n_queue = 0
    response = app_of(engine).post("/v1/messages", {"messages": HELLO})
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) > 0


def test_a_bug_is_an_api_error(engine: FakeEngine) -> None:
    engine.template = 5  # type: ignore[assignment]
    app = create_app(engine, ServerSettings())
    with pytest.raises(AttributeError):  # the framework raises on, for its log
        App(app).post("/v1/messages", {"messages": HELLO})


# -- requests --------------------------------------------------------------------------------------------------------


def chat(**fields: Any) -> dict[str, Any]:
    return to_chat({"messages": HELLO} | fields, LIMITS)


def test_system_blocks_are_one_system_message() -> None:
    blocks = [{"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": " Two."}]  # fmt: skip
    assert chat(system=blocks)["messages"] == [{"role": "system", "content": "One. Two."}, *HELLO]
    assert chat(system="One. Two.")["messages"] == chat(system=blocks)["messages"]


def test_results_and_text_of_a_user_stay_in_their_order() -> None:
    said = [
        {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "no "}] * 2},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "Go on."},
    ]  # fmt: skip
    assert chat(messages=[{"role": "user", "content": said}])["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "content": "no no "},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ]


def test_what_the_model_said_is_one_message_with_its_thoughts_and_calls() -> None:
    said = [
        {"type": "thinking", "thinking": "Look first.", "signature": ""},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "Größe", "n": 1}},
    ]
    messages = chat(messages=[*HELLO, {"role": "assistant", "content": said}])["messages"]
    call = {"name": "look", "arguments": '{"at": "Größe", "n": 1}'}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Look first.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        }
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)  # fmt: skip
def test_tools_and_their_choice_are_those_of_chat_completions(
    choice: Any, expected: dict[str, Any]
) -> None:
    asked = chat(tools=[TOOL], tool_choice=choice)
    function = {"name": "look", "parameters": TOOL["input_schema"]}
    assert asked["tools"] == [{"type": "function", "function": function}]
    assert {name: asked[name] for name in expected} == expected


def test_thinking_effort_and_format_are_those_of_chat_completions() -> None:
    asked = chat(thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"})
    assert asked["reasoning_budget_tokens"] == 1024 and asked["chat_template_kwargs"] == {
        "enable_thinking": True
    }
    assert asked["reasoning_effort"] == "low"
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    schema = {"type": "object"}
    asked = chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert asked["response_format"]["json_schema"]["schema"] == schema
    # Its name in the beta
    asked = chat(
        output_config={"effort": "low"}, output_format={"type": "json_schema", "schema": schema}
    )
    assert asked["response_format"]["json_schema"]["schema"] == schema and "output_format" not in asked


# -- blocks with text, and an overflow -------------------------------------------------------------------------------


def messages_of(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return to_chat({"messages": [{"role": role, "content": list(blocks)}]}, LIMITS)["messages"]


def test_documents_whose_source_is_text_are_text_with_their_titles() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The cat is red."}
    part = {"type": "content", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": " Two."}]}  # fmt: skip
    found = messages_of(
        {"type": "document", "title": "Note", "context": "of today", "source": source},
        {"type": "document", "source": part},
        {"type": "document", "source": {"type": "content", "content": "Plain."}},
        {"type": "search_result", "title": "Hit", "source": "https://x", "content": [{"type": "text", "text": "Found."}]},
        {"type": "text", "text": "Which colour?"},
    )  # fmt: skip
    assert [each["text"] for each in found[0]["content"]] == [
        "Note\nof today\nThe cat is red.\n", "One. Two.\n", "Plain.\n", "Hit\nhttps://x\nFound.\n", "Which colour?",
    ]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document", "source": source}]}  # fmt: skip
    assert messages_of(result)[0]["content"] == "The cat is red.\n"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    mixed = {"type": "document", "title": "Plan", "source": {"type": "content", "content": [part["content"][0], image]}}  # fmt: skip
    found = messages_of(mixed)[0]["content"]
    assert [each.get("text") for each in found] == ["Plan\nOne.", None, "\n"]
    assert found[1] == image_part("data:image/png;base64,AAAA", "messages.0.content.0.source.content.1")
    with pytest.raises(NotSupported, match="loaded without --mmproj"):
        plain_message(Message.model_validate({"role": "user", "content": found}), 0, SentPictures(None))
    image["source"]["type"] = "file"  # a tool's: a line
    of_tool = {"type": "tool_result", "tool_use_id": "a", "content": [mixed]}
    assert messages_of(of_tool)[0]["content"] == f"Plan\nOne.{NO_IMAGE}\n"
    for kind in ("base64", "url", "file"):
        with pytest.raises(NotSupported, match="'document'"):
            messages_of({"type": "document", "source": {"type": kind, "data": "AAAA"}})


def test_an_image_in_a_tools_result_is_a_line_and_one_of_a_user_is_refused() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    parts = [{"type": "text", "text": "Shot:\n"}, image]
    found = messages_of({"type": "tool_result", "tool_use_id": "a", "content": parts})
    message = Message.model_validate(found[0])
    assert plain_message(message, 0, SentPictures(None))["content"] == f"Shot:\n\n{NO_IMAGE}"
    message = Message.model_validate(messages_of(image)[0])
    with pytest.raises(NotSupported, match="loaded without --mmproj"):
        plain_message(message, 0, SentPictures(None))


def test_developers_speak_here_too(app: App, engine: FakeEngine) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert app.post("/v1/messages", {"messages": turns, "max_tokens": 5}).status_code == 200
    assert "Be brief." in bytes(i for i in engine.seen[-1].prompt if i < 256).decode()


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(app: App) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}
    error = app.post("/v1/messages", body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.match(r"prompt is too long: \d{3} tokens > 512 maximum", error["message"])
