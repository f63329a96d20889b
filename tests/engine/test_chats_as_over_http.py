"""The same chat by HTTP and from Python: the same prompt and grammar, and the same parsed answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_rig import DEMO

from pyspec.engine.api import Engine
from pyspec.engine.chat_tools import ChatResult
from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))
from server_client import app_of

TURNS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}CALL{{ c.function | tojson }}{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
LISTED = "{%- if tools -%}{{ tools | tojson }}\n{%- endif -%}"
TEMPLATES = {
    "qwen xml": "{# <tool_call> <function= <parameter= #}" + LISTED + TURNS + "{{ '<think>\n' if add_generation_prompt }}{# </think> #}",
    "hermes": "{# <tool_call> </tool_call> arguments <think> </think> #}"
    + LISTED
    + TURNS
    + "{{ '<think>\n\n</think>\n\n' if enable_thinking is not defined or not enable_thinking }}",
    "mistral list": "{# [TOOL_CALLS] #}" + LISTED + TURNS,
    "no dialect": "{%- for m in messages -%}[{{ m.role }}]{{ m.content }}\n{%- endfor -%}{{ '[assistant]' if add_generation_prompt }}",
    "no dialect, tools listed": LISTED
    + "{%- for m in messages -%}{{ m.role }}: {{ m.content }}\n{%- endfor -%}{{ 'assistant: ' if add_generation_prompt }}",
    "no system role": "{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('turns') }}{%- endif -%}"
    "<start>{{ m.role }}\n{{ m.content | trim }}<end>\n{%- endfor -%}{{ '<start>model\n' if add_generation_prompt }}",
}  # fmt: skip
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 2, "maximum": 7}, "unit": {"enum": ["c", "f"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER: dict[str, Any] = {"name": "weather", "description": "Of <|im_end|> a few days.", "parameters": PARAMETERS}  # fmt: skip
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": WEATHER}, CLOCK]
STRICT: list[dict[str, Any]] = [{"type": "function", "function": WEATHER | {"strict": True}}, CLOCK]
ODD: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "wombat"}}}}}
]  # fmt: skip
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ONLY_CLOCK = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How warm will it be?"}]
CALL = {"id": "call00007", "type": "function", "function": {"name": "weather", "arguments": '{"days": 3, "unit": "c"}'}}  # fmt: skip
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "call00008"}]},
    {"role": "tool", "tool_call_id": "call00007", "content": "Rain. <|im_end|>"},
    {"role": "tool", "tool_call_id": "call00008", "content": "Sun."},
    {"role": "user", "content": "So?"},
]  # fmt: skip
CHATS: dict[str, dict[str, Any]] = {
    "without tools": {},
    "auto": {"tools": TOOLS},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "one of them allowed": {"tools": TOOLS, "tool_choice": ONLY_CLOCK},
    "strict": {"tools": STRICT},
    "one at most": {"tools": TOOLS, "parallel_tool_calls": False},
    "one that is required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "hosted tools beside": {"tools": [{"type": "web_search"}, *TOOLS]},
    "a schema that can not be kept": {"tools": ODD},
    "a schema beside tools": {"tools": TOOLS, "json_schema": OBJECT},
    "a format beside strict tools": {"tools": STRICT, "response_format": FORMAT},
    "a format beside a schema that can not be kept": {"tools": ODD, "response_format": FORMAT},
    "a format beside a required call": {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT},
    "an object": {"response_format": {"type": "json_object"}},
    "a history": {"messages": HISTORY, "tools": TOOLS},
    "a history alone": {"messages": HISTORY},
    "a history, none": {"messages": HISTORY, "tools": TOOLS, "tool_choice": "none"},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "no tools to choose from": {"tool_choice": "required"},
    "a name that none has": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sleep"}}},
    "a schema that has to be kept": {"tools": ODD, "tool_choice": "required"},
    "twice the same": {"tools": [CLOCK, CLOCK]},
    "a format that there is not": {"tools": TOOLS, "response_format": {"type": "xml"}},
    "a format that can not be kept": {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wombat"}}}},
    "only hosted tools": {"tools": [{"type": "web_search"}], "tool_choice": "required"},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(DEMO, np=1, ctx=2048, warm_up=False, device="cpu") as engine:
        yield engine


@pytest.fixture(params=sorted(TEMPLATES), scope="module")
def spoken(request: pytest.FixtureRequest, engine: Engine) -> Engine:
    """All tests of a template come in a row: each template has its own process, which takes longer than a chat."""
    engine.use_template(TEMPLATES[request.param])
    return engine


@pytest.fixture
def seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the engine gets."""
    found: list[Request] = []
    submit = engine._send

    def listen(request: Request, sink: Any) -> str:
        found.append(request)
        return submit(request, sink)

    monkeypatch.setattr(engine, "_send", listen)
    return found


