"""A model's vocabulary in llguidance's form, and the limits of its matchers. Built on first use: 150,000 tokens take most of a second."""

from __future__ import annotations

import os
import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from pyspec.errors import RequestError
from pyspec.ranges import printable
from pyspec.text.rust import border
from pyspec.text.tokenizer import Tokenizer

NO_GRAMMARS = "grammars are not supported: the model's vocabulary"
MOST_THREADS = 8
# of a token: the depth of the library's tree, minus one mark before control tokens
MOST_BYTES = 1023
MESSAGE_CHARS = 300  # of the compiler's message
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 14 ms for one row's mask
    step_max_items=200_000,  # 40 ms: rules of single characters that meet take most
    max_lexer_states=50_000,  # of up to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
_PICTURE = re.compile(r"^(at )?\d+\(\d+\): | \d+ \| .*")


@dataclass(frozen=True)
class TokenTable:
    """The part of a vocabulary that a matcher needs: every id's bytes, the control tokens, and the tokens that end a generation."""

    tokens: Sequence[bytes]
    special: Sequence[int]
    eog: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, n_vocab: int) -> TokenTable:
        """The table of a model. Its embedding may have more rows than the vocabulary has tokens. Those rows are never allowed, nor are
        tokens of more than MOST_BYTES, which count as empty."""
        eog = ends_of(tokenizer, n_vocab)
        special = sorted(t for t in tokenizer.special | tokenizer.eog if t < n_vocab)
        tokens = [t if len(t) <= MOST_BYTES else b"" for t in tokenizer.bytes_of_first(n_vocab)]
        return cls(tokens, special, eog)

    def id_of(self, text: str) -> int | None:
        """The token with this text, preferably a control token."""
        wanted = text.encode()
        found = [token for token in self.special if self.tokens[token] == wanted]
        if found:
            return found[0]
        return next((i for i, each in enumerate(self.tokens) if each == wanted), None)

    def build(self, encode: Callable[[str], list[int]]) -> LLTokenizer:
        """`encode` gives the ids of text that follows other text."""
        with border(RequestError, f"{NO_GRAMMARS} can not be walked"):
            return LLTokenizer(_Wrapper(self, encode), eos_token=list(self.eog))  # type: ignore[arg-type]  # its stub names a class of its own


def ends_of(tokenizer: Tokenizer, n_vocab: int) -> list[int]:
    """The tokens that end a generation, in order. Raises RequestError if there is none: no grammar could end."""
    eog = sorted(t for t in tokenizer.eog if t < n_vocab)
    if not eog:
        raise RequestError(f"{NO_GRAMMARS} has no token that ends a generation")
    return eog


def one_line(message: str) -> str:
    """The reason in a compiler's message, without its picture of the source and its names for types, on one short line."""
    reason = _PICTURE.sub("", " ".join(message.split())).rpartition("error: ")[2]
    reason = reason.replace("f64", "number").replace("Unsatisfiable schema:", "nothing fits it:")
    return printable(reason, MESSAGE_CHARS) or "no reason is given"


def begin(tokenizer: LLTokenizer, matcher: LLMatcher, text: str) -> list[int] | None:
    """Let a matcher consume the text of a begun answer. Returns the tokens, or None if the grammar does not match.

    The prompt may split the text into other tokens, because the matcher's next tokens depend on the text alone.
    """
    tokens = list(tokenizer.greedy_tokenize(text)) if text else []
    return tokens if not tokens or matcher.try_consume_tokens(tokens) == len(tokens) else None


class _Wrapper:
    """A tokenizer in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Callable[[str], list[int]]) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special)
        self.eos_token_id = table.eog[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class TokenTrie:
    """One per loaded model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self.tokenizer, self.n_vocab = tokenizer, n_vocab
        self.n_word = -(-n_vocab // 32)  # of a row's mask
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None

    @property
    def table(self) -> TokenTable:
        """Made anew each time, because a large vocabulary's has a megabyte for each 20,000 tokens."""
        return TokenTable.of(self.tokenizer, self.n_vocab)

    @cached_property
    def _joined(self) -> tuple[bytes, array[int]]:
        """The bytes of all tokens one behind the other, and where each ends."""
        texts = self.table.tokens
        return b"".join(texts), array("Q", accumulate(map(len, texts)))

    def having(self, part: bytes) -> Iterator[tuple[int, bytes]]:
        """Tokens, in order, whose text has `part` (not empty), and their text from its first place on."""
        data, ends = self._joined
        at = data.find(part)
        while at >= 0:
            token = bisect_right(ends, at)
            is_inside = at + len(part) <= ends[token]
            if is_inside:
                yield token, data[at : ends[token]]
            at = data.find(part, ends[token] if is_inside else at + 1)

    @cached_property
    def eog(self) -> Sequence[int]:
        """Tokens that end a generation, in order; as `TokenTable.eog`. Raises RequestError if the vocabulary has none."""
        return ends_of(self.tokenizer, self.n_vocab)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return frozenset(self.eog)

    @property
    def walked(self) -> LLTokenizer:
        """The vocabulary in llguidance, which keeps the texts in a form of its own."""
        with self._lock:
            if self._built is None:
                self._built = self.table.build(self.tokenizer.encode_inside)
            return self._built

    @cached_property
    def executor(self) -> LLExecutor:
        return LLExecutor(max(1, min(MOST_THREADS, os.cpu_count() or 1)))

    def matcher(self, source: str) -> LLMatcher:
        """A matcher at the start of a compiled grammar. Raises RequestError. Releases the interpreter's lock meanwhile."""
        with border(RequestError, "the grammar can not be used"):
            matcher = LLMatcher(self.walked, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"the grammar can not be used: {one_line(matcher.get_error())}")
        return matcher

    def bits(self, banned: Sequence[int]) -> np.ndarray:
        """[n_word] int32: the mask of a row that may hold all tokens except these."""
        mask = np.full(self.n_word, -1, np.int32)
        ids = np.array(sorted(banned), np.int64)
        bits = np.uint32(1) << (ids & 31).astype(np.uint32)
        np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits)
        return mask
