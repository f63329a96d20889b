"""Streams that outlive their connection: they continue, are readable again from any byte, and belong to their owner."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from urllib.parse import quote

import httpx
import pytest
from server_client import app_of, parse_events, refusal
from server_fakes import FakeEngine, Script
from server_live import Live
from waiting import wait_for

from pyspec.server.settings import Limits

ID = "conv-1::org/model:Q8"
AT = f"/v1/stream?conv_id={quote(ID, safe='')}"
BODY = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


def text_of(raw: bytes) -> str:
    events = [e for e in parse_events(raw) if isinstance(e, dict)]
    return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


def drop_in_the_middle(live: Live, engine: FakeEngine) -> bytes:
    """A client that leaves after its first bytes. Returns the received part of the stream."""
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Conversation-Id: {ID}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(head.encode() + body)
        seen = b""
        client.settimeout(20)
        while b'"content":"H"' not in seen:
            seen += client.recv(4096)
    return seen


def test_a_stream_goes_on_without_its_client_and_is_read_again(
    serve: Callable[..., Live], engine: FakeEngine
) -> None:
    engine.script = Script(round_s=0.05, width=1)
    live = serve()
    drop_in_the_middle(live, engine)
    with httpx.Client(base_url=live.url, timeout=20) as client:
        rows = client.post(
            "/v1/streams/lookup", json={"conversation_ids": ["conv-1", "conv", "x"]}
        ).json()
        assert [r["conversation_id"] for r in rows] == [ID]
        assert not rows[0]["is_done"]
        assert rows[0]["completed_at"] == 0
        whole = client.get(AT).content
        assert text_of(whole) == "Hello, world" and whole.endswith(b"data: [DONE]\n\n")
        assert client.get(f"{AT}&from=40").content == whole[40:]
        assert client.get(f"{AT}&from={len(whole)}").content == b""
        rows = client.post("/v1/streams/lookup", json={"conversation_ids": [ID]}).json()
        assert rows[0]["is_done"] and rows[0]["total_bytes"] == len(whole)
    assert engine.n_done == 1 and not engine.cancelled


def test_delete_ends_the_generation_and_another_one_takes_its_place(
    serve: Callable[..., Live], engine: FakeEngine
) -> None:
    engine.script = Script(text="Hello" * 50, round_s=0.05, width=1)
    live = serve()
    drop_in_the_middle(live, engine)
    with httpx.Client(base_url=live.url, timeout=20) as client:
        assert client.delete(AT).status_code == 204 == client.delete(AT).status_code
        wait_for(lambda: engine.n_busy == 0, 10)
        assert client.get(AT).status_code == 404 and "0" in engine.cancelled
        drop_in_the_middle(live, engine)
        engine.script = Script()
        again = client.post("/v1/chat/completions", json=BODY, headers={"X-Conversation-Id": ID})
        assert text_of(again.content) == "Hello, world"
        wait_for(lambda: engine.n_busy == 0, 10)
        assert "1" in engine.cancelled and client.get(AT).content == again.content


def test_a_client_that_does_not_ask_for_it_ends_its_generation(
    serve: Callable[..., Live], engine: FakeEngine
) -> None:
    engine.script = Script(text="Hello" * 50, round_s=0.05, width=1)
    live = serve()
    with (
        httpx.Client(base_url=live.url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY),
    ):
        pass
    wait_for(lambda: engine.n_busy == 0, 10)
    assert "0" in engine.cancelled


def test_a_session_is_its_keys_own(engine: FakeEngine) -> None:
    app = app_of(engine, api_keys=("a", "b"))
    mine, other = {"Authorization": "Bearer a"}, {"X-Api-Key": "b"}

    async def both() -> None:
        async with app._client() as client:
            sent = await client.post(
                "/v1/chat/completions", json=BODY, headers=mine | {"X-Conversation-Id": ID}
            )
            assert sent.status_code == 200
            lookup = {"conversation_ids": [ID]}
            assert (await client.post("/v1/streams/lookup", json=lookup, headers=other)).json() == []
            assert (await client.get(AT, headers=other)).status_code == 404
            assert (await client.delete(AT, headers=other)).status_code == 204
            assert (await client.get(AT)).status_code == 401
            assert (await client.get(AT, headers={"X-Api-Key": "a"})).content == sent.content

    import asyncio

    asyncio.run(both())


def test_what_is_kept_is_bounded_in_bytes_time_and_number(
    serve: Callable[..., Live], engine: FakeEngine
) -> None:
    live = serve(Limits(drain_s=0.2, kept_bytes=300, kept_s=0.4, kept_streams=2))
    with httpx.Client(base_url=live.url, timeout=20) as client:
        for name in "abc":
            client.post("/v1/chat/completions", json=BODY, headers={"X-Conversation-Id": name})
        rows = client.post("/v1/streams/lookup", json={"conversation_ids": ["a", "b", "c"]}).json()
        assert [r["conversation_id"] for r in rows] == ["b", "c"]
        lost = client.get("/v1/stream?conv_id=c&from=0")
        total = rows[1]["total_bytes"]
        assert lost.status_code == 400
        assert f"the first that is, is {total - 300}" in lost.json()["error"]["message"]
        assert len(client.get(f"/v1/stream?conv_id=c&from={total - 300}").content) == 300
        time.sleep(0.6)
        assert client.post("/v1/streams/lookup", json={"conversation_ids": ["b", "c"]}).json() == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/stream", "conv_id is missing"),
        (f"{AT}&from=-1", "not a byte number"),
        (f"{AT}&from=x", "not a byte number"),
        (f"/v1/stream?conv_id={'x' * 513}", "at most 512"),
    ],
)
def test_what_is_wrong_with_a_question_is_said(engine: FakeEngine, path: str, says: str) -> None:
    app = app_of(engine)
    assert says in refusal(app.get(path))
    assert app.post("/v1/streams/lookup", {"conversation_ids": "x"}).status_code == 400
