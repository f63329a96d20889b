"""A hostile grammar costs its sender a refusal, and the parent neither time nor memory."""

from __future__ import annotations

import json
import time

import pytest
from grammar_rig import PERSON, constraint, trie

import pyspec.constrain.check as check_module
from pyspec.constrain.check import GrammarCheck
from pyspec.constrain.constraint import Constraint, fill
from pyspec.errors import GrammarTooLarge, RequestError, Unavailable
from pyspec.request import Grammar
from pyspec.text.sandbox_process import STALLED


@pytest.fixture(scope="module")
def check() -> GrammarCheck:
    return GrammarCheck(trie().tokenizer, trie().n_vocab)


def nested(n: int) -> str:
    return '{"type": "array", "items": ' * n + "{}" + "}" * n


HOSTILE = {
    "depth": ("json_schema", nested(5000)),
    "depth of GBNF": ("gbnf", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "depth of a regex": ("regex", "(" * 20000 + "a" + ")" * 20000),
    "length": ("json_schema", json.dumps({"enum": ["x" * 300_000]})),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "left": ("lark", "start: start"),
    "elsewhere": ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "nothing": ("gbnf", "   "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_soon(check: GrammarCheck, name: str) -> None:
    kind, source = HOSTILE[name]
    began, said = time.monotonic(), f"the {kind if source.strip() else 'constraint is empty'}"
    with pytest.raises(RequestError, match=said) as e:
        check.compiled(Grammar(kind=kind, source=source))  # type: ignore[arg-type]
    assert time.monotonic() - began < 60 and len(str(e.value)) < 600
    assert check.compiled(Grammar(kind="json_schema", source=PERSON)).kind == "compiled", "others go on"


def test_a_grammar_is_compiled_once_and_the_engine_gets_the_result(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(kind="json_schema", source=PERSON, after="</think>", lazy=True)
    found = check.compiled(grammar)
    assert (found.kind, found.after, found.lazy) == ("compiled", "</think>", True)
    Constraint(trie(), found)
    monkeypatch.setattr(check._box, "ask", None)
    assert check.compiled(grammar) is found and check.compiled(found) is found


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "TIME_S", 0.0)
    with pytest.raises(RequestError, match="the regex takes longer than 0 s"):
        check.compiled(Grammar(kind="regex", source="late"))
    monkeypatch.undo()
    assert check.compiled(Grammar(kind="regex", source="in time")).kind == "compiled"


def test_the_cache_of_grammars_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "KEPT_BYTES", 2000)
    check = GrammarCheck(trie().tokenizer, trie().n_vocab)
    for i in range(40):
        check.compiled(Grammar(kind="regex", source=f"[0-9]{{{i + 1}}}"))
    assert 0 < check._n_bytes <= 2000 and len(check._kept) < 40


def test_a_step_that_takes_too_much_ends_its_request_alone() -> None:
    """A grammar may pass its check and exceed its limits later; its row then has no bits."""
    hostile = constraint("lark", "start: A+\nA: /(x?){1,3000}y(.{1,3000}|z){1,200}!/")
    good = constraint("json_schema", PERSON)
    for _ in range(50):
        masks = fill([(hostile, []), (good, [])], trie())
        assert masks[1].any()
        if not masks[0].any():
            return
        token = next(t for t in range(trie().n_vocab) if masks[0][t >> 5] >> (t & 31) & 1)
        hostile.commit([token])


def test_a_grammar_that_grows_over_its_limits_on_the_way_is_its_sender_s_doing() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    c = constraint("json_schema", json.dumps(wide))
    with pytest.raises(GrammarTooLarge, match="exceeds its limits") as e:
        c.commit(trie().tokenizer.encode_inside("{"))
    assert e.value.status == 400


def test_a_compiler_without_cpu_time_blames_no_grammar_and_is_not_cached(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(kind="regex", source="patience")
    monkeypatch.setattr(
        check._box, "ask", lambda line, seconds: {"failed": "late", STALLED: "its process gets no time"}
    )
    with pytest.raises(Unavailable, match="try again"):
        check.compiled(grammar)
    monkeypatch.undo()
    assert check.compiled(grammar).kind == "compiled"
