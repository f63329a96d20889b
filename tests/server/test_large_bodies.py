"""Large and wrong bodies are refused without work that grows beyond a bound, off the event loop, and in our own words."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import ValidationError
from server_client import app_of
from server_fakes import FakeEngine

from pyspec.errors import RequestError
from pyspec.server.api import anthropic, generate, responses, schema
from pyspec.server.http import body
from pyspec.server.http.body import parse_object
from pyspec.server.settings import Limits

FOREIGN = re.compile(
    r"(?i)input should|instance of|extra inputs|validation|value error|f64|regex parse|unsatisfiable|pydantic| \| |\^|dict\[|list\["
)
WRONG = (None, True, -1, 1.5, "x", "", [], {}, [1], {"a": 1}, [[1]], [{}], 10**30, [None], {"type": "x"})
SCHEMAS: list[Any] = [
    {"type": "foo"}, {"pattern": "("}, {"minimum": "x"}, {"enum": []}, {"anyOf": []}, {"pattern": "a{2,1}", "type": "string"},
    {"allOf": [{"type": "string"}, {"type": "number"}]}, {"type": "integer", "minimum": 5, "maximum": 1}, {"properties": 3},
    {"type": "string", "minLength": -1}, {"multipleOf": 0}, {"type": "string", "pattern": "\\p{Foo}"},
]  # fmt: skip
GRAMMARS = [
    "start: ",
    "start: /(/",
    "start: x",
    'start: "a"{3,1}',
    "start: a[b]",
    "%llguidance",
    "root ::= (",
]


def models() -> Iterator[type[schema.Body]]:
    for module in (schema, anthropic, responses, generate):
        for each in vars(module).values():
            if isinstance(each, type) and issubclass(each, schema.Body):
                yield each


def has_list(kind: Any) -> bool:
    if get_origin(kind) is Annotated or get_origin(kind) in (Union, UnionType):
        return any(map(has_list, get_args(kind)))
    return get_origin(kind) is list


def test_a_list_of_wrong_items_is_one_error() -> None:
    """Thousands of errors are made in one call, in which nothing else runs."""
    seen = 0
    for model in models():
        for name, field in model.model_fields.items():
            if not has_list(field.annotation):
                continue
            seen += 1
            for item in (7.5, None, {"type": 7}, ["x"]):
                try:
                    model.model_validate({field.alias or name: [item] * 300})
                except ValidationError as e:
                    errors = [x for x in e.errors() if name in x["loc"][:1]]
                    assert len(errors) < 5, (model, name, errors[:3])
    assert seen > 15


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"prompt": "a", "logit_bias": [[i % 250, 1] for i in range(300_000)]}),
        json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(400_000)}}),
        json.dumps({"prompt": [7] * 1_500_000}),
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 150_000}),
        '{"a":' + "[" * 3_000_000,
        '{"a":"' + '\\",\\"' * 10,
    ],
)
def test_too_many_values_are_refused_before_they_are_made(
    raw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "SMALL", 0)
    if len(raw) > 1000:
        monkeypatch.setattr(json, "loads", lambda *a, **k: pytest.fail("it is parsed"))
    with pytest.raises(
        RequestError, match="more than 200000 objects" if len(raw) > 1000 else "not JSON"
    ):
        parse_object(raw.encode(), Limits())


def test_text_is_no_value_however_it_looks() -> None:
    text = '[{,:"\\' * 600_000
    raw = json.dumps({"prompt": text, "b": ["é"] * 1000}, ensure_ascii=False).encode()
    assert parse_object(raw, Limits()) == {"prompt": text, "b": ["é"] * 1000}
    assert len(parse_object(json.dumps({"a": [1] * 1_000_000}).encode(), Limits())["a"]) == 1_000_000
    with pytest.raises(RequestError, match="2000 fields; at most 1024"):
        parse_object(json.dumps({f"k{i}": 1 for i in range(2000)}).encode(), Limits())


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/slots/0?action=save", {"filename": "a.bin"}),
        ("/v1/streams/lookup", {"conversation_ids": ["a"]}),
        ("/tokenize", {"content": "a"}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_no_body_is_parsed_on_the_event_loop(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, sent: Any
) -> None:
    where: list[str] = []
    check = body._check_tree
    monkeypatch.setattr(
        body,
        "_check_tree",
        lambda *a, **k: (where.append(threading.current_thread().name), check(*a, **k)),
    )
    app = app_of(engine, slot_save_path=str(tmp_path))
    assert app.post(path, sent).status_code == 200
    assert where and all(name.startswith("pyspec-") for name in where)


def test_refusals_have_no_words_of_libraries(engine: FakeEngine) -> None:
    app, said = app_of(engine), set()
    turn = {"role": "user", "content": "hi"}
    plain = {"messages": [turn], "max_tokens": 1, "input": "hi", "prompt": "a"}

    def ask(path: str, **more: Any) -> None:
        answer = app.post(path, plain | more)
        assert answer.status_code in (200, 400, 501), answer.text
        if answer.status_code == 400:
            said.add(answer.json()["error"]["message"])

    for path, model in (
        ("/v1/chat/completions", schema.ChatBody),
        ("/completion", schema.NativeBody),
        ("/v1/messages", anthropic.MessagesBody),
        ("/v1/responses", responses.ResponsesBody),
    ):
        for name, field in model.model_fields.items():
            for value in WRONG:
                ask(path, **{field.alias or name: value})
    for value in WRONG:
        for name in ("role", "content", "tool_calls", "name", "tool_call_id"):
            ask("/v1/chat/completions", messages=[turn | {name: value}])
            ask("/v1/messages", messages=[turn | {name: value}])
    for found in SCHEMAS:
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}
        ask("/v1/chat/completions", response_format=given)
    for source in GRAMMARS:
        for name in ("grammar", "guided_grammar", "guided_regex"):
            ask("/completion", **{name: source})
    assert len(said) > 100
    assert not [message for message in said if FOREIGN.search(message)]
