"""Refusals and their form; no request makes the server fail."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_client import App, app_of
from server_fakes import FakeEngine, Script

from pyspec.errors import ConfigError
from pyspec.server.api.schema import ChatBody, NativeBody
from pyspec.server.http.serve import run
from pyspec.server.settings import Limits, ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status and set(error) >= {"code", "message", "type"}
    assert error["message"] and "\n" not in error["message"]
    return error


def test_default_values_of_unsupported_fields_pass(app: App) -> None:
    body = {
        "response_format": {"type": "text"},
        "grammar": "",
        "mirostat": 0,
        "xtc_probability": 0.0,
        "top_n_sigma": -1.0,
        "lora": [],
        "tools": None,
        "tool_choice": "auto",
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "modalities": ["text"],
        "never_heard_of": 1,
    }  # fmt: skip
    assert app.post("/v1/chat/completions", CHAT | body).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\udfff": 1}',
        b'{"prompt": "x", "a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "x"} {"prompt": "y"}',
    ],
)
def test_a_body_that_is_no_usable_json_is_refused(app: App, raw: bytes) -> None:
    error_of(app.post("/completion", content=raw), 400)


def test_a_prompt_too_long_says_both_numbers(app: App) -> None:
    error = error_of(app.post("/completion", {"prompt": "x" * 600}), 400)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (601, 512)
    assert "maximum context length is 512 tokens" in error["message"]  # clients look for such words


def test_a_byte_order_mark_before_a_body_is_no_part_of_it(app: App) -> None:
    response = app.post("/completion", content=b'\xef\xbb\xbf{"prompt": "hi"}')
    assert response.status_code == 200, response.text


def test_a_body_too_large_is_refused_before_and_after_it_is_read(engine: FakeEngine) -> None:
    app = app_of(engine, limits=Limits(body=1000))
    error_of(app.post("/completion", {"prompt": "x" * 1000}), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    error_of(app.post("/completion", content=pieces()), 413)


def test_a_packed_body_is_refused_for_what_it_is(app: App) -> None:
    raw = gzip.compress(b'{"prompt": "x"}')
    error = error_of(app.post("/completion", content=raw, headers={"Content-Encoding": "gzip"}), 400)
    assert error["message"] == "the body's Content-Encoding is 'gzip'; send it as it is"
    assert (
        app.post("/tokenize", {"content": "x"}, headers={"Content-Encoding": "identity"}).status_code
        == 200
    )


def test_a_body_that_never_arrives_is_given_up(engine: FakeEngine) -> None:
    app = app_of(engine, limits=Limits(body_read_s=0.05))

    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(0.5)
        yield b"}"

    error_of(app.post("/completion", content=slow()), 408)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/completion", 405),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/tokenize/", 404),
        ("POST", "/v1/embeddings", 400),
        ("GET", "/api/tags", 400),
        ("POST", "/props", 400),
        ("POST", "/slots/0", 400),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_every_refusal_has_the_same_envelope(app: App, method: str, path: str, status: int) -> None:
    error_of(app.call(method, path), status)


def test_a_full_queue_is_429_with_retry_after(engine: FakeEngine) -> None:
    engine.n_queue = 0
    response = app_of(engine).post("/completion", {"prompt": "x"})
    assert error_of(response, 429)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "1"


def test_when_one_of_several_prompts_is_refused_the_others_are_cancelled(engine: FakeEngine) -> None:
    engine.script = Script(text="x" * 400, round_s=0.05)
    app = app_of(engine)
    error_of(app.post("/completion", {"prompt": ["a", "b", "c" * 600]}), 400)
    assert len(engine.seen) == 2 and set(engine.cancelled) == {"0", "1"}


def test_a_list_longer_than_the_queue_is_fed_in_as_room_comes(engine: FakeEngine) -> None:
    engine.n_queue = 2
    app = app_of(engine)
    values = app.post("/completion", {"prompt": [[i] for i in range(40)]}).json()
    assert [value["index"] for value in values] == list(range(40))
    assert [request.prompt for request in engine.seen] == [(i,) for i in range(40)]


def test_a_late_refusal_ends_the_list_with_its_error(engine: FakeEngine) -> None:
    engine.n_queue = 1
    app = app_of(engine)
    prompts = ["a"] * 30 + ["c" * 600]
    error_of(app.post("/completion", {"prompt": prompts}), 400)
    while engine.metrics().requests_queued:  # those of the first body that are being taken back
        time.sleep(0.005)
    events = app.events("/v1/completions", {"prompt": prompts})
    assert events[-2]["error"]["type"] == "exceed_context_size_error" and events[-1] == "[DONE]"


def test_a_dead_engine_is_503_everywhere_it_matters(app: App, engine: FakeEngine) -> None:
    engine.is_alive = False
    for response in (app.get("/health"), app.get("/ready"), app.post("/completion", {"prompt": "x"})):
        assert error_of(response, 503)["type"] == "unavailable_error"
    assert app.get("/v1/models").status_code == 200


def test_keys_guard_all_but_health_and_models(engine: FakeEngine) -> None:
    app = app_of(engine, api_keys=("sesame", "zweiter-schlüssel"))
    # probes of an orchestrator have no key
    for path in ("/health", "/v1/health", "/ping", "/ready", "/models", "/v1/models"):
        assert app.get(path).status_code == 200
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic sesame"},
        {"X-Api-Key": ""},
    ):
        error = error_of(app.post("/completion", {"prompt": "x"}, headers=headers), 401)
        assert error["type"] == "authentication_error"
    assert (
        app.get("/slots").status_code
        == app.get("/metrics").status_code
        == app.get("/nowhere").status_code
        == 401
    )
    for headers in ({"Authorization": "Bearer sesame"}, {"X-Api-Key": "sesame"}):
        assert app.post("/completion", {"prompt": "x"}, headers=headers).status_code == 200


def test_pages_of_other_sites_may_not_use_the_server(engine: FakeEngine) -> None:
    app = app_of(engine, cors_origins=("https://chat.example",))
    body = {"prompt": "x"}
    for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
        response = app.post("/completion", body, headers={"Origin": origin})
        assert error_of(response, 403)["type"] == "permission_error"
        assert "access-control-allow-origin" not in response.headers
    assert (
        app.post("/completion", body, headers={"Origin": "http://test"}).status_code == 403
    )  # a rebound name
    for origin in ("http://localhost:3000", "https://chat.example", "http://127.0.0.1:8080"):
        assert app.post("/completion", body, headers={"Origin": origin}).status_code == 200
    response = app.post("/completion", body, headers={"Origin": "http://localhost:3000"})
    assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
    open_app = app_of(engine, hosts=("0.0.0.0",), insecure=True)
    assert open_app.post("/completion", body, headers={"Origin": "http://test"}).status_code == 200


def test_an_open_host_needs_a_key_or_consent(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is open to the network"):
        run(lambda: engine, ServerSettings(hosts=("0.0.0.0",)), print)
    for settings_ in (
        ServerSettings(hosts=("0.0.0.0",), insecure=True),
        ServerSettings(hosts=("0.0.0.0",), api_keys=("k",)),
        ServerSettings(hosts=("::1",)),
        ServerSettings(hosts=("localhost",)),
    ):
        settings_.check()
    with pytest.raises(ConfigError, match="empty"):
        ServerSettings(api_keys=("",)).check()


NAMES = sorted(
    {
        field.alias or name
        for model in (ChatBody, NativeBody)
        for name, field in model.model_fields.items()
    }
    | {
        "grammar",
        "response_format",
        "tool_choice",
        "samplers",
        "functions",
        "best_of",
        "modalities",
        "logprobs",
    }
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["text", "none", "auto", "user", "</s>", "\x00", "97", "-1", "prompt_string"])
)


def within(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """These values, lists of them, and objects of them."""
    keys = st.sampled_from(["role", "content", "type", "n_max", "97", "x"]) | st.text()
    return values | st.lists(values, max_size=4) | st.dictionaries(keys, values, max_size=4)


VALUES = within(within(LEAVES))


BODIES = given(
    st.sampled_from(
        [
            "/completion",
            "/v1/completions",
            "/v1/chat/completions",
            "/tokenize",
            "/detokenize",
            "/apply-template",
        ]
    ),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.booleans(),
)
FUZZ = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=500, **FUZZ)
@BODIES
def test_no_body_makes_the_server_fail(
    app: App, path: str, fields: dict[str, Any], is_based: bool
) -> None:
    """Any JSON, plausible or not, gets an answer or a refusal, and no refusal is 5xx."""
    based = (
        {"prompt": "x", "content": "x", "tokens": [1], "messages": CHAT["messages"]} if is_based else {}
    )
    response = app.post(path, content=json.dumps(based | fields).encode())
    assert response.status_code in (200, 400, 429), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)
