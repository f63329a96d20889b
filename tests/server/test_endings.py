"""Why an answer ended, as every interface says it: the model, a grammar, a stop string, the limit; text or calls; whole or streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from server_client import App
from server_fakes import FakeEngine, Script

from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings

TEMPLATE = '<tool_call>{"name": ..., "arguments": {}}</tool_call>'
CALL = '<tool_call>\n{"name": "clock", "arguments": {"at": "noon"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages", "/v1/responses")


@dataclass(frozen=True)
class Way:
    """How an answer ends, and its form on each API: chat, completions, native with its word, messages with the string, responses."""

    text: str
    chat: str
    native: tuple[str, str]
    messages: tuple[str, str | None]
    responses: str = "completed"
    is_held: bool = False
    limit: int = 400
    stop: str = ""
    has_tools: bool = False
    must_call: bool = False
    schema: bool = False


WAYS = {
    "the model ends a text": Way("Hello", "stop", ("eos", ""), ("end_turn", None)),
    "a grammar ends a text": Way("Hello", "stop", ("eos", ""), ("end_turn", None), is_held=True),
    "a schema ends a text": Way('{"at": "x"}', "stop", ("eos", ""), ("end_turn", None), is_held=True, schema=True),
    "a schema beside tools ends a text": Way(
        '{"at": "x"}', "stop", ("eos", ""), ("end_turn", None), is_held=True, schema=True, has_tools=True
    ),
    "a stop string": Way("Hello END", "stop", ("word", "END"), ("stop_sequence", "END"), stop="END"),
    "a stop string that is not there": Way("Hello", "stop", ("eos", ""), ("end_turn", None), stop="END"),
    "a grammar, and a stop string that is not there": Way(
        "Hello", "stop", ("eos", ""), ("end_turn", None), stop="END", is_held=True
    ),
    "the limit": Way("Hello", "length", ("limit", ""), ("max_tokens", None), "incomplete", limit=3),
    "the limit, under a grammar": Way("Hello", "length", ("limit", ""), ("max_tokens", None), "incomplete", limit=3, is_held=True),
    "the model ends calls": Way(CALL, "tool_calls", ("eos", ""), ("tool_use", None), has_tools=True),
    "a grammar ends calls": Way(CALL, "tool_calls", ("eos", ""), ("tool_use", None), has_tools=True, must_call=True, is_held=True),
    "the limit inside a call": Way(
        CALL, "length", ("limit", ""), ("max_tokens", None), "incomplete", has_tools=True, must_call=True, limit=50
    ),
    "the limit before a call has a name": Way(
        CALL, "length", ("limit", ""), ("max_tokens", None), "incomplete", has_tools=True, must_call=True, limit=14
    ),
}  # fmt: skip


def body_of(path: str, way: Way) -> dict[str, Any]:
    """The request, in an interface's words."""
    function = {"name": "clock", "parameters": SCHEMA}
    if path == "/v1/messages":
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": way.limit}
        body |= {"stop_sequences": [way.stop]} if way.stop else {}
        body |= {"tools": [{"name": "clock", "input_schema": SCHEMA}]} if way.has_tools else {}
        body |= {"tool_choice": {"type": "tool", "name": "clock"}} if way.must_call else {}
        return body | (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            if way.schema
            else {}
        )
    stop: dict[str, Any] = {"stop": [way.stop]} if way.stop else {}
    if path == "/v1/responses":
        body = {"input": "hi", "max_output_tokens": way.limit, **stop}
        body |= {"tools": [{"type": "function", **function}]} if way.has_tools else {}
        body |= {"tool_choice": {"type": "function", "name": "clock"}} if way.must_call else {}
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        return body | ({"text": text} if way.schema else {})
    if path == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": way.limit, **stop}
        body |= {"tools": [{"type": "function", "function": function}]} if way.has_tools else {}
        body |= {"tool_choice": "required"} if way.must_call else {}
        form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        return body | ({"response_format": form} if way.schema else {})
    return {"prompt": "hi", "max_tokens": way.limit, **stop} | (
        {"json_schema": SCHEMA} if way.schema else {}
    )


def streamed(app: App, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events, whether they have names or not."""
    lines = app.post(path, body | {"stream": True}).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def said(app: App, path: str, body: dict[str, Any], *, is_streamed: bool) -> Any:
    """The ending as an API reports it."""
    events = streamed(app, path, body) if is_streamed else []
    whole = {} if is_streamed else app.post(path, body).json()
    if path == "/completion":
        last = events[-1] if is_streamed else whole
        return last["stop_type"], last["stopping_word"]
    if path == "/v1/messages":
        last = next(e["delta"] for e in events if e["type"] == "message_delta") if is_streamed else whole
        return last["stop_reason"], last["stop_sequence"]
    if path == "/v1/responses":
        return events[-1]["response"]["status"] if is_streamed else whole["status"]
    reasons = [
        choice["finish_reason"] for e in events if e != "[DONE]" for choice in e.get("choices", ())
    ]
    return (
        [reason for reason in reasons if reason]
        if is_streamed
        else [whole["choices"][0]["finish_reason"]]
    )


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WAYS)
def test_each_interface_says_why_an_answer_ended(
    engine: FakeEngine, name: str, path: str, is_streamed: bool
) -> None:
    way = WAYS[name]
    if way.has_tools and path in ("/v1/completions", "/completion"):
        way = replace(way, has_tools=False, must_call=False, chat=way.chat.replace("tool_calls", "stop"))
    engine.info = replace(engine.info, chat_template=TEMPLATE)
    engine.script = Script(text=way.text, is_held=way.is_held, width=2)
    found = said(
        App(create_app(engine, ServerSettings())), path, body_of(path, way), is_streamed=is_streamed
    )
    wants: dict[str, Any] = {
        "/completion": way.native,
        "/v1/messages": way.messages,
        "/v1/responses": way.responses,
    }
    assert found == wants.get(path, [way.chat])


@pytest.mark.parametrize("path", PATHS)
def test_what_can_not_be_held_is_refused_before_it_begins(engine: FakeEngine, path: str) -> None:
    body = body_of(path, WAYS["a schema ends a text"])
    wrong = json.loads(json.dumps(body).replace('"type": "string"', '"type": "wombat"'))
    response = App(create_app(engine, ServerSettings())).post(path, wrong)
    assert response.status_code == 400 and "wombat" in response.text and not engine.seen
