"""Chats with a model of random weights that has harmony's template: whatever it writes keeps to the form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyspec import Engine

sys.path += [str(Path(__file__).parents[1] / name) for name in ("draft", "text")]

from rewrite import rewrite
from test_harmony import TEMPLATE

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gpt-oss.gguf"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 10}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": SCHEMA}}]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    rewrite(FIXTURE, path, change={"tokenizer.chat_template": TEMPLATE})
    with Engine.load(path, ctx=512, warm_up=False, device="cpu") as made:
        yield made


@pytest.mark.parametrize("seed", [1, 2])
def test_a_call_that_must_be_made_is_made(engine: Engine, seed: int) -> None:
    found = engine.chat(
        CHAT, tools=TOOLS, tool_choice="required", max_tokens=400, temperature=1.5, seed=seed
    )
    if found.finish_reason == "length":  # it thought to the end
        assert not found.tool_calls
        return
    (call,) = found.tool_calls
    assert found.finish_reason == "tool_calls" and call.name == "f"
    assert 10 <= json.loads(call.arguments)["n"] <= 99


@pytest.mark.parametrize("seed", [1, 2])
def test_content_keeps_to_its_schema_behind_reasoning(engine: Engine, seed: int) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    found = engine.chat(CHAT, response_format=format, max_tokens=400, temperature=1.5, seed=seed)
    assert "<|" not in found.content
    if found.finish_reason != "length":
        last = found.content[found.content.rindex("{") :]  # a preamble may stand before
        assert 10 <= json.loads(last)["n"] <= 99
