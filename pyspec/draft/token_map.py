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
from pyspec.text.tokenizer import adds_bos, read_pre
from pyspec.text.vocab import (
    BYTE,
    CONTROL,
    UNDEFINED,
    UNUSED,
    eog_ids,
    places,
    read_ids,
    read_tokens,
    read_types,
    token_bytes,
)

LEAST_SHARE = 0.5  # of the smaller vocabulary's tokens whose text the other one has, to be worth a draft
FIRST = 5  # ids below are special ones that may differ, as in llama.cpp
MOST_MORE = 128  # tokens that one of two equal vocabularies may have more

APART = (CONTROL, UNUSED, UNDEFINED)  # types of tokens that stand for no bytes of a text

# Tokens that stand for a picture's row, by model
PICTURES = "<|image_pad|>", "<image_soft_token>", "[IMG]"

Key = tuple[bool, bytes]
"""Whether a token stands apart from text, and the bytes of its text or name."""


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Partners by id; None: ids are the same.

    to_own     for each of the target's ids, one of the draft model's
    to_target  for each of the draft model's ids, one of the target's; None: ids that the target does not have are not proposed
    first      the draft model reads it in place of a text's first token: texts of one vocabulary begin with a token that the other's
               lack, and without its own a model continues badly; None: that token's partner
    remark     the end of the line that names the drafter
    """

    to_own: Sequence[int] | None = None
    to_target: Sequence[int] | None = None
    first: int | None = None
    remark: str = ""


@dataclass(frozen=True)
class TokenTexts:
    """A file's tokens by their meaning.

    n      rows of its embedding, some of which may have no token
    bytes  ids of single bytes, which a text has only where no other token fits
    bos    the token that every text begins with; None: there is none
    """

    n: int
    tokens: Sequence[str]
    keys: Sequence[Key]
    ends: frozenset[int]
    bytes: frozenset[int] = frozenset()
    bos: int | None = None

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
        ends = eog_ids(tokens, places((CONTROL,), kinds), ids)
        bos = ids["bos"] if adds_bos(fields, model, read_pre(fields, model)) else None
        return cls(n, tokens, keys, ends, frozenset(places((BYTE,), kinds)), bos)

    def ids(self) -> dict[Key, int]:
        """The first token of each meaning, a single byte only where no other token has it: no text has `<0x31>` for "1"."""
        in_order = sorted(range(len(self.keys)), key=self.bytes.__contains__)
        return {self.keys[i]: i for i in reversed(in_order)}


def placeholder(target: GGUFFile) -> int:
    """The target's token that a drafter reads for a row of a picture where it can not read the row: one of PICTURES, else the first of a
    text, else 0."""
    fields = target.fields
    if "tokenizer.ggml.tokens" not in fields:
        return 0
    tokens = read_tokens(fields)
    found = {text: i for i, text in enumerate(tokens) if text in PICTURES}
    bos = read_ids(fields, fields.label("tokenizer.ggml.model", "none"), len(tokens)).get("bos")
    return next((found[text] for text in PICTURES if text in found), bos or 0)


def read_map(target: GGUFFile, n_target: int, own: GGUFFile, n_own: int) -> TokenMap:
    """The partners of two files' tokens. n: rows of their embeddings. Raises PairError where too few of the smaller vocabulary's have one of
    their text."""
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
    """The partners of any two vocabularies. Raises PairError where too few have the same text: half of the smaller vocabulary is wanted,
    because a large one has many tokens that a small one spells with several."""
    of_own, of_target = own.ids(), target.ids()
    texts = min(of_own, of_target, key=len)
    n_all = sum(not is_apart for is_apart, _ in texts)
    n_same = sum(not key[0] and key in of_own and key in of_target for key in texts)
    share = n_same / max(n_all, 1)
    if share < LEAST_SHARE:
        raise PairError(
            f"of the smaller vocabulary's {n_all} tokens the other one has {n_same} ({share:.0%}), and {LEAST_SHARE:.0%} are wanted: "
            "give a draft model with the target's vocabulary"
        )
    to_own = _partners(target, of_own, own.ends, lambda text, n: text[len(text) - n :])
    to_target = _partners(own, of_target, target.ends, lambda text, n: text[:n])
    first = own.bos if target.bos is None or own.bos is not None else min(own.ends, default=None)
    remark = (
        f"; its vocabulary is another one: {share:.0%} of the smaller one's {n_all} tokens are in both"
    )
    return TokenMap(to_own, to_target, first, remark)


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
