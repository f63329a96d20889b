"""Each generation route, whole and streamed, against the scripted engine: its fields, how it ends, and prompts in answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from server_client import App, app_of
from server_fakes import BOS, FakeEngine, Script

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat_text(events: list[Any]) -> str:
    chunks = [e for e in events if e != "[DONE]" and e["choices"]]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks)


def test_a_chat_gets_openais_object_with_timings(app: App, engine: FakeEngine) -> None:
    value = app.post("/v1/chat/completions", CHAT).json()
    assert value["object"] == "chat.completion"
    assert value["id"].startswith("chatcmpl-")
    assert len(value["id"]) == 41
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
    assert value["timings"]["draft_n"] == value["timings"]["draft_n_accepted"] == 0
    assert "metrics" not in value


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
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["timings"]["predicted_n"] == 12


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


TEMPLATE = '<tool_call>{"name": ..., "arguments": {}}</tool_call>'
CALL = '<tool_call>\n{"name": "clock", "arguments": {"at": "noon"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}  # fmt: skip
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
    found = said(app_of(engine), path, body_of(path, way), is_streamed=is_streamed)
    wants: dict[str, Any] = {"/completion": way.native, "/v1/messages": way.messages, "/v1/responses": way.responses}  # fmt: skip
    assert found == wants.get(path, [way.chat])


@pytest.mark.parametrize("path", PATHS)
def test_what_can_not_be_held_is_refused_before_it_begins(engine: FakeEngine, path: str) -> None:
    body = body_of(path, WAYS["a schema ends a text"])
    wrong = json.loads(json.dumps(body).replace('"type": "string"', '"type": "wombat"'))
    response = app_of(engine).post(path, wrong)
    assert response.status_code == 400 and "wombat" in response.text and not engine.seen


def test_a_loglikelihood_request_of_lm_eval_gets_what_it_reads(app: App, engine: FakeEngine) -> None:
    """The body of its local-completions model, and the fields that it reads of each choice."""
    prompts = [list(b"The sky is blue"), list(b"One two")]
    body = {"model": "m", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}  # fmt: skip
    answer = app.post("/v1/completions", body).json()
    for choice, ids in zip(sorted(answer["choices"], key=lambda c: c["index"]), prompts, strict=True):
        found = choice["logprobs"]
        assert (
            len(found["tokens"])
            == len(ids) + 1
            == len(found["token_logprobs"])
            == len(found["top_logprobs"])
        )
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for token, value, top in list(
            zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        )[4:-1]:
            assert value == -0.25 and token == max(top, key=top.get)
        assert choice["text"] == bytes(ids).decode() + "H"
        assert found["text_offset"] == list(range(len(ids) + 1))
    assert [r.prompt_logprobs for r in engine.seen] == [1, 1] and engine.seen[0].max_tokens == 1


def test_echo_gives_the_prompt_as_it_was_sent_and_nothing_more_with_max_tokens_0(
    app: App, engine: FakeEngine
) -> None:
    body: dict[str, Any] = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = app.post("/v1/completions", body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"] and choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]  # fmt: skip
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}] and engine.seen[0].prompt[0] == BOS
    plain = app.post("/v1/completions", {"prompt": "ab", "echo": True, "max_tokens": 2}).json()[
        "choices"
    ][0]
    assert plain["text"] == "abHe"
    assert plain["logprobs"] is None
    assert engine.seen[1].prompt_logprobs is None
    events = app.events("/v1/completions", {"prompt": "ab", "echo": True})
    assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "abHello, world"


def test_prompt_logprobs_are_vllms(app: App, engine: FakeEngine) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "prompt_logprobs": 2}
    rows = app.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 3
    assert rows[1] == {
        "104": {"logprob": -0.25, "rank": 1, "decoded_token": "h"},
        "257": {"logprob": -2.0, "rank": 2, "decoded_token": "</s>"},
    }
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}  # fmt: skip
    answer = app.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert [r.prompt_logprobs for r in engine.seen[1:]] == [0, None], (
        "one choice tells of the prompt for all"
    )


def test_best_of_shows_the_likeliest_and_counts_all(app: App, engine: FakeEngine) -> None:
    engine.info = engine.info
    body = {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "best_of": 4, "seed": 5}
    answer = app.post("/v1/completions", body).json()
    assert [r.params.seed for r in engine.seen] == [5, 6, 7, 8] * 2 and {
        r.params.logprobs for r in engine.seen
    } == {0}
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["usage"][
        "completion_tokens"
    ] == 32
    assert all(c["logprobs"] is None for c in answer["choices"])
    shown = app.post("/v1/completions", body | {"logprobs": 0}).json()["choices"]
    assert [c["logprobs"]["token_logprobs"][0] for c in shown] == [-0.5, -0.51] * 2, "seeds 7 and 8"
    native = app.post("/completion", {"prompt": "a", "n_predict": 4, "best_of": 3, "seed": 6}).json()
    assert native["generation_settings"]["seed"] == 7 and "completion_probabilities" not in native
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "best_of": 2}
    assert len(app.post("/v1/chat/completions", chat).json()["choices"]) == 1
