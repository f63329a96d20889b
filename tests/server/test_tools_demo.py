"""Calls, reasoning budgets and other templates with a real model behind the server: drafts do not change the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from server_client import App, app_of

import pyspec

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Answer with <tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>.\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}'
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["c", "f"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
QUICK: Any = {"np": 2, "warm_up": False, "check_tap_shift": False}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "temperature": 0, "max_tokens": 120}  # fmt: skip
CALL = BODY | {
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning_budget_tokens": 12,
}


@pytest.fixture(scope="module")
def apps() -> Iterator[list[App]]:
    """Without drafts, and with the demo's drafter."""
    with (
        pyspec.Engine.load("demo", None, **QUICK) as plain,
        pyspec.Engine.load("demo", **QUICK) as drafted,
    ):
        for engine in (plain, drafted):
            engine.use_template(TEMPLATE)
        yield [app_of(engine) for engine in (plain, drafted)]


def message(app: App, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    response = app.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def without_ids(value: dict[str, Any]) -> dict[str, Any]:
    return value | {"tool_calls": [call | {"id": ""} for call in value.get("tool_calls", ())]}


@pytest.mark.slow
@pytest.mark.sampled(most=1)
def test_a_required_call_fits_its_schema_behind_reasoning_that_the_budget_ends(apps: list[App]) -> None:
    found = [message(app, CALL) for app in apps]
    assert without_ids(found[0][0]) == without_ids(found[1][0])
    for said, finish in found:
        assert finish == "tool_calls" and said["content"] is None and said["reasoning_content"]
        (call,) = [c["function"] for c in said["tool_calls"]][:1]
        assert call["name"] == "weather"
        jsonschema.validate(json.loads(call["arguments"]), SCHEMA)


@pytest.mark.slow
def test_a_stream_says_the_same(apps: list[App]) -> None:
    whole, _ = message(apps[1], CALL)
    deltas = [
        e["choices"][0]["delta"]
        for e in apps[1].events("/v1/chat/completions", CALL | {"stream": True})
        if e != "[DONE]"
    ]
    calls = [
        call["function"]
        for delta in deltas
        for call in delta.get("tool_calls", ())
        if call["index"] == 0
    ]
    assert (
        "".join(call["arguments"] for call in calls) == whole["tool_calls"][0]["function"]["arguments"]
    )
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole["reasoning_content"]


@pytest.mark.sampled(most=1)
def test_a_budget_of_nothing_ends_reasoning_at_once(apps: list[App]) -> None:
    none, _ = message(apps[1], BODY | {"reasoning_budget_tokens": 0, "max_tokens": 20})
    assert "reasoning_content" not in none and none["content"]
    some, _ = message(
        apps[1],
        BODY | {"reasoning_budget_tokens": 5, "reasoning_budget_message": " Enough.", "max_tokens": 30},
    )
    assert some["reasoning_content"].endswith(" Enough.") and some["content"]
    off, _ = message(
        apps[1], BODY | {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 8}
    )
    assert "reasoning_content" not in off


def test_a_whole_round_of_tools_goes_through_the_template(apps: list[App]) -> None:
    said, _ = message(apps[1], CALL)
    turns = [
        *CALL["messages"],
        said,
        {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "Sunny. <|im_end|>"},
    ]
    answer, _ = message(apps[1], BODY | {"messages": turns, "tools": TOOLS, "max_tokens": 8})
    assert answer["role"] == "assistant"
    prompt = apps[1].post("/apply-template", {"messages": turns, "tools": TOOLS}).json()["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"days": ' in prompt, (
        "arguments are an object there"
    )


def test_a_template_that_does_not_compile_is_refused() -> None:
    """The one before stays."""
    with pyspec.Engine.load("demo", None) as engine:
        source = engine.info.chat_template
        with pytest.raises(pyspec.PyspecError, match="does not compile"):
            engine.use_template("{% for %}")
        assert engine.state() == "ok" and engine.info.chat_template == source
        assert engine.generate([{"role": "user", "content": "hi"}], max_tokens=3).text
