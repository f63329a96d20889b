"""Constraints over HTTP: each client's fields have their usual meaning, and unsupported ones are refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from server_client import refusal
from server_fakes import FakeEngine
from server_live import Live, serving
from waiting import wait_for

from pyspec.engine.api import Engine
from pyspec.errors import ConfigError, RequestError
from pyspec.request import Grammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "Who?"}]}
FIELDS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "json_schema": {},
    "grammar": 'root ::= "a"',
    "guided_json": json.dumps(PERSON),
    "guided_regex": "[a-z]+",
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"',
    "structured_outputs": {"regex": "[a-z]+"},
}


@pytest.fixture
def post(serve: Callable[..., Live], engine: FakeEngine) -> Callable[..., httpx.Response]:
    live = serve()
    return lambda path, body: httpx.post(live.url + path, json=body)


@pytest.mark.sampled(most=8)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_reaches_the_engine(
    post: Callable[..., httpx.Response], engine: FakeEngine, name: str, path: str
) -> None:
    prompt = CHAT if "chat" in path else {"prompt": "x"}
    assert post(path, prompt | {name: FIELDS[name]}).status_code == 200
    grammar = engine.seen[-1].grammar
    assert grammar is not None and grammar.kind == "compiled"


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with Engine.load(
        "demo", np=4, n_draft_max=4, n_draft_fixed=True, warm_up=False, check_tap_shift=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(loaded: Engine) -> Iterator[str]:
    with serving(loaded) as found:
        yield found


def test_a_schema_holds_over_http_streamed_or_whole(url: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}  # fmt: skip
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        said: Any = {
            "model": "demo",
            "temperature": 0.7,
            "seed": 1,
            "max_tokens": 200,
            "response_format": form,
        } | CHAT
        whole = client.chat.completions.create(**said)
        chunks = list(client.chat.completions.create(**said, stream=True))
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert whole.timings["draft_n"] > 0


def test_an_empty_schema_is_any_json_and_json_object_an_object(url: str) -> None:
    for body, kind in (
        ({"json_schema": {}}, object),
        ({"response_format": {"type": "json_object"}}, dict),
    ):
        asked = {"prompt": "x", "temperature": 0, "max_tokens": 100} | body
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["choices"][0]["text"]), kind)
        else:
            assert answer["choices"][0]["text"].lstrip()[0] in '{["' if kind is object else "{"


def test_a_hostile_grammar_is_a_refusal_and_others_get_their_answers(url: str) -> None:
    deep = "root ::= " + "(" * 20000 + '"a"' + ")" * 20000
    assert refusal(
        httpx.post(f"{url}/completion", json={"prompt": "x", "grammar": deep}, timeout=60)
    ).startswith("grammar: ")
    fine = httpx.post(f"{url}/completion", json={"prompt": "x", "n_predict": 3}, timeout=60)
    assert fine.status_code == 200


def test_programs_name_what_the_text_has_to_match(loaded: Engine) -> None:
    assert loaded.generate("Is it? ", choices=["yes", "no"], temperature=0).text in ("yes", "no")
    assert loaded.generate("Count: ", regex="[0-9]{3}", temperature=0).text.isdigit()
    assert loaded.generate("x", grammar='root ::= "- " [a-z]{2,5}', temperature=0).text.startswith("- ")
    person = loaded.chat(CHAT["messages"], json_schema=PERSON, temperature=0, max_tokens=200)
    jsonschema.validate(json.loads(person.text), PERSON)
    for options, said in (
        ({"choices": "yes"}, "choices is 'yes'"),
        ({"choices": []}, "choices is"),
        ({"json_schema": {"a": object()}}, "json_schema is not JSON"),
        ({"regex": 3}, "regex is 3"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices are given"),
    ):
        with pytest.raises(ConfigError, match=said):
            loaded.generate("x", **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"json_schema: .*wombat"):
        loaded.generate("x", json_schema={"type": "wombat"})


def test_what_has_no_grammar_does_not_wait_for_those_of_others(
    serve: Callable[..., Live], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are threads for text, of the same client, and more: each of them compiles for as long as it likes."""
    compiling, go, check = threading.Semaphore(0), threading.Event(), engine.check_grammar

    def slow(grammar: Grammar) -> Grammar:
        compiling.release()
        assert go.wait(60)
        return check(grammar)

    monkeypatch.setattr(engine, "check_grammar", slow)
    url, answers = serve().url, []
    bodies: list[dict[str, Any]] = [{"prompt": "x", "grammar": f'root ::= "{i}"'} for i in range(7)]
    asking = [
        threading.Thread(
            target=lambda b=b: answers.append(httpx.post(f"{url}/completion", json=b, timeout=60))
        )
        for b in bodies
    ]
    try:
        for each in asking:
            each.start()
        assert compiling.acquire(timeout=60)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        for path, body in (("/v1/chat/completions", CHAT), ("/completion", {"prompt": "y"})):
            assert httpx.post(url + path, json=body, timeout=60).status_code == 200
        assert not answers and len(engine.seen) == 2
    finally:
        go.set()
        for each in asking:
            each.join(60)
    assert [answer.status_code for answer in answers] == [200] * 7


