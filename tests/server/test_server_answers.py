"""Each generation route, whole and streamed, against the scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_client import App
from server_fakes import BOS, FakeEngine, Script

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat_text(events: list[Any]) -> str:
    chunks = [e for e in events if e != "[DONE]" and e["choices"]]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks)


def test_a_chat_gets_openais_object_with_timings(app: App, engine: FakeEngine) -> None:
    value = app.post("/v1/chat/completions", CHAT).json()
    assert (
        value["object"] == "chat.completion"
        and value["id"].startswith("chatcmpl-")
        and len(value["id"]) == 41
    )
    assert value["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world"},
            "finish_reason": "stop",
        }
    ]
    n_prompt = len(b"user: hi\nassistant: ") + 1
    assert engine.seen[0].prompt[0] == BOS and len(engine.seen[0].prompt) == n_prompt
    assert value["usage"] == {
        "completion_tokens": 12,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + 12,
        "prompt_tokens_details": {"cached_tokens": n_prompt // 2},
    }
    assert value["system_fingerprint"].startswith("b") and value["model"] == "fake-1"
    timings = value["timings"]
    assert timings["predicted_per_second"] == pytest.approx(11e3 / 4.0)
    assert timings["predicted_per_token_ms"] == pytest.approx(4.0 / 11)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (8, 4)


def test_the_speculation_block_agrees_with_itself(app: App) -> None:
    spec = app.post("/v1/chat/completions", CHAT).json()["metrics"]["speculative_decoding"]
    assert spec["num_spec_steps"] == sum(spec["acceptance_histogram"]) == 4
    assert spec["acceptance_histogram"] == [0, 4, 0]
    accepted = sum(n * count for n, count in enumerate(spec["acceptance_histogram"]))
    assert accepted == spec["num_accepted_draft_tokens"]
    assert spec["draft_acceptance_rate"] == 0.5 and spec["mean_acceptance_length"] == 2.0


def test_without_drafting_no_draft_figures_are_given(app: App, engine: FakeEngine) -> None:
    value = app.post("/v1/chat/completions", CHAT | {"speculative": False}).json()
    assert engine.seen[0].n_draft_max == 0
    assert (
        value["timings"]["draft_n"] == value["timings"]["draft_n_accepted"] == 0
        and "metrics" not in value
    )


def test_a_chat_stream_is_role_then_text_then_usage_then_done(app: App, engine: FakeEngine) -> None:
    events = app.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert events[0]["choices"] == [
        {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": None}}
    ]
    middle = events[1:-3]
    assert [e["choices"][0]["delta"]["content"] for e in middle] == ["Hel", "lo,", " wo", "rld"]
    assert events[-3]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert "timings" not in events[-3]
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 12
    assert events[-2]["timings"]["draft_n"] == 8 and events[-1] == "[DONE]"
    assert len({e["id"] for e in events[:-1]}) == 1
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}


def test_without_usage_the_last_chunk_carries_the_timings(app: App) -> None:
    events = app.events("/v1/chat/completions", CHAT)
    assert all(e["choices"] for e in events[:-1])
    assert (
        events[-2]["choices"][0]["finish_reason"] == "stop"
        and events[-2]["timings"]["predicted_n"] == 12
    )


def test_characters_split_over_rounds_arrive_whole(app: App, engine: FakeEngine) -> None:
    engine.script = Script(text="Grüße 😀!", width=1)
    events = app.events("/v1/chat/completions", CHAT)
    assert chat_text(events) == "Grüße 😀!"
    contents = [e["choices"][0]["delta"]["content"] for e in events[1:-2]]
    assert all(contents), "a content delta is empty"


def test_logprobs_of_textless_tokens_ride_on_the_next_chunk(app: App, engine: FakeEngine) -> None:
    engine.script = Script(text="é😀", width=1)
    events = app.events("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
    entries = [
        x for e in events[:-1] for x in (e["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert [x["id"] for x in entries] == list("é😀".encode())
    assert entries[0]["bytes"] == [0xC3] and entries[0]["logprob"] == -0.5
    assert [x["logprob"] for x in entries[0]["top_logprobs"]] == [-0.5, -9999.0]


def test_text_completion_logprobs_come_in_both_forms(app: App) -> None:
    value = app.post("/v1/completions", {"prompt": "x", "logprobs": 1, "max_tokens": 3}).json()
    logprobs = value["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3 and logprobs["top_logprobs"][0] == {"H": -0.5}
    assert [x["token"] for x in logprobs["content"]] == ["H", "e", "l"]
    assert value["choices"][0]["finish_reason"] == "length" and value["object"] == "text_completion"


def test_a_text_stream_joins_to_the_whole_text(app: App) -> None:
    events = app.events("/v1/completions", {"prompt": "x"})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "Hello, world"
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_the_native_answer_has_llama_servers_fields(app: App, path: str) -> None:
    body = {"prompt": "ab", "stop": [", w"], "return_tokens": True, "n_probs": 1, "seed": 7}
    value = app.post(path, body).json()
    assert value["content"] == "Hello" and value["stop"] is True
    assert (value["stop_type"], value["stopping_word"]) == ("word", ", w")
    assert value["tokens_evaluated"] == 3 and value["prompt"] == "<s>ab"
    assert value["tokens_predicted"] == len(value["tokens"]) == len(value["completion_probabilities"])
    assert value["generation_settings"]["seed"] == 7 and value["generation_settings"]["stop"] == [", w"]
    assert value["has_new_line"] is False and value["truncated"] is False and value["id_slot"] == 0
    assert value["timings"]["cache_n"] == 1


@pytest.mark.parametrize(
    ("extra", "stop_type"), [({}, "eos"), ({"n_predict": 2}, "limit"), ({"stop": "o"}, "word")]
)
def test_native_stop_types_say_why_it_ended(app: App, extra: dict[str, Any], stop_type: str) -> None:
    assert app.post("/completion", {"prompt": "x"} | extra).json()["stop_type"] == stop_type


def test_a_native_stream_ends_with_its_final_object(app: App) -> None:
    events = app.events("/completion", {"prompt": "x"})
    assert [e["stop"] for e in events] == [False] * 4 + [True]
    assert "".join(e["content"] for e in events) == "Hello, world"
    assert [t for e in events for t in e["tokens"]] == list(b"Hello, world")
    assert events[-1]["tokens_predicted"] == 12 and events[1]["tokens_predicted"] == 6


def test_prompt_progress_starts_at_the_cache_and_ends_at_the_total(app: App) -> None:
    for path, body in (("/completion", {"prompt": "abcdefg"}), ("/v1/chat/completions", CHAT)):
        events = app.events(path, body | {"return_progress": True})
        progress = [e["prompt_progress"] for e in events if e != "[DONE]" and "prompt_progress" in e]
        assert progress[0]["processed"] == progress[0]["cache"] > 0
        assert progress[-1]["processed"] == progress[-1]["total"]


def test_timings_per_token_ride_on_every_chunk(app: App) -> None:
    events = app.events("/v1/chat/completions", CHAT | {"timings_per_token": True})
    assert [e["timings"]["predicted_n"] for e in events[1:-1]] == [3, 6, 9, 12, 12]


def test_choices_of_one_prompt_share_it_and_differ_in_seed(app: App, engine: FakeEngine) -> None:
    value = app.post("/v1/chat/completions", CHAT | {"n": 3, "seed": 11}).json()
    assert [c["index"] for c in value["choices"]] == [0, 1, 2]
    assert [request.params.seed for request in engine.seen] == [11, 12, 13]
    assert value["usage"]["completion_tokens"] == 36 and value["usage"]["prompt_tokens"] == len(
        engine.seen[0].prompt
    )
    assert all("timings" in c for c in value["choices"])
    assert value["timings"] == value["choices"][0]["timings"], "as in llama-server"


def test_streamed_choices_are_told_apart_by_index(app: App) -> None:
    events = app.events("/v1/completions", {"prompt": ["a", "b"], "n": 2})
    texts = {}
    for event in events[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "Hello, world")


def test_a_failing_round_is_a_server_error(app: App, engine: FakeEngine) -> None:
    engine.script = Script(fail_after=1)
    response = app.post("/v1/chat/completions", CHAT)
    assert response.status_code == 500
    assert response.json() == {"error": {"code": 500, "message": "round failed", "type": "server_error"}}


def test_a_failure_in_a_stream_is_an_event_after_the_text_so_far(app: App, engine: FakeEngine) -> None:
    engine.script = Script(fail_after=2)
    error = {"error": {"code": 500, "message": "round failed", "type": "server_error"}}
    events = app.events("/v1/chat/completions", CHAT)
    assert events[-2:] == [error, "[DONE]"] and chat_text(events[:-2]) == "Hello,"
    events = app.events("/completion", {"prompt": "x"})
    assert events[-1] == error and "".join(e["content"] for e in events[:-1]) == "Hello,"


def test_tools_are_rendered_when_nothing_counts_on_parsed_calls(app: App, engine: FakeEngine) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert (
        app.post("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": "none"}).status_code
        == 200
    )
    assert b"tool: clock" in bytes(t for t in engine.seen[0].prompt if t < 256)


def test_a_stream_tells_of_each_token_whether_it_was_drafted(app: App) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    plain = [
        json.loads(e[6:]) for e in app.post("/v1/chat/completions", body).text.split("\n\n") if "{" in e
    ]
    shown = [
        json.loads(e[6:])
        for e in app.post("/v1/chat/completions", body | {"return_pieces": True}).text.split("\n\n")
        if "{" in e
    ]
    assert not any("pieces" in chunk for chunk in plain)
    pieces = [piece for chunk in shown for piece in chunk.get("pieces", [])]
    assert "".join(text for text, _ in pieces) == "Hello, world"
    assert all(type(drafted) is bool for _, drafted in pieces)
