"""Hostile values at every place of a valid body of every path: the answer is JSON, and the fault is the client's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_client import App, app_of
from server_fakes import FakeEngine, Script
from server_live import Live

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": False}
SAMPLING = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["x"],
    "logit_bias": [[65, 1.5]],
    "samplers": ["top_k"],
    "dry_sequence_breakers": ["\n"],
    "speculative": {"n_max": 2, "type": "ngram"},
    "stream_options": {"include_usage": True},
    "sse_ping_interval": 5,
    "t_max_predict_ms": 1000,
    "speculative.n_max": 1,
}
CALL = {"id": "c1", "type": "function", "index": 0, "function": {"name": "look", "arguments": '{"at": "x"}'}}  # fmt: skip
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [CALL],
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}},
    "chat_template_kwargs": {"x": [1]},
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "reasoning_format": "auto",
    "response_format": {"type": "text"},
}  # fmt: skip
MESSAGES = {
    "model": "m",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "rain"}],
                }
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "stop_sequences": ["x"],
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
    "top_k": 3,
}  # fmt: skip
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be kind."}],
        },
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "look",
            "arguments": "{}",
            "status": "completed",
        },
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {
            "type": "web_search_call",
            "id": "w",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
    ],
    "tools": [{"type": "function", **FUNCTION}, {"type": "web_search", "filters": {"a": [1]}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "max_output_tokens": 2,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "truncation": "disabled",
    "user": "u",
    "temperature": 0.5,
    "top_p": 0.9,
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": PARAMETERS}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT | SAMPLING,
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": SCHEMA,
            "logprobs": True,
            "top_logprobs": 1,
        },
    ],
    "/v1/completions": [{"prompt": ["a", [65, 66]], "suffix": None, "logprobs": 1, "echo": True, "n": 1} | SAMPLING],
    "/completion": [{"prompt": [65, "b"], "n_probs": 1, "response_fields": ["content"], "json_schema": PARAMETERS, "id_slot": 0} | SAMPLING],
    "/infill": [{"input_prefix": "a", "input_suffix": [65], "input_extra": [{"text": "t", "filename": "f"}], "prompt": "p"}],
    "/v1/messages": [MESSAGES],
    "/v1/messages/count_tokens": [MESSAGES],
    "/v1/responses": [RESPONSES],
    "/v1/responses/input_tokens": [RESPONSES],
    "/v1/chat/completions/input_tokens": [CHAT],
    "/apply-template": [CHAT],
    "/tokenize": [{"content": [65, "b"], "add_special": True, "parse_special": False, "with_pieces": True}],
    "/detokenize": [{"tokens": [65, 66]}],
    "/v1/streams/lookup": [{"conversation_ids": ["a"]}],
}  # fmt: skip
DEEP = "[" * 60 + "]" * 60
VALUES = (  # as they stand in the body: not all of them are JSON
    *('[["user"]]', '{"type": ["text"]}', "[]", "{}", "null", "true", '""', '"x"', "-1", "0", "3.5", "1e400", "-1e400", "NaN"),
    *("Infinity", str(2**63), str(10**30), "9" * 400, "1" + "0" * 4000, "9" * 5000, "1e308", '"\\ud800"', '"\\udc00x"'),
    *('{"\\ud83d": 1}', DEEP, "[" * 70 + "]" * 70, '[{"type": "text", "text": null}]', '"\\u0000"', '{"": {"": ""}}', "4.0"),
)  # fmt: skip
MARK = "@@hostile@@"


def with_mark(value: Any) -> Iterator[Any]:
    """The value with a mark at each place of it, one at a time, and in front of each list and as a name in each object."""
    yield MARK
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in with_mark(item))
        yield {**value, "x": MARK}
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in with_mark(item))
        yield [MARK, *value]


def hostile(body: dict[str, Any]) -> Iterator[bytes]:
    for marked in with_mark(body):
        text = json.dumps(marked)
        yield from (text.replace(f'"{MARK}"', value).encode() for value in VALUES)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check(path: str, sent: bytes, response: httpx.Response) -> None:
    told = f"{path} {sent[:2000]!r} -> {response.status_code} {response.text[:300]}"
    assert response.status_code == 200 or 400 <= response.status_code < 500, told
    value = json.loads(response.content.decode("utf-8"), parse_constant=no_constant)
    json.dumps(value, ensure_ascii=False).encode()  # no half surrogate pairs
    assert response.status_code == 200 or "error" in value, told


@pytest.fixture
def app(engine: FakeEngine) -> App:
    engine.info = replace(engine.info, chat_template="<tool_call> <function= <parameter=")
    engine.script = Script(text="ok", width=2)
    return app_of(engine)


@pytest.mark.parametrize("path", BODIES)
def test_the_body_that_is_made_hostile_is_taken(app: App, path: str) -> None:
    for body in BODIES[path]:
        expected = 400 if path == "/infill" else 200  # that model has no marks for gaps
        assert app.post(path, body).status_code == expected, app.post(path, body).text


@pytest.mark.sampled(2, most=2)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("path", BODIES)
def test_hostile_values_anywhere_are_refused_in_json(app: App, path: str, seed: int) -> None:
    sent = [raw for body in BODIES[path] for raw in hostile(body)]
    chosen = random.Random(f"{path} {seed}").sample(sent, min(150, len(sent)))

    async def drive() -> None:
        async with app._client() as client:
            for raw in chosen:
                response = await client.post(
                    path, content=raw, headers={"Content-Type": "application/json"}
                )
                check(path, raw, response)

    asyncio.run(drive())


@pytest.mark.parametrize(
    "inner",
    [
        '"input": [{"role": ["user"], "content": "x"}]',
        '"input": [{"role": {"a": 1}, "content": "x"}]',
        '"input": "x", "reasoning": {"x": 1e400}',
        '"input": "x", "metadata": {"a": [[-1e999]]}',
        '"input": "x", "tools": [{"type": "web_search", "x": Infinity}]',
        '"input": "x", "user": "\\ud800"',
    ],
)
def test_a_hostile_response_is_refused_and_its_connection_goes_on(
    serve: Callable[..., Live], inner: str
) -> None:
    with httpx.Client(base_url=serve().url) as client:
        assert client.post("/v1/responses", json={"input": "x"}).status_code == 200
        refused = client.post(
            "/v1/responses", content="{" + inner + "}", headers={"Content-Type": "application/json"}
        )
        assert refused.status_code == 400 and "error" in refused.json(), refused.text
        assert refused.headers.get("connection", "") != "close"
        streams = {id(c) for c in client._transport._pool.connections}  # type: ignore[attr-defined]
        assert client.post("/v1/responses", json={"input": "x"}).status_code == 200
        assert {id(c) for c in client._transport._pool.connections} == streams  # type: ignore[attr-defined]


WHOLE = [
    ("/completion", {"prompt": [65.0, "b", 66.0], "n_predict": 3.0, "top_k": 40.0, "seed": 42.0, "n_probs": 1.0}),
    ("/completion", {"prompt": [[65.0], [66.0, 67.0]], "id_slot": 1.0, "min_keep": 0.0, "mirostat": 0.0, "n": 1.0}),
    ("/completion", {"prompt": "x", "logit_bias": [[65.0, 1.0]], "speculative": {"n_max": 2.0}, "speculative.n_max": 3.0}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4.0, "logprobs": 1.0, "n": 2.0, "best_of": 2.0}),
    ("/v1/chat/completions", {"messages": CHAT["messages"][:2], "max_tokens": 4.0, "logprobs": True, "top_logprobs": 1.0}),
    ("/v1/chat/completions", {"messages": CHAT["messages"][:2], "max_completion_tokens": 4.0, "reasoning_budget": -1.0}),
    ("/v1/messages", MESSAGES | {"max_tokens": 4.0, "top_k": 3.0, "thinking": {"type": "enabled", "budget_tokens": 9.0}}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 4.0, "top_logprobs": 0.0, "seed": 1.0}),
    ("/tokenize", {"content": [65.0, "b"]}),
    ("/detokenize", {"tokens": [65.0, 66.0]}),
]  # fmt: skip


def changed(value: Any, change: Callable[[float], float]) -> Any:
    if isinstance(value, dict):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return change(value) if type(value) is float else value


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_a_whole_number_may_be_written_with_a_point(
    app: App, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    response = app.post(path, body)
    assert response.status_code == 200, response.text
    with_point = list(engine.seen)
    engine.seen.clear()
    assert app.post(path, changed(body, int)).status_code == 200
    assert [(r.prompt, r.params, r.max_tokens, r.n_draft_max, r.slot) for r in with_point] == [
        (r.prompt, r.params, r.max_tokens, r.n_draft_max, r.slot) for r in engine.seen
    ]
    for request in with_point:
        assert all(type(token) is int for token in request.prompt) and type(request.max_tokens) is int
    assert app.post(path, changed(body, lambda x: x + 0.5)).status_code == 400
