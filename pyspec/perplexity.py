"""Perplexity of a text as llama-perplexity computes it, and how far a load's predictions are from another's.

The text's tokens are cut into sequences of the same length, whose first token becomes the begin-of-text token where the model has one.
Each is read from its start, and the tokens of its second half are scored: those have at least half a sequence before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pyspec.errors import RequestError
from pyspec.logits import LogitReader
from pyspec.text.tokenizer import Tokenizer

PIECE = 64  # rows whose probabilities are computed at once
Done = Callable[[int], None]
"""Receives the number of sequences that are scored."""


def chunks_of(tokenizer: Tokenizer, text: str, n_ctx: int, n_most: int = -1) -> list[list[int]]:
    """The sequences of a text, `n_ctx` tokens each; what is left over is not scored. n_most: of them at most; -1 or 0: all.

    Raises RequestError for a text that is shorter than one.
    """
    ids = tokenizer.encode(text, parse_special=False)
    n = len(ids) // n_ctx
    if n == 0:
        raise RequestError(f"the text has {len(ids)} tokens; want {n_ctx} (-c) at least")
    found = [list(ids[i * n_ctx : (i + 1) * n_ctx]) for i in range(n if n_most <= 0 else min(n, n_most))]
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        for one in found:
            one[0] = tokenizer.bos_id
    return found


@dataclass
class Scored:
    """Of every scored token: its log probability, in nats."""

    logprobs: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-float(np.mean(self.logprobs)))

    @property
    def error(self) -> float:
        """Standard error of the perplexity."""
        return self.perplexity * _error(self.logprobs)


@dataclass
class Compared:
    """Two loads on the same tokens.

    base, own  their scores
    divergences  of the next token's distribution from the base's, by token, in nats
    n_same     tokens with the same likeliest one
    squares    of differences of the token's probability
    """

    base: Scored = field(default_factory=Scored)
    own: Scored = field(default_factory=Scored)
    divergences: list[float] = field(default_factory=list)
    n_same: int = 0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return float(np.mean(self.divergences))

    @property
    def error(self) -> float:
        """Standard error of the mean divergence."""
        return _error(self.divergences)

    @property
    def same(self) -> float:
        """Share of tokens with the same likeliest one."""
        return self.n_same / max(1, self.own.n)

    @property
    def rms(self) -> float:
        """Root of the mean square of differences of the token's probability."""
        return math.sqrt(self.squares / max(1, self.own.n))

    def quantile(self, part: float) -> float:
        return float(np.quantile(self.divergences, part))


def _error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def score(reader: LogitReader, chunks: Sequence[Sequence[int]], done: Done | None = None) -> Scored:
    """Log probabilities of the tokens in the second half of each sequence."""
    found = Scored()
    for i, ids in enumerate(chunks):
        for logprobs, tokens in _second_half(reader, ids):
            found.logprobs += logprobs.gather(1, tokens)[:, 0].tolist()
        if done is not None:
            done(i + 1)
    return found


def compare(
    base: LogitReader,
    others: Sequence[LogitReader],
    chunks: Sequence[Sequence[int]],
    done: Done | None = None,
) -> list[Compared]:
    """Each load beside the base, on the second half of each sequence. Raises RequestError if vocabularies differ in size."""
    for other in others:
        if base.info.n_vocab != other.info.n_vocab:
            raise RequestError(
                f"vocabularies of {other.info.n_vocab} and {base.info.n_vocab} tokens have no divergence"
            )
    found = [Compared() for _ in others]
    for i, ids in enumerate(chunks):
        of_all = zip(*(_second_half(reader, ids) for reader in (base, *others)), strict=True)
        for (p, tokens), *rest in of_all:
            for one, (q, _) in zip(found, rest, strict=True):
                _add(one, p, q.to(p.device), tokens)
        if done is not None:
            done(i + 1)
    return found


def _add(found: Compared, p: Tensor, q: Tensor, tokens: Tensor) -> None:
    """p, q [row, vocab]: log probabilities of the base and of the other; tokens [row, 1]"""
    found.divergences += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
    found.n_same += int((p.argmax(-1) == q.argmax(-1)).sum())
    a, b = p.gather(1, tokens)[:, 0], q.gather(1, tokens)[:, 0]
    found.squares += float((a.exp() - b.exp()).square().sum())
    found.base.logprobs += a.tolist()
    found.own.logprobs += b.tolist()


def _second_half(reader: LogitReader, ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(log probabilities [n, vocab] f64, the tokens that follow [n, 1]) of a few rows each, up to the last but one. Readers with forwards
    of the same size cut alike."""
    first, last = len(ids) // 2, len(ids) - 1
    for start, logits in reader.read(ids, first):
        for a in range(0, min(len(logits), last - start), PIECE):
            b = min(a + PIECE, last - start, len(logits))
            follow = logits.new_tensor(ids[start + a + 1 : start + b + 1]).long()[:, None]
            yield logits[a:b].double().log_softmax(-1), follow