FLAG = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}  # fmt: skip


def begun_with(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 40} | fields


@pytest.mark.parametrize(
    "text", ["{", '{"', '{"x', '{"x": t', '{\n  "x":', '{"x": false}', '{"x": fals']
)
def test_an_answer_that_has_begun_keeps_its_schema_as_a_whole(url: str, text: str) -> None:
    """The given start may end anywhere, even within a token; after a complete one the answer is empty."""
    asked = begun_with(
        text, response_format={"type": "json_schema", "json_schema": {"name": "m", "schema": FLAG}}
    )
    choice = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text + (choice["message"]["content"] or "")), FLAG)


def test_so_does_one_over_messages_and_under_other_grammars(url: str) -> None:
    asked = begun_with("[7", grammar='root ::= "[" num ("," num)* "]"\nnum ::= [0-9]{3}')
    said = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).json()["choices"][0][
        "message"
    ]["content"]
    assert said[:2].isdigit() and ("[7" + said).rstrip("]")[-3:].isdigit()
    asked = begun_with(
        "[7",
        output_config={
            "format": {"type": "json_schema", "schema": {"type": "array", "items": {"const": 71}}}
        },
    )
    said = httpx.post(f"{url}/v1/messages", json=asked | {"model": "demo"}, timeout=60).json()[
        "content"
    ][0]["text"]
    assert said[0] == "1"


@pytest.mark.parametrize("text", ["Sure: ", '{"y', '{"x": true} and', "[", '{"x": 1'])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_begun_otherwise_is_refused_at_once(
    url: str, text: str, stream: bool
) -> None:
    asked = begun_with(text, json_schema=FLAG, stream=stream)
    assert "has begun with" in refusal(httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": 'root ::= "a"', "logit_bias": [["a", False]]}, "allows first"),
        ({"grammar": 'root ::= "" | "a"', "logit_bias": [["a", False]], "ignore_eos": True}, "allows first"),
        ({"grammar": 'root ::= ""', "min_tokens": 2}, "allows first"),
        ({"grammar": 'root ::= "b" "a"', "logit_bias": [["a", False], ["ba", False]]}, "position 2"),
    ],
)  # fmt: skip
def test_a_request_that_bans_all_that_its_grammar_allows_is_at_fault_itself(
    url: str, fields: dict[str, Any], said: str
) -> None:
    """Before a slot is taken where it shows there, and never as the server's error."""
    asked = {"prompt": "x", "n_predict": 4} | fields
    refused = httpx.post(f"{url}/completion", json=asked, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert said in refused.json()["error"]["message"]
    streamed = httpx.post(f"{url}/completion", json=asked | {"stream": True}, timeout=60)
    lines = [json.loads(line[5:]) for line in streamed.text.splitlines() if line.startswith("data:")]
    told = lines[-1] if lines else streamed.json()
    assert told["error"]["type"] == "invalid_request_error" and told["error"]["code"] == 400
