"""Chats to prompts, answers to calls, constraints, names of files and settings, from public bug reports."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest
from case_files import DEMO, Case, cases_on, read

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTrie
from pyspec.errors import PyspecError
from pyspec.gguf import open_gguf
from pyspec.hub.names import choose
from pyspec.request import Grammar
from pyspec.server.api import prompts
from pyspec.server.api.schema import ChatBody, validate
from pyspec.server.settings import ServerSettings
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import AnswerMarkup, dialect, recognised
from pyspec.text.markup.parts import CallArguments, CallBegin, Content
from pyspec.text.markup.reasoning import THINK
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer


def each(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases_on(kind), ids=lambda case: case["id"])


def render(template: str, body: Any) -> str:
    engine: Any = types.SimpleNamespace(
        template=ChatTemplate(template, "<s>", "</s>"),
        info=types.SimpleNamespace(chat_template=template),
    )
    return prompts.rendering(
        engine, validate(ChatBody, json.loads(json.dumps(body))), ServerSettings()
    ).text()


@each("template")
def test_a_chat_becomes_the_right_prompt(case: Case) -> None:
    expect, template = case["expect"], read(case["template"])
    text = render(template, read(case["input"]))
    if "same_as" in expect:
        assert text == render(template, read(expect["same_as"]))
    for part in expect.get("contains", ()):
        assert part in text
    at = [text.find(part) for part in expect.get("in_order", ())]
    assert at == sorted(at) and -1 not in at


@each("answer")
@pytest.mark.parametrize("cut", [1, 5, 10**6])
def test_an_answer_is_read(case: Case, cut: int) -> None:
    asked, expect = read(case["input"]), case["expect"]
    speaks = recognised(read(asked["template"])) if "template" in asked else dialect(asked["dialect"])
    assert speaks is not None
    parser = AnswerMarkup(
        calls=speaks, think=THINK, is_open=asked["is_open"], tools=asked["tools"]
    ).parser(lambda: "id")
    text = asked["text"]
    parts = [p for i in range(0, len(text), cut) for p in parser.push(text[i : i + cut])] + list(
        parser.finish()
    )
    said = {"content": "", "reasoning": ""}
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[part.index][1] += part.text
        else:
            said["content" if isinstance(part, Content) else "reasoning"] += part.text
    assert [(name, json.loads(text)) for name, text in calls] == [
        (name, json.loads(text)) for name, text in expect["calls"]
    ]
    for name in {"content", "reasoning"} & set(expect):
        assert said[name].strip() == expect[name]


@functools.cache
def trie() -> TokenTrie:
    tokenizer = Tokenizer.from_metadata(open_gguf(DEMO).metadata)
    return TokenTrie(tokenizer, tokenizer.n_vocab)


def fits(grammar: Any, text: str) -> bool:
    """True if a compiled grammar accepts a text, token by token, and may end behind it."""
    matcher = trie().matcher(grammar)
    ids = trie().tokenizer.encode_inside(text)
    return (
        matcher.validate_tokens(ids) == len(ids)
        and matcher.try_consume_tokens(ids) == len(ids)
        and matcher.is_accepting()
    )


def holds(case: Case, kind: Any, source: str) -> None:
    grammar = compile_text(Grammar(kind=kind, source=source))
    trie().matcher(grammar)
    for text in case["expect"].get("accept", ()):
        assert fits(grammar, text), f"refuses {text!r}"
    for text in case["expect"].get("refuse", ()):
        assert not fits(grammar, text), f"takes {text!r}"


@each("schema")
def test_a_schema_holds(case: Case) -> None:
    holds(case, "json_schema", json.dumps(read(case["input"])))


@each("gbnf")
def test_gbnf_means_the_same_in_llama_cpp(case: Case) -> None:
    holds(case, "gbnf", read(case["input"]))


@each("calls")
def test_forced_calls_are_held(case: Case) -> None:
    asked, lark = read(case["input"]), Lark()
    speaks = dialect(asked["dialect"])
    holds(case, "lark", lark.calls(speaks.rules(lark, asked["tools"], is_single=True)))


@each("names")
def test_a_repository_s_file_is_chosen(case: Case) -> None:
    asked = read(case["input"])
    try:
        found = choose(asked["names"], asked["quant"])[0]
    except PyspecError:
        found = "refused"
    assert found == case["expect"]["file"]


@pytest.mark.sampled(most=1)
@each("env")
def test_a_variable_sets(case: Case) -> None:
    asked = read(case["input"])
    command = [sys.executable, "-m", "pyspec", "config", "show", "demo"]
    shown = subprocess.run(
        command, env=os.environ | asked["env"], capture_output=True, text=True, check=True
    ).stdout
    assert (
        dict(line.split()[:2] for line in shown.splitlines() if len(line.split()) > 1)[asked["setting"]]
        == case["expect"]["value"]
    )
