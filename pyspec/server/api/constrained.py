"""The constraint of an answer: llama-server's fields, OpenAI's and vLLM's, at most one per body.

Unsupported constraints are refused here, before anything is queued, with the field's name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pyspec.constrain.formats import JSON_OBJECT, format_grammar, schema_grammar
from pyspec.constrain.grammar import choice_of
from pyspec.errors import RequestError
from pyspec.request import Grammar, GrammarKind
from pyspec.server.api.schema import Generate
from pyspec.server.engine import EngineLike
from pyspec.text.answer_plan import ALONE, Around, text_grammar

CHOICES = 1024


class NotCompiled(Exception):
    """The grammar is new: retry in the thread for compiling, where no other text waits."""


def compiled_grammar(engine: EngineLike, grammar: Grammar, *, compiles: bool) -> Grammar:
    """A compiled grammar. Raises RequestError if it is not supported, NotCompiled if it is new and `compiles` is False."""
    found = None if compiles else engine.known_grammar(grammar)
    if found is None and not compiles:
        raise NotCompiled
    return engine.check_grammar(grammar) if found is None else found


def checked_grammar(
    body: Generate,
    engine: EngineLike,
    around: Around = ALONE,
    *,
    compiles: bool,
) -> Grammar | None:
    """The compiled grammar of a body. Raises RequestError with the field's name. May take a while: not for an event loop.

    compiles  compile a new grammar; if False, raise NotCompiled
    """
    found = wanted(body)
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(
            f"{found[1][0]}: {found[0][0]} is given, too; an answer keeps to one of them",
        )
    keep = partial(compiled_grammar, engine, compiles=compiles)
    return text_grammar(*found[0], keep, around)


def wanted(body: Generate) -> list[tuple[str, Grammar]]:
    """Each constraining field of the body with its grammar."""
    found = [("response_format", format_grammar(body.response_format))]
    found += _structured(body.structured_outputs)
    if body.json_schema not in (None, ""):
        found.append(("json_schema", schema_grammar("json_schema", body.json_schema)))
    if body.guided_json not in (None, ""):
        found.append(("guided_json", schema_grammar("guided_json", body.guided_json)))
    texts: list[tuple[str, GrammarKind, str | None]] = [
        ("grammar", "gbnf", body.grammar),
        ("guided_grammar", "gbnf", body.guided_grammar),
        ("guided_regex", "regex", body.guided_regex),
    ]
    for name, kind, text in texts:
        if text:
            found.append((name, _of_text(kind, text)))
    if body.guided_choice:
        found.append(("guided_choice", _choice("guided_choice", body.guided_choice)))
    return [(name, grammar) for name, grammar in found if grammar is not None]


def _structured(value: dict[str, Any] | None) -> list[tuple[str, Grammar | None]]:
    """vLLM's `structured_outputs`."""
    found: list[tuple[str, Grammar | None]] = []
    for key, said in (value or {}).items():
        name = f"structured_outputs.{key[:40]}"
        is_known = key in ("disable_any_whitespace", "whitespace_pattern", "backend")
        if said is None or said is False or is_known:
            continue
        if key == "json":
            found.append((name, schema_grammar(name, said)))
        elif key == "json_object":
            found.append((name, JSON_OBJECT))
        elif key in ("regex", "grammar"):
            if not isinstance(said, str):
                raise RequestError(f"{name}: want text")
            found.append((name, _of_text("regex" if key == "regex" else "gbnf", said)))
        elif key == "choice":
            found.append((name, _choice(name, said)))
        else:
            raise RequestError(
                f"{name} is not supported; json, json_object, regex, choice and grammar are",
            )
    return found


def _of_text(kind: GrammarKind, text: str) -> Grammar:
    """The grammar of a text, as lark if the text declares it."""
    if kind == "gbnf" and "::=" not in text:
        kind = "lark"
    return Grammar(kind=kind, source=text)


def _choice(name: str, texts: Any) -> Grammar:
    is_list = isinstance(texts, list) and bool(texts)
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name}: want a list of texts, none of them empty")
    if len(texts) > CHOICES:
        raise RequestError(f"{name}: {len(texts)} texts; at most {CHOICES} are taken")
    return Grammar(kind="lark", source=choice_of(texts))