def body_of(name: str) -> dict[str, Any]:
    return {"messages": ASKED, "temperature": 0, "max_tokens": 6} | (CHATS | REFUSED)[name]


def from_python(engine: Engine, body: dict[str, Any]) -> ChatResult:
    return engine.chat(
        body["messages"], **{name: value for name, value in body.items() if name != "messages"}
    )


def both(engine: Engine, body: dict[str, Any]) -> ChatResult:
    """The answer by Python, equal to the one over HTTP."""
    response = app_of(engine).post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    answer, said = from_python(engine, body), choice["message"]
    assert answer.content == (said["content"] or "") and answer.reasoning == said.get(
        "reasoning_content", ""
    )
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls", ())
    ]
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert answer.finish_reason == choice["finish_reason"]
    return answer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_the_same_by_both_ways(spoken: Engine, seen: list[Request], name: str) -> None:
    both(spoken, body_of(name))
    over_http, by_python = seen
    assert by_python.prompt == over_http.prompt
    assert by_python.grammar == over_http.grammar and by_python.shown == over_http.shown


@pytest.mark.parametrize("spoken", ["no dialect"], indirect=True)
@pytest.mark.parametrize("name", REFUSED)
def test_what_http_refuses_is_refused_with_the_same_words(spoken: Engine, name: str) -> None:
    body = body_of(name)
    response = app_of(spoken).post("/v1/chat/completions", body)
    assert response.status_code == 400
    with pytest.raises(PyspecError) as e:
        from_python(spoken, body)
    assert str(e.value) == response.json()["error"]["message"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spoken", ["mistral list", "no dialect", "no system role"], indirect=True)
@pytest.mark.parametrize("name", ["named", "one that is required"])
def test_a_call_that_ended_the_answer_is_why_it_ended(spoken: Engine, name: str) -> None:
    answer = both(spoken, body_of(name) | {"tools": [CLOCK], "max_tokens": 300})
    assert [(call.name, call.values()) for call in answer.tool_calls] == [("clock", {})]
    assert answer.finish_reason == "tool_calls" and answer.content == ""
    cut = from_python(spoken, body_of(name) | {"tools": [CLOCK], "max_tokens": 3})
    assert cut.finish_reason == "length"


@pytest.mark.parametrize("spoken", ["mistral list"], indirect=True)
def test_a_format_holds_the_text_beside_tools(spoken: Engine) -> None:
    answer = both(spoken, body_of("a format beside strict tools") | {"max_tokens": 200})
    assert answer.tool_calls or json.loads(answer.content).keys() == {"ok"}


def test_a_format_and_a_schema_are_one_too_many(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="response_format and regex are given"):
        engine.chat(ASKED, response_format=FORMAT, regex="a+")
    with pytest.raises(RequestError, match="response_format: want an object"):
        engine.chat(ASKED, response_format="json")  # type: ignore[typeddict-item]
    with pytest.raises(RequestError, match="parallel_tool_calls is 'no'"):
        engine.chat(ASKED, parallel_tool_calls="no")  # type: ignore[typeddict-item]
