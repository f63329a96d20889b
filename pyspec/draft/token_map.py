"""A target's tokens in the vocabulary of a draft model, and back.

Most pairs have one vocabulary, or two that differ in padding and in a few special tokens. Others share many texts under other ids. There
every token has a partner: one of the same text, else a stand-in. The draft model reads the longest of its tokens that ends a target's
token, because a text's end says most about its continuation. Of one that it proposes, the target verifies the longest token that begins
it. A stand-in can make a draft wrong, but no text. Source: llama.cpp common/speculative.cpp (pairs of one vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.text.vocab import (
    CONTROL,
    UNUSED,
    eog_ids,
    places,
    read_ids,
    read_tokens,
    read_types,
    token_bytes,
)

LEAST_SHARE = 0.5  # of the target's tokens whose text the draft model has, to be worth a draft
FIRST = 5  # ids below are special ones that may differ, as in llama.cpp
MOST_MORE = 128  # tokens that one of two equal vocabularies may have more

APART = (CONTROL, UNUSED)  # types of tokens that stand for no bytes of a text

Key = tuple[bool, bytes]
"""Whether a token stands apart from text, and the bytes of its text or name."""


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Partners by id; None: ids are the same.

    to_own     for each of the target's ids, one of the draft model's
    to_target  for each of the draft model's ids, one of the target's; None: ids that the target does not have are not proposed
    """

    to_own: Sequence[int] | None = None
    to_target: Sequence[int] | None = None


@dataclass(frozen=True)
class TokenTexts:
    """A file's tokens by their meaning. n: rows of its embedding, some of which may have no token."""

    n: int
    tokens: Sequence[str]
    keys: Sequence[Key]
    ends: frozenset[int]

    @classmethod
    def of(cls, file: GGUFFile, n: int) -> TokenTexts:
        """Those of a file. BadTokenizer if its fields are wrong."""
        fields = file.fields
        model, tokens = fields.label("tokenizer.ggml.model"), read_tokens(fields)
        kinds = read_types(fields, tokens)
        ids = read_ids(fields, model, len(tokens))
        keys = [
            (True, text.encode("utf-8", "surrogateescape"))
            if kind in APART
            else (False, token_bytes(text, kind, model))
            for text, kind in zip(tokens, kinds, strict=True)
        ]
        return cls(n, tokens, keys, eog_ids(tokens, places((CONTROL,), kinds), ids))

    def ids(self) -> dict[Key, int]:
        """The first token of each meaning."""
        return {key: i for i, key in reversed([*enumerate(self.keys)])}


def read_map(target: GGUFFile, n_target: int, own: GGUFFile, n_own: int) -> TokenMap:
    """The partners of two files' tokens. n: rows of their embeddings. Raises PairError where too few of the target's have one of their text."""
    names = [file.fields.label("tokenizer.ggml.model", "none") for file in (target, own)]
    if "none" in names:
        if names[0] == names[1] and n_target == n_own:
            return TokenMap()
        raise PairError(
            f"the target has {n_target} tokens and the draft model {n_own}, and a file has no texts of them: they can not be mapped"
        )
    a, b = target.fields.strings("tokenizer.ggml.tokens"), own.fields.strings("tokenizer.ggml.tokens")
    n_both = min(len(a), len(b))
    if a[FIRST:n_both] == b[FIRST:n_both] and abs(len(a) - len(b)) <= MOST_MORE and names[0] == names[1]:
        more = n_target - n_own  # the target's rows that stand for no text
        return TokenMap([*range(n_own), *[0] * more] if more > 0 else None)
    return mapped(TokenTexts.of(target, n_target), TokenTexts.of(own, n_own))


def mapped(target: TokenTexts, own: TokenTexts) -> TokenMap:
    """The partners of any two vocabularies. Raises PairError where too few have the same text."""
    of_own, of_target = own.ids(), target.ids()
    texts = [key for key in target.keys if not key[0]]
    n_same, n_all = sum(key in of_own for key in texts), len(texts)
    if n_same < LEAST_SHARE * n_all:
        raise PairError(
            f"the draft model knows {n_same} of the target's {n_all} tokens ({n_same / max(n_all, 1):.0%}), and "
            f"{LEAST_SHARE:.0%} are wanted: give one with the target's vocabulary"
        )
    to_own = _partners(target, of_own, own.ends, lambda text, n: text[len(text) - n :])
    to_target = _partners(own, of_target, target.ends, lambda text, n: text[:n])
    return TokenMap(to_own, to_target)


def _partners(
    of: TokenTexts, ids: Mapping[Key, int], ends: frozenset[int], part: Callable[[bytes, int], bytes]
) -> list[int]:
    """For each token the other's of the same meaning, else a stand-in: an end for an end, else that of the longest part."""
    end = min(ends, default=0)

    def partner(i: int, key: Key) -> int:
        if (found := ids.get(key)) is not None:
            return found
        if i in of.ends:
            return end
        text = key[1]
        return next(
            (ids[False, p] for n in range(len(text), 0, -1) if (False, p := part(text, n)) in ids), end
        )

    partners = [partner(i, key) for i, key in enumerate(of.keys)]
    return partners + [end] * (of.n - len(partners))
