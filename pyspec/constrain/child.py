"""The process that compiles grammars first: llguidance's limits and the system bound their cost here.

Started as `python -m pyspec.constrain.child`; speaks JSON lines: the vocabulary first, then one grammar per line.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import LIMITS, TokenTable, begin, one_line
from pyspec.errors import RequestError
from pyspec.ranges import printable
from pyspec.request import Grammar
from pyspec.text.bounded import serve
from pyspec.text.rust import border

BEGUN_CHARS = 80  # characters of a begun answer that a refusal shows
MEMORY_BYTES = 2 << 30  # of address space, including the interpreter and its threads


def answer(table: TokenTable, tokenizer: LLTokenizer, grammar: Grammar) -> dict[str, str]:
    """{"text": the grammar, compiled}, or {"failed": why}."""
    try:
        text = compile_text(grammar, table)
    except RequestError as e:
        return {"failed": str(e)}
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return {"failed": f"the {grammar.kind} can not be used: {one_line(matcher.get_error())}"}
    if begin(tokenizer, matcher, grammar.begun) is None:
        begun = printable(grammar.begun, BEGUN_CHARS)
        why = f"the answer has begun with {begun!r}, which it does not allow"
        return {"failed": f"the {grammar.kind} can not be enforced: {why}"}
    begins = matcher.is_stopped() or any(matcher.compute_bitmask())
    if matcher.is_error() or not begins:
        why = one_line(matcher.get_error().partition("<")[0]) if matcher.is_error() else ""
        why = why and f" ({why})"
        return {"failed": f"the {grammar.kind} can not be enforced: no text matches it{why}"}
    return {"text": text}


def _table(line: str) -> TokenTable:
    parts: dict[str, Any] = json.loads(line)
    tokens = [base64.b64decode(t) for t in parts["tokens"]]
    return TokenTable(tokens, parts["special"], parts["eog"])


def first_line(table: TokenTable) -> bytes:
    """The line with the vocabulary, before any grammar."""
    tokens = [base64.b64encode(t).decode() for t in table.tokens]
    parts = {"tokens": tokens, "special": list(table.special), "eog": list(table.eog)}
    return json.dumps(parts).encode() + b"\n"


def question(grammar: Grammar) -> bytes:
    """A line with a grammar."""
    return json.dumps(asdict(grammar)).encode() + b"\n"


def answers(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """One answer per line: to the vocabulary, then to each grammar."""
    table = _table(next(lines))
    tokenizer = table.build(lambda text: [])
    yield {"text": ""}
    for line in lines:
        grammar = Grammar(**json.loads(line))
        try:
            with border(RequestError, f"the {grammar.kind} can not be compiled"):
                found = answer(table, tokenizer, grammar)
            yield found
        except RequestError as e:
            yield {"failed": str(e)}
        except MemoryError:
            yield {"failed": f"the {grammar.kind} needs more than {MEMORY_BYTES >> 20} MiB"}


if __name__ == "__main__":
    serve(answers, MEMORY_BYTES)
