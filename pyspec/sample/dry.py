"""DRY: a penalty on the token that would continue a repetition, growing with its length.

Source: llama.cpp's "don't repeat yourself" sampler. Differences, neither visible in practice: a repetition is measured up to `_MAX_MATCH`
tokens, and lengths come from a filter over earlier occurrences of the last token instead of the Z algorithm (same lengths).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pyspec.request import SamplingParams
from pyspec.sample.noise import Ints
from pyspec.text.tokenizer import Tokenizer

_MAX_MATCH = 1024  # longest measured repetition; bounds the work on degenerate texts
_MAX_BREAKER_BYTES = 40  # llama.cpp's limits
_MAX_BREAKER_TAIL = 20
_FLOAT_MAX_LOG = 88.7228391  # ln of the largest f32

Tails = tuple[tuple[int, ...], ...]


class DryBreakers:
    """Finds the tokens that begin a sequence breaker. One per tokenizer; each breaker string is looked up once."""

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary
        self._words: list[bytes] = []
        self._tails: dict[str, dict[int, Tails]] = {}

    def heads(self, params: SamplingParams) -> dict[int, Tails]:
        """Token ids that begin a breaker of `params`, each with the token tails that complete one.

        A token that contains a whole breaker has the empty tail. A token that ends in the beginning of a breaker has
        the tokenisation of the rest.
        """
        merged: dict[int, Tails] = {}
        for text in params.dry_sequence_breakers:
            if text and text not in self._tails:
                self._tails[text] = self._find(text)
            for token, tails in self._tails.get(text, {}).items():
                merged[token] = tuple(dict.fromkeys((*merged.get(token, ()), *tails)))
        return merged

    def _find(self, text: str) -> dict[int, Tails]:
        breaker = text.encode()[:_MAX_BREAKER_BYTES]
        if not self._words:
            n_vocab = self._vocabulary.n_vocab
            self._words = [self._vocabulary.token_bytes(token) for token in range(n_vocab)]
        first = breaker[:1]
        words = ((token, word) for token, word in enumerate(self._words) if first in word)
        found = ((token, self._tails_of(word, breaker)) for token, word in words)
        return {token: tails for token, tails in found if tails}

    def _tails_of(self, word: bytes, breaker: bytes) -> Tails:
        if breaker in word:
            return ((),)
        tails: dict[tuple[int, ...], None] = {}
        for n in range(min(len(word), len(breaker) - 1), 0, -1):
            if word.endswith(breaker[:n]):
                rest = breaker[n:].decode(errors="replace")
                ids = self._vocabulary.encode(rest, add_special=False, parse_special=False)
                tails[tuple(ids[:_MAX_BREAKER_TAIL])] = None
        return tuple(tails)


@dataclass(frozen=True, slots=True)
class Dry:
    """The DRY settings of one request, ready to apply."""

    params: SamplingParams
    heads: dict[int, Tails]

    @property
    def active(self) -> bool:
        p = self.params
        return p.dry_multiplier != 0.0 and p.dry_base >= 1.0 and p.dry_penalty_last_n != 0

    def penalties(self, history: Ints) -> dict[int, float]:
        """The penalty of each token that would extend a repetition in `history`.

        history  [n]  int64  every token before the one to choose, oldest first
        """
        last_n = self.params.dry_penalty_last_n
        recent = history[::-1] if last_n < 0 else history[::-1][:last_n]
        allowed = self.params.dry_allowed_length
        if len(recent) <= allowed or (limit := self._limit(recent)) < allowed:
            return {}
        longest: dict[int, int] = {}
        for shift, n in _repeats(recent, min(limit, max(allowed, 0) + _MAX_MATCH), allowed):
            token = int(recent[shift - 1])
            longest[token] = max(longest.get(token, 0), n)
        return {
            token: self._penalty(n - allowed)
            for token, n in longest.items()
            if () not in self.heads.get(token, ())
        }

    def _limit(self, recent: Ints) -> int:
        """Longest suffix that counts: the tokens after the latest complete breaker."""
        if not self.heads:
            return len(recent)
        starts = np.flatnonzero(np.isin(recent, np.fromiter(self.heads, np.int64)))
        for i in starts.tolist():
            done = [
                len(tail)
                for tail in self.heads[int(recent[i])]
                if len(tail) <= i and all(recent[i - 1 - j] == token for j, token in enumerate(tail))
            ]
            if done:
                return i - max(done)
        return len(recent)

    def _penalty(self, exponent: int) -> float:
        base = float(np.float32(self.params.dry_base))
        multiplier = float(np.float32(self.params.dry_multiplier))
        most = int(_FLOAT_MAX_LOG / math.log(base)) if base > 1.000001 else 0
        return multiplier * base ** (min(exponent, most) if most > 0 else exponent)


def _repeats(recent: Ints, limit: int, least: int) -> list[tuple[int, int]]:
    """(shift, length): length of the newest text that also occurs `shift` tokens earlier, if at least `least`.

    recent  [n]  int64  newest first. Lengths stop at `limit`.
    """
    n_recent = len(recent)
    shifts = np.arange(1, n_recent)
    out: list[tuple[int, int]] = []
    for n in range(limit + 1):
        more = n + shifts < n_recent
        more[more] = recent[n] == recent[n + shifts[more]]
        if n == limit:
            more[:] = False
        if n >= least:
            out.extend((shift, n) for shift in shifts[~more].tolist())
        shifts = shifts[more]
        if not len(shifts):
            break
    return out
