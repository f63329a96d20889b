"""The attacks of tests/long_runs/hostile.py: one function for each way of being a nuisance.

Each takes a Client and returns the answer's status, 0 if the connection was closed without an answer, or None if it did not wait for one.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, NATIVE = "/v1/chat/completions", "/completion"
GENERATING = (CHAT, NATIVE, "/v1/completions", "/v1/messages", "/v1/responses")
MEDIUM = (
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/input_tokens",
)
GOING_ON = b"HTTP/1.1 102"
PATIENCE_S = 600.0  # a verdict that hangs on how busy the machine is would be none
WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 31, 1 << 63, 1 << 200, -1e308, 1e-300, 0.5, "", "x", "\x00", "\u202e", "1" * 400, [], {}, [None], [[]],
    [1, "a", [2]], {"a": 1}, {"type": "json_object"}, [{"role": "user"}], ["x"] * 300, [1e9, -5], {"": {"": []}},
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "max_tokens", "n_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream", "n", "best_of",
    "logit_bias", "logprobs", "top_logprobs", "n_probs", "tools", "tool_choice", "response_format", "json_schema", "grammar", "samplers", "mirostat",
    "dry_multiplier", "dry_sequence_breakers", "repeat_penalty", "repeat_last_n", "xtc_probability", "cache_prompt", "id_slot", "t_max_predict_ms",
    "chat_template_kwargs", "reasoning_format", "reasoning_budget_tokens", "speculative.n_max", "stream_options", "sse_ping_interval", "min_tokens",
    "echo", "suffix", "prompt_logprobs", "thinking", "system", "input", "instructions", "content", "tokens", "lora", "ignore_eos", "n_keep",
)  # fmt: skip
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/x.json"},
    {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    {"type": "string", "minLength": 1 << 40},
    {"type": "array", "minItems": 1 << 30, "items": {"type": "integer"}},
    {"enum": [f"word {i}" for i in range(20_000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}, "additionalProperties": False},
    {"allOf": [{"anyOf": [{"type": "string", "maxLength": i}, {"minimum": i}]} for i in range(60)]},
    {"type": "number", "multipleOf": 1e-300},
    {"type": "nothing"},
)  # fmt: skip
GRAMMARS = (
    "root ::= root", "root ::= root root | root", 'root ::= ("a" | "aa")* "b"{100000}', 'root ::= (("x"?){1000}){1000}', "root ::= [", "",
    "root ::= missing", 'root ::= "' + "a" * 200_000 + '"', "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"']), "root ::= [\U0010ffff-\x00]+",
)  # fmt: skip
KWARGS: tuple[Any, ...] = (
    {"a": "<|im_end|>"},
    {"messages": []},
    {"range": 10**9},
    {"x" * 500: [1] * 1000},
    {"enable_thinking": "perhaps"},
    7,
)


@dataclass
class Client:
    """A client with its own address."""

    port: int
    rng: random.Random
    address: str
    is_timid: bool = False  # bodies are small and waits short: for tests

    def connect(self) -> socket.socket:
        """A connection from the client's own address where the system has it, as Linux does for all of 127.0.0.0/8."""
        try:
            return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (self.address, 0))
        except OSError:
            return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def send(self, raw: bytes, *, shut: bool = False) -> int:
        """Bytes as they are, and the status of the first answer that is one."""
        with self.connect() as sock:
            try:
                sock.sendall(raw)
                if shut:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the answer may be there all the same
            return status_of(sock)

    def post(self, path: str, body: Any, **headers: str) -> int:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(head(path, len(raw), **headers) + raw)


def head(path: str, length: int, *, method: str = "POST", **headers: str) -> bytes:
    lines = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Connection": "close",
    } | headers
    return "".join(
        [
            f"{method} {path} HTTP/1.1\r\n",
            *(f"{k.replace('_', '-')}: {v}\r\n" for k, v in lines.items()),
            "\r\n",
        ]
    ).encode("latin-1")


def status_of(sock: socket.socket) -> int:
    """Read to the end; the status, or 0. Raises TimeoutError where nothing comes."""
    got = b""
    try:
        while data := sock.recv(1 << 16):
            while (got := got + data if len(got) < 64 else got).startswith(
                GOING_ON
            ) and b"\r\n\r\n" in got:
                got, data = got.partition(b"\r\n\r\n")[2], b""
    except ConnectionError:
        pass
    return int(got[9:12]) if got.startswith(b"HTTP/1.") and got[9:12].isdigit() else 0


# -- bytes and bodies ------------------------------------------------------------------------------------------------------------------


def malformed(client: Client) -> int:
    """A body in which a few bytes are wrong, or that is cut."""
    rng = client.rng
    raw = bytearray(
        json.dumps(
            {"messages": HELLO, "prompt": "Hello \u00e4", "max_tokens": 2, "stop": ["x"]}
        ).encode()
    )
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.choice(
            (0, 0x22, 0x5B, 0x7B, 0x7D, 0x80, 0xFF, rng.randrange(256))
        )
    return client.post(
        rng.choice(GENERATING + MEDIUM), bytes(raw[: rng.choice((len(raw), rng.randrange(len(raw))))])
    )


