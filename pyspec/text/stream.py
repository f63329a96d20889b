"""Turns committed token ids into text that can be sent: whole characters only, and nothing of a stop string.

Speculation commits several tokens at once. The text is the same as for single tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pyspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Released:
    """text           the text to send now
    n_tokens_used  pushed tokens that belong to the output; the rest followed a stop string
    stopped        the stop string that ended the output, or ""
    """

    text: str
    n_tokens_used: int
    stopped: str


def _overlap(text: str, begins: frozenset[str], longest: int) -> int:
    """Length of the longest suffix of `text` in `begins`. `longest`: length of the longest of `begins`."""
    return next((n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in begins), 0)


class TextStream:
    """One request's output. Control tokens show only if `special`.

    The output continues a prompt, so the space of a first SentencePiece word stays, as in llama-server; `Tokenizer.decode` of a whole
    text removes it.

    n_free  tokens at the start in which stop strings do not count
    shown   control tokens that show in any case
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        special: bool = False,
        n_free: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.special, self.n_free = tokenizer, special, n_free
        self.shown = frozenset(shown)
        self.stops = tuple(s for s in stop if s)
        self._begins = frozenset(s[:n] for s in self.stops for n in range(1, len(s)))
        self._longest = max((len(s) for s in self.stops), default=1) - 1
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._sizes: list[int] = []  # characters of each token that is part of the held text
        self._over = False
        self.n_in_stop = 0  # last tokens that overlap the stop string

    def push(self, ids: Sequence[int]) -> Released:
        if not self.stops:
            return Released(self._utf8.decode(b"".join(map(self._bytes, ids))), len(ids), "")
        out: list[str] = []
        for i, token in enumerate(ids):
            if self._over:
                return Released("".join(out), i, "")
            text = self._utf8.decode(self._bytes(token))
            self._held += text
            self._sizes.append(len(text))
            if self.n_free > 0:
                self.n_free -= 1
                out.append(self._held)
                self._let_out(len(self._held))
                continue
            if (found := self._find()) is not None:
                at, stop = found
                out.append(self._held[:at])
                self.n_in_stop = self._n_last(len(self._held) - at)
                self._held, self._over = "", True
                return Released("".join(out), i + 1, stop)
            keep = _overlap(self._held, self._begins, self._longest)
            cut = len(self._held) - keep
            out.append(self._held[:cut])
            self._let_out(cut)
        return Released("".join(out), len(ids), "")

    def _let_out(self, n_char: int) -> None:
        self._held = self._held[n_char:]
        n = self._n_last(len(self._held))
        self._sizes = self._sizes[len(self._sizes) - n :]

    def _n_last(self, n_char: int) -> int:
        """Number of last tokens that overlap the last `n_char` characters."""
        n = 0
        while n_char > 0:
            n += 1
            n_char -= self._sizes[-n]
        return n

    def _bytes(self, token: int) -> bytes:
        shows = self.special or token not in self.tokenizer.special or token in self.shown
        return self.tokenizer.token_bytes(token) if shows else b""

    def _find(self) -> tuple[int, str] | None:
        """The first stop string in the held text; of several at one place the longest."""
        hits = [(self._held.find(s), -len(s), s) for s in self.stops if s in self._held]
        if not hits:
            return None
        at, _, stop = min(hits)
        return at, stop

    def flush(self) -> str:
        """End without a stop string: return the held text, with U+FFFD for an incomplete character."""
        if self._over:
            return ""
        text, self._held = self._held + self._utf8.decode(b"", True), ""
        return text
