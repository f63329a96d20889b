"""Changing parts of agents' system prompts: removed, or moved on request, and reported."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner
from server_client import app_of
from server_fakes import FakeEngine

from pyspec.cli import main
from pyspec.server.api.steady import steady, with_lines, without_transport

DATE = re.compile(r"^Today's date:")
BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (BILLING, ""),
        (BILLING + "\nYou are", "You are"),
        (BILLING + "You are", "You are"),
        (BILLING.rstrip(";"), ""),
        (BILLING.rstrip(";") + "\nYou are", "You are"),
        ("x-anthropic-billing-header: something new\nYou are", "something new\nYou are"),
        ("You are. " + BILLING, "You are. " + BILLING),
    ],
)
def test_a_header_for_a_server_is_no_part_of_the_system_prompt(text: str, left: str) -> None:
    assert without_transport(text) == left


def test_a_hostile_header_takes_no_time() -> None:
    for tail in ("a=" * 200_000, "a=b;" * 200_000 + "\r", " " * 400_000, "a" * 400_000):
        without_transport("x-anthropic-billing-header:" + tail)


def test_volatile_lines_go_behind_the_conversation() -> None:
    messages = [
        {"role": "system", "content": "You are.\nToday's date: Monday\nBe kind."},
        {"role": "user", "content": "Today's date: no"},
        {"role": "assistant", "content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": "sun"}]},
    ]
    left, lines = steady(messages, [DATE])
    assert left == [{"role": "system", "content": "You are.\nBe kind."}, *messages[1:]]
    assert lines == ["Today's date: Monday"]
    last = {"role": "tool", "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "\nToday's date: Monday"}]}  # fmt: skip
    assert with_lines(left, lines) == [*left[:3], last]
    assert steady(messages, []) == (messages, [])
    assert steady(messages[:1], [DATE]) == (messages[:1], []), "nobody is left to be told of it"


@pytest.mark.parametrize(
    "messages", [None, 5, "x", [1], [{"role": 5}], [{"role": "system", "content": [1, {"text": 5}]}]]
)
def test_shapes_that_nobody_knows_are_left_for_others_to_refuse(messages: Any) -> None:
    assert steady(messages, [DATE]) == (messages, [])


CHAT = {
    "messages": [{"role": "system", "content": "You are.\nToday's date: 1"}, {"role": "user", "content": "Hi"}]
}  # fmt: skip
MESSAGES = {"system": [{"type": "text", "text": "You are.\nToday's date: 1"}], "messages": [{"role": "user", "content": "Hi"}]}  # fmt: skip
RESPONSES = {"instructions": "You are.\nToday's date: 1", "input": "Hi"}
BODIES = [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_every_interface_moves_them_only_if_it_is_told_to_and_says_so(
    engine: FakeEngine, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = body | {"stream": stream}
    response = app_of(engine).post(path, body)
    assert "x-pyspec-moved-lines" not in response.headers
    assert engine.tokenizer.decode(engine.seen[-1].prompt).startswith(
        "system: You are.\nToday's date: 1\n"
    )
    response = app_of(engine, volatile_lines=(DATE,)).post(path, body)
    assert response.status_code == 200 and response.headers["x-pyspec-moved-lines"] == "1"
    request = engine.seen[-1]
    assert (
        engine.tokenizer.decode(request.prompt)
        == "system: You are.\nuser: Hi\n\nToday's date: 1\nassistant: "
    )
    assert engine.tokenizer.decode(request.prompt[: request.n_stable]) == "system: You are.\nuser: Hi\n"


def test_what_is_counted_and_shown_is_what_the_model_reads(engine: FakeEngine) -> None:
    app = app_of(engine, volatile_lines=(DATE,))
    shown = app.post("/apply-template", CHAT).json()["prompt"]
    assert shown.endswith("user: Hi\n\nToday's date: 1\nassistant: ")
    counted = app.post("/v1/messages/count_tokens", MESSAGES).json()["input_tokens"]
    assert counted == len(engine.tokenizer.encode(shown))


def test_a_wrong_expression_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["server", "demo", "--volatile-lines", "("])
    assert result.exit_code == 2 and "'(' is not a regular expression" in result.output
