"""Reasoning, text and calls as Anthropic's blocks and OpenAI's items, wherever the text is cut: held against the clients' own types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic.types
import openai.types.responses
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from pydantic import TypeAdapter
from server_fakes import ByteTokenizer

from pyspec.errors import SlotError
from pyspec.request import Delta, Done, Finish, Request, Started, Timings
from pyspec.server.api.answers import PartedAnswer
from pyspec.server.api.anthropic_answer import MessagesAnswer, call_input
from pyspec.server.api.prepared import Kind, PreparedBody
from pyspec.server.api.responses_answer import ResponsesAnswer
from pyspec.text.markup.dialect import AnswerMarkup, dialect
from pyspec.text.markup.reasoning import THINK

TEXT = (
    "<think>\nLook first. Größe?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "a/ü.py", "n": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
MARKUP = AnswerMarkup(calls=dialect("hermes"), think=THINK, tools={"look": {}, "stop": {}})
MESSAGE_EVENT = TypeAdapter(anthropic.types.RawMessageStreamEvent)
RESPONSE_EVENT = TypeAdapter(openai.types.responses.ResponseStreamEvent)


def an_ask(kind: Kind) -> PreparedBody:
    return PreparedBody(
        kind=kind, requests=(Request(prompt=(1, 2, 3)),), n=1, stream=True, include_usage=False, return_tokens=False,
        return_progress=False, timings_per_token=False, ping_s=30.0, prompt_texts=(), repeated={}, n_moved=0, markup=MARKUP,
    )  # fmt: skip


BEGIN = Started("1", 0, 30, 10)


def end(finish: Finish = "eos") -> Done:
    return Done("1", finish, 30, 9, Timings(cache_n=10))


def answer_of(kind: Kind) -> PartedAnswer:
    made = MessagesAnswer if kind == "messages" else ResponsesAnswer
    return made(an_ask(kind), "m", ByteTokenizer())


def whole_of(kind: Kind, text: str = TEXT, finish: Finish = "eos") -> dict[str, Any]:
    """The complete answer of this text."""
    answer = answer_of(kind)
    for event in (BEGIN, Delta("1", (7,), text), end(finish)):
        answer.choices[0].apply(event, keep=True)
    return answer.complete()


def events(kind: Kind, pieces: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream for a text in pieces."""
    told = [BEGIN, *(Delta("1", (), piece) for piece in pieces), end()]
    raw = answer_of(kind).encode((0, event) for event in told)
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def cuts(text: str) -> Iterator[list[str]]:
    """The whole text, letter by letter, and in two pieces at every second place."""
    yield [text]
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(1, len(text), 2))


def nameless(value: Any) -> Any:
    """The answer without its random parts: ids and times."""
    if isinstance(value, dict):
        return {
            k: nameless(v)
            for k, v in value.items()
            if k not in ("id", "call_id", "created_at", "completed_at")
        }
    return [nameless(item) for item in value] if isinstance(value, list) else value


CONTENT = [
    {"type": "thinking", "thinking": "Look first. Größe?", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "look", "input": {"at": "a/ü.py", "n": [1, 2]}},
    {"type": "tool_use", "name": "stop", "input": {}},
]


def test_a_whole_message_is_its_blocks() -> None:
    whole = whole_of("messages")
    message = anthropic.types.Message.model_validate(whole)
    assert nameless(whole["content"]) == CONTENT
    assert len({block["id"] for block in whole["content"][2:]}) == 2
    assert message.stop_reason == "tool_use" and message.usage.output_tokens_details is not None
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (20, 10)


def test_a_message_has_the_same_blocks_wherever_its_text_is_cut() -> None:
    for pieces in cuts(TEXT):
        snapshot, buffers = None, {}
        indices: list[int] = []
        for event in events("messages", pieces):
            snapshot = accumulate_event(
                event=MESSAGE_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
            if event["type"] == "content_block_start":
                assert len(indices) % 2 == 0, "a block begins in another"
            if event["type"] in ("content_block_start", "content_block_stop"):
                indices.append(event["index"])
        assert snapshot is not None
        assert [nameless({k: v for k, v in b.to_dict().items() if k in ("type", "thinking", "signature", "text", "name", "input")}) for b in snapshot.content] == CONTENT  # fmt: skip
        assert indices == [0, 0, 1, 1, 2, 2, 3, 3] and snapshot.stop_reason == "tool_use"


def test_a_call_that_the_limit_cut_is_no_tool_use() -> None:
    whole = whole_of("messages", TEXT[: TEXT.index("ü.py")], "length")
    assert whole["stop_reason"] == "max_tokens" and whole["content"][-1]["input"] == {}


@pytest.mark.parametrize("text", ["", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1', "[" * 100_000])
def test_arguments_that_are_no_object_are_an_empty_one(text: str) -> None:
    assert call_input(text) == {}


OUTPUT = [
    {"type": "reasoning", "status": "completed", "summary": [], "content": [{"type": "reasoning_text", "text": "Look first. Größe?"}]},
    {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "status": "completed", "arguments": '{"at": "a/ü.py", "n": [1, 2]}', "name": "look"},
    {"type": "function_call", "status": "completed", "arguments": "{}", "name": "stop"},
]  # fmt: skip


def test_a_whole_response_is_its_items() -> None:
    whole = whole_of("responses")
    response = openai.types.responses.Response.model_validate(whole)
    assert nameless(whole["output"]) == OUTPUT and response.output_text == "I look."
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_a_response_has_the_same_items_wherever_its_text_is_cut() -> None:
    for pieces in cuts(TEXT):
        items: dict[str, Any] = {}
        text: dict[str, str] = {}
        last: dict[str, Any] = {}
        for n, event in enumerate(events("responses", pieces)):
            RESPONSE_EVENT.validate_python(event)
            assert event["sequence_number"] == n
            kind, last = event["type"].removeprefix("response."), event
            if kind == "output_item.added":
                assert event["output_index"] == len(items)
                items[event["item"]["id"]] = event["item"]
                text[event["item"]["id"]] = ""
            elif kind.endswith(".delta"):
                text[event["item_id"]] += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == text[event["item_id"]]
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text[event["item_id"]]
            elif kind == "output_item.done":
                items[event["item"]["id"]] = event["item"]
        assert last["type"] == "response.completed" and nameless(last["response"]["output"]) == OUTPUT
        assert list(items.values()) == last["response"]["output"]


def test_a_failed_response_keeps_what_came_before() -> None:
    answer = answer_of("responses")
    answer.delta(0, Delta("1", (), "<think>Hm.</think>Half"))
    event = json.loads(answer.error(SlotError("round failed")).decode().split("data: ")[1])
    RESPONSE_EVENT.validate_python(event)
    reasoning, message = event["response"]["output"]
    assert reasoning["content"][0]["text"] == "Hm." and message["content"][0]["text"] == "Half"
    assert message["status"] == "incomplete"
