"""Constraints over HTTP: each client's fields mean what they mean elsewhere, and what can not be kept is refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from server_fakes import FakeEngine
from server_live import Live, wait_for

from pyspec.engine.api import Engine
from pyspec.errors import ConfigError, RequestError
from pyspec.server.app import create_app
from pyspec.server.http.serve import bind, make_server
from pyspec.server.settings import Limits, ServerSettings

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
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


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "json_schema": None, "grammar": "", "guided_choice": [], "guided_regex": ""},
        {"structured_outputs": {"json": None, "regex": None}},
    ],
)
def test_what_asks_for_nothing_constrains_nothing(
    post: Callable[..., httpx.Response], engine: FakeEngine, body: dict[str, Any]
) -> None:
    assert post("/v1/chat/completions", CHAT | body).status_code == 200
    assert engine.seen[-1].grammar is None


@pytest.mark.sampled(most=7)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema is given, too"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format is given, too"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "is given, too"),
        ({"response_format": {"type": "yaml"}}, "response_format.type: 'yaml'"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wombat"}}}}, "wombat"),
        ({"response_format": "json"}, "response_format"),
        ({"json_schema": {"not": {}}}, "json_schema: "),
        ({"json_schema": [1]}, "json_schema"),
        ({"grammar": "root ="}, "grammar: "),
        ({"grammar": 3}, "grammar"),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"guided_choice": [""]}, "guided_choice: "),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ],
)
def test_what_can_not_be_kept_is_refused_by_the_name_of_its_field(
    post: Callable[..., httpx.Response], engine: FakeEngine, body: dict[str, Any], said: str
) -> None:
    answer = post("/v1/chat/completions", CHAT | body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert not engine.seen


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with Engine.load("demo", np=4, n_draft_max=4, n_draft_fixed=True, warm_up=False, check_tap_shift=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(loaded: Engine) -> Iterator[str]:
    settings = ServerSettings(port=0, limits=Limits(drain_s=0.2))
    with bind(settings) as sock:
        server = make_server(create_app(loaded, settings), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_a_schema_holds_over_http_streamed_or_whole(url: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        said: Any = {"model": "demo", "temperature": 0.7, "seed": 1, "max_tokens": 200, "response_format": form} | CHAT
        whole = client.chat.completions.create(**said)
        chunks = list(client.chat.completions.create(**said, stream=True))
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert whole.timings["draft_n"] > 0


def test_an_empty_schema_is_any_json_and_json_object_an_object(url: str) -> None:
    for body, kind in (({"json_schema": {}}, object), ({"response_format": {"type": "json_object"}}, dict)):
        asked = {"prompt": "x", "temperature": 0, "max_tokens": 100} | body
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        if answer["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(answer["choices"][0]["text"]), kind)
        else:
            assert answer["choices"][0]["text"].lstrip()[0] in '{["' if kind is object else "{"


def test_a_hostile_grammar_is_a_refusal_and_others_get_their_answers(url: str) -> None:
    deep = "root ::= " + "(" * 20000 + '"a"' + ")" * 20000
    refused = httpx.post(f"{url}/completion", json={"prompt": "x", "grammar": deep}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("grammar: ")
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
        ({"json_schema": {"a": object()}}, "json_schema is no JSON"),
        ({"regex": 3}, "regex is 3"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices are given"),
    ):
        with pytest.raises(ConfigError, match=said):
            loaded.generate("x", **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"json_schema: .*wombat"):
        loaded.generate("x", json_schema={"type": "wombat"})
