"""A vocabulary of the packaged model, and texts matched against grammars token by token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from pyspec.constrain.constraint import Constraint, fill
from pyspec.constrain.grammar import compile_text
from pyspec.constrain.trie import TokenTrie
from pyspec.gguf import open_gguf
from pyspec.request import Grammar
from pyspec.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "pyspec" / "demo" / "pyspec-demo.gguf"
PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},'
    ' "required": ["name", "age"], "additionalProperties": false}'
)


@cache
def trie() -> TokenTrie:
    tokenizer = Tokenizer.from_metadata(open_gguf(DEMO).metadata)
    return TokenTrie(tokenizer, tokenizer.n_vocab)


def compiled(kind: str, source: str, after: str = "", lazy: bool = False) -> Grammar:
    text = compile_text(Grammar(kind=kind, source=source, after=after), trie().table)  # type: ignore[arg-type]
    return Grammar(kind="compiled", source=text, after=after, lazy=lazy)


def constraint(kind: str, source: str, after: str = "", lazy: bool = False) -> Constraint:
    return Constraint(trie(), compiled(kind, source, after, lazy))


def ids(text: str) -> list[int]:
    return trie().tokenizer.encode_inside(text)


def allowed(constraint_: Constraint, drafts: list[int] | None = None) -> list[set[int]]:
    """The mask of each row."""
    masks = fill([(constraint_, drafts or [])], trie())
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : trie().n_vocab]
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def reads(source: str, text: str) -> bool:
    """True if a compiled grammar accepts a text and may end behind it. No mask is computed."""
    matcher, tokens = trie().matcher(source), ids(text)
    return (
        matcher.try_consume_tokens(tokens) == len(tokens)
        and matcher.is_accepting()
        and not matcher.is_error()
    )


def fits(constraint_: Constraint, text: str) -> bool:
    """True if a grammar allows all of a text and the end behind it."""
    tokens = ids(text)
    if constraint_.usable(tokens) != tokens:
        return False
    constraint_.commit(tokens)
    return constraint_.is_over or bool(allowed(constraint_)[0] & set(trie().table.eog))
