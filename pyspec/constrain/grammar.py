"""Translates grammars for llguidance: JSON Schemas, GBNF, regular expressions and lark become one JSON text, under limits.

A grammar may be hostile. `compile_text` and a matcher run first in a process that can be killed (check.py), under limits (trie.py). The
engine compiles only grammars that passed there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher

from pyspec.constrain.gbnf_lark import lark_of
from pyspec.constrain.trie import TokenTable, one_line
from pyspec.errors import RequestError
from pyspec.request import Grammar
from pyspec.text.schemas import JSON_OPTIONS, closed

SOURCE_BYTES = 256 << 10
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Allowed tokens depend on the text so far and not on its split into tokens: the model may spell as it likes."""
_FREE = "start: free SPACE? body\nfree[suffix=%s]: /(?s:.*)/\nSPACE: /[ \\t\\r\\n]{1,4}/\n"
"""Free text up to and including a text, a little white space, then the grammar."""


def check_size(grammar: Grammar) -> None:
    """Raise RequestError if a grammar is empty or too long."""
    text = grammar.source + grammar.calls + grammar.begun + grammar.lead
    if (n := len(text.encode("utf-8", "replace"))) > SOURCE_BYTES:
        raise RequestError(f"the {grammar.kind} has {n} bytes; at most {SOURCE_BYTES} are allowed")
    if not grammar.source.strip():
        raise RequestError("the constraint is empty")
    if len(grammar.after) > 1000:
        n = len(grammar.after)
        raise RequestError(f"a grammar waits for a text of {n} characters; at most 1000 are allowed")


def compile_text(grammar: Grammar, vocabulary: TokenTable | None = None) -> str:
    """llguidance's JSON for a grammar. Raises RequestError for a flaw that shows without a vocabulary."""
    if grammar.kind == "compiled":
        return grammar.source
    try:
        if grammar.kind == "gbnf":
            body = _gbnf(grammar.source, vocabulary)
        else:
            body = _BODIES[grammar.kind](grammar.source)
        first, *rest = body["grammars"]
    except RequestError:
        raise
    except Exception as e:  # noqa: BLE001 - the converter raises bare exceptions
        raise RequestError(f"the {grammar.kind} can not be read: {one_line(str(e))}") from None
    top = "start: body\n"
    if grammar.after:
        top = _FREE % json.dumps(grammar.after, ensure_ascii=False)
    if grammar.lead:
        top = grammar.lead + "\n"
    top += "body: @constrained | @calls\n" if grammar.calls else "body: @constrained\n"
    calls = [{"name": "calls", "lark_grammar": grammar.calls}] if grammar.calls else []
    parts = [{"lark_grammar": _OPTIONS + top}, {**first, "name": "constrained"}, *calls, *rest]
    return json.dumps({"grammars": parts})


def _json_schema(source: str) -> dict[str, Any]:
    schema = json.loads(source)
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise RequestError(
            "a JSON Schema is an object or true"
            if schema is not False
            else "nothing fits the schema false"
        )
    found = LLMatcher.grammar_from_json_schema(closed(schema), overrides=JSON_OPTIONS)
    body: dict[str, Any] = json.loads(found)
    return body


def _gbnf(source: str, vocabulary: TokenTable | None) -> dict[str, Any]:
    if vocabulary is None:
        return _lark(lark_of(source))
    return _lark(lark_of(source, vocabulary.id_of, vocabulary.eog))


def _regex(source: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(source))
    return body


def _lark(source: str) -> dict[str, Any]:
    return {"grammars": [{"lark_grammar": source}]}


_BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "lark": _lark,
}


def choice_of(texts: Sequence[str]) -> str:
    """A lark grammar for one of several texts."""
    literals = [json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts)]
    return "start: " + " | ".join(literals)