def wrong_fields(client: Client) -> int:
    """Fields that exist, with values that they can not have."""
    rng = client.rng
    body: dict[str, Any] = {"messages": HELLO, "prompt": "Hello", "input": "Hello", "content": "Hello", "max_tokens": 2, "n_predict": 2}  # fmt: skip
    body |= {rng.choice(FIELDS): rng.choice(WEIRD) for _ in range(rng.randint(1, 3))}
    if not isinstance(body.get("max_tokens"), int) or not 0 <= body["max_tokens"] < 9:
        body |= {"temperature": 0}
    return client.post(rng.choice(GENERATING + MEDIUM), body)


def huge_body(client: Client) -> int:
    """As much text as a body may have, and more."""
    n = client.rng.choice(
        (100_000, 1 << 20) if client.is_timid else (1 << 20, 8_300_000, 8_388_608, 9_000_000)
    )
    text = client.rng.choice(("a", "a b ", "\u00e9", "0123", " \n", "<|im_end|>"))
    text *= n // len(text.encode())
    path = client.rng.choice(("/tokenize", CHAT, NATIVE))
    return client.post(path, f'{{"content": "{text}", "prompt": "x"}}'.replace("\n", " ").encode())


def nested(client: Client) -> int:
    """Lists in lists, deep or wide."""
    n = client.rng.choice((200, 20_000) if client.is_timid else (200, 20_000, 1_000_000))
    what = client.rng.choice(
        (
            b"[" * n,
            b"[]," * n + b"[]",
            b'{"a":' * n,
            b'{"a":[]},' * n + b"1",
            b"[[],[]]," * (n // 2) + b"0",
        )
    )
    end = b"]" * n if what.startswith(b"[" * 2) and what.count(b"]") == 0 else b""
    key = client.rng.choice((b"prompt", b"messages", b"tools", b"logit_bias", b"stop"))
    return client.post(client.rng.choice(GENERATING), b'{"' + key + b'": [' + what + end + b"]}")


def garbage(client: Client) -> int:
    """Send bytes that are not HTTP, or HTTP that two readers could read in two ways."""
    rng, body = client.rng, b'{"prompt": "x"}'
    kinds = (
        rng.randbytes(rng.randint(1, 3000)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"BREW /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /" + b"a" * rng.choice((100, 40_000)) + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * rng.choice((100, 9000)) + b"Connection: close\r\n\r\n",
        head(NATIVE, len(body), Transfer_Encoding="chunked") + body,
        head(NATIVE, -5) + body,
        head(NATIVE, len(body), Content_Length="99999999999999999999") + body,
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n" + body,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        head("/%00/../..//slots/%2e%2e?action=erase", 2) + b"{}",
        head("/slots/0?action=save", 30) + b'{"filename": "../../etc/pass"}',
        head("/slots/99999999999?action=erase", 2) + b"{}",
    )  # fmt: skip
    return client.send(rng.choice(kinds), shut=True)


def wrong_host(client: Client) -> int:
    """A page under a foreign name that leads here, or one of another origin."""
    host = client.rng.choice(
        ("evil.example", "evil.example:8080", "localhost.evil.example", "", "a" * 5000, "[::1", "\u00fc")
    )
    headers = {"Host": host} | client.rng.choice(
        ({}, {"Origin": "http://evil.example"}, {"Origin": "null"})
    )
    return client.post(CHAT, {"messages": HELLO, "max_tokens": 1}, **headers)


def odd_key(client: Client) -> int:
    """Keys that are not ASCII, and headers that are not text."""
    key = client.rng.choice(("schl\u00fcssel", "\u00ff" * 100, "Bearer", "a b c", "x" * 20_000))
    name = client.rng.choice(
        ("Authorization", "x-api-key", "X-Request-Id", "X-Conversation-Id", "Accept", "Content-Type")
    )
    return client.post(CHAT, {"messages": HELLO, "max_tokens": 1}, **{name: f"Bearer {key}"})


# -- time ------------------------------------------------------------------------------------------------------------------------------


def slow_body(client: Client) -> int | None:
    """A body that comes a byte at a time, and stays away before it ends."""
    with client.connect() as sock:
        sock.sendall(head(CHAT, 1000) + b"{")
        for _ in range(client.rng.randint(1, 5 if client.is_timid else 40)):
            time.sleep(0.1)
            try:
                sock.sendall(b" ")
            except OSError:
                return status_of(sock)
        if client.is_timid or client.rng.random() < 0.7:
            return None
        return status_of(sock)


def half_open(client: Client) -> None:
    """Connections that say nothing, or half of it."""
    socks = [client.connect() for _ in range(client.rng.randint(1, 20))]
    for sock in socks:
        sock.sendall(
            client.rng.choice(
                (b"", b"G", b"GET /health HTTP/1.1\r\nHost: ", b"POST /completion HTTP/1.1\r\nX: y\r\n")
            )
        )
    time.sleep(0.3 if client.is_timid else client.rng.uniform(0, 12))
    for sock in socks:
        sock.close()


def cancel(client: Client) -> None:
    """A stream that is left in its middle, at its beginning or before it has begun."""
    rng = client.rng
    path = rng.choice((CHAT, NATIVE, "/v1/completions"))
    body = {"messages": HELLO, "prompt": "Hello", "stream": rng.random() < 0.8, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True}  # fmt: skip
    raw = json.dumps(body).encode()
    with client.connect() as sock:
        sock.sendall(head(path, len(raw)) + raw)
        for _ in range(rng.randint(0, 6)):
            if not body["stream"] or not sock.recv(4096):
                break
        time.sleep(rng.choice((0, 0, 0.02, 0.2)))
        if rng.random() < 0.5:  # a reset instead of an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def deaf(client: Client) -> None:
    """A stream that is asked for and not read."""
    raw = json.dumps(
        {"prompt": "Hello", "stream": True, "n_predict": 300, "n_probs": 20, "ignore_eos": True}
    ).encode()
    with client.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.sendall(head(NATIVE, len(raw)) + raw)
        time.sleep(0.5 if client.is_timid else client.rng.uniform(0.5, 5))


def half_closed(client: Client) -> int:
    """A client that sends no more, and still reads."""
    raw = json.dumps({"messages": HELLO, "max_tokens": 3, "stream": client.rng.random() < 0.5}).encode()
    return client.send(head(CHAT, len(raw)) + raw, shut=True)


# -- work ------------------------------------------------------------------------------------------------------------------------------


def huge_n(client: Client) -> int:
    """Very many choices, prompts, tokens or alternatives."""
    body = {"prompt": "Hello", "max_tokens": 2} | client.rng.choice((
        {"n": 1 << 30}, {"n": 2, "prompt": ["a"] * 64}, {"best_of": 9999}, {"prompt": ["a"] * 100_000}, {"max_tokens": 1 << 60, "n_probs": 1 << 20},
        {"logprobs": 10**6, "max_tokens": 1 << 40}, {"prompt": [[1] * 3000] * 3}, {"prompt": list(range(5000))}, {"n": 4, "max_tokens": 60},
        {"stop": ["x" * 200] * 256}, {"logit_bias": {str(i): -100 for i in range(600)}}, {"logit_bias": [[i, False] for i in range(8000)]},
        {"id_slot": 0}, {"id_slot": 1 << 40},
    ))  # fmt: skip
    return client.post(client.rng.choice(("/v1/completions", NATIVE)), body)


def hostile_schema(client: Client) -> int:
    """Schemas and grammars that no compiler should be given."""
    rng = client.rng
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 4}
    schema: Any = rng.choice(SCHEMAS)
    for _ in range(rng.choice((0, 0, 0, 30, 500))):
        schema = {"type": "array", "items": schema}
    which = rng.randrange(4)
    if which == 0:
        body["grammar"] = rng.choice(GRAMMARS)
    elif which == 1:
        body["json_schema"] = schema
    elif which == 2:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}  # fmt: skip
    else:
        body["tools"] = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": schema, "strict": True}}
            for i in range(3)
        ]
        body["tool_choice"] = "required"
    return client.post(CHAT, body)


def templates(client: Client) -> int:
    """Chats that make a template work: very many messages, control tokens, arguments that mean nothing."""
    rng = client.rng
    n = rng.choice((1, 10, 400) if client.is_timid else (1, 400, 4096, 5000))
    text = rng.choice(
        (
            "Hello",
            "<|im_start|>system\n",
            "{{ 7 * 7 }}{% for x in range(10**9) %}",
            "\ue0000\ue001",
            "x" * 1000,
        )
    )
    body = {"messages": [{"role": rng.choice(("user", "assistant", "tool", "x")), "content": text} for _ in range(n)], "max_tokens": 1}  # fmt: skip
    return client.post(
        rng.choice((CHAT, "/apply-template", "/v1/messages")),
        body | {"chat_template_kwargs": rng.choice(KWARGS)},
    )


def retry(client: Client) -> int:
    """A long prompt that is sent again at once whenever it is refused."""
    status = 0
    for i in range(3 if client.is_timid else 20):
        words = " ".join(f"word{client.rng.randrange(999)}" for _ in range(250))
        status = client.post(NATIVE, {"prompt": words, "n_predict": 8, "cache_prompt": i % 2 == 0})
        if status != 429:
            break
    return status


ATTACKS: tuple[Callable[[Client], int | None], ...] = (
    malformed, wrong_fields, huge_body, nested, garbage, wrong_host, odd_key, slow_body, half_open, cancel, deaf, half_closed, huge_n,
    hostile_schema, templates, retry,
)  # fmt: skip
OFTEN = (malformed, wrong_fields, cancel, garbage, odd_key, wrong_host)
"""Cheap attacks, drawn three times as often."""
