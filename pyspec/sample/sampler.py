"""The sampling state of one request: its settings, its committed tokens, and their effect on the next logits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import OutOfBounds, RequestError
from pyspec.ranges import check
from pyspec.request import SamplingParams
from pyspec.sample.budget import BudgetRule
from pyspec.sample.dry import Dry, DryBreakers
from pyspec.sample.feedback import Feedback, SpanChoice
from pyspec.sample.noise import ACCEPT, DRAFT, XTC, Floats, Ints, of_round, resolve_seed, uniform
from pyspec.slots.images import has_images, is_image

_NO_IDS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Edits:
    """Sparse changes to the logits of a span's rows, in the order they are applied. Pairs (row, token) are unique per kind.

    bans     no token before a certain length: -inf
    bias     added first; -inf bans
    counts   occurrences of the token in the penalty window of its row, > 0
    dry      subtracted last
    """

    bans: tuple[Ints, Ints, Floats]
    bias: tuple[Ints, Ints, Floats]
    counts: tuple[Ints, Ints, Ints]
    dry: tuple[Ints, Ints, Floats]


class SlotSampler:
    """One request's sampler. It holds committed tokens only, so nothing is ever rolled back.

    Drafts are read, not kept: row i of a span is conditioned on the history and the drafts before it.

    ends          tokens that end the request
    edits_logits  some logit may change before the cuts
    only_bans     logits only fall (a ban on end tokens, negative biases)
    banned        tokens that are never chosen, if no other logit ever changes; None: others may
    races         its draws are races (`slots.race`) that a drafter can take part in; set before the first choice
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        eog_ids: Iterable[int],
        prompt: Sequence[int],
        breakers: DryBreakers | None = None,
        budget: BudgetRule | None = None,
    ) -> None:
        """`prompt` counts as history, as in llama.cpp, without rows of pictures. `breakers` is needed if DRY is on and has sequence breakers.

        Raises RequestError for settings that have no meaning and OutOfBounds for prompt tokens outside the vocabulary.
        """
        check(params, RequestError)
        prompt = [t for t in prompt if not is_image(t)] if has_images(prompt) else prompt
        self.params = params
        self.n_vocab = n_vocab
        self.seed = resolve_seed(params.seed)
        self.eog_ids = frozenset(eog_ids)
        self.ends = frozenset() if params.ignore_eos else self.eog_ids
        self.bias = _bias(params, n_vocab, self.eog_ids)
        ends = sorted(t for t in self.eog_ids if 0 <= t < n_vocab)
        self.bans = np.array(ends, np.int64) if params.min_tokens else _NO_IDS
        self.n_banned = len(prompt) + params.min_tokens  # number of tokens until which `bans` apply
        self.bias_ids = frozenset((*self.bias[0].tolist(), *self.bans.tolist()))
        self.penalises = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.dry = Dry(params, {})
        if self.dry.active and params.dry_sequence_breakers:
            assert breakers is not None, "sequence breakers need the tokenizer's DryBreakers"
            self.dry = Dry(params, breakers.heads(params))
        self.edits_logits = bool(self.bias_ids) or self.penalises or self.dry.active
        is_fixed = not self.penalises and not self.dry.active  # no edit depends on the history
        self.only_bans = is_fixed and bool((self.bias[1] <= 0).all())
        are_bans = is_fixed and not len(self.bans) and bool((self.bias[1] == -np.inf).all())
        self.banned = frozenset(self.bias[0].tolist()) if are_bans else None
        # identifies the request, repeatably
        self.fingerprint = zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
        self.races = False
        self.feedback = Feedback.first(params)
        self.ahead = SpanChoice()  # chosen but not committed
        self.n_history = 0
        self._tokens = np.zeros(len(prompt) + 256, dtype=np.int64)
        self._counts: dict[int, int] = {}
        self.budget: BudgetRule | None = None  # the prompt is not part of this request's reasoning
        self.commit(prompt)
        self.budget = budget

    @property
    def history(self) -> list[int]:
        """Every committed token, the prompt first."""
        return self._tokens[: self.n_history].tolist()

    def commit(self, tokens: Sequence[int]) -> None:
        """Append final tokens: the prompt, then each round's kept tokens."""
        # A prompt may be long: no loop over it
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.n_vocab):
            bad = next(token for token in tokens if not 0 <= token < self.n_vocab)
            raise OutOfBounds("committed token", bad, self.n_vocab)
        old, self.n_history = self.n_history, self.n_history + len(tokens)
        self._reserve(self.n_history)
        self._tokens[old : self.n_history] = tokens
        if self.penalises:
            self._count(old)
        if self.budget is not None:
            self.budget.commit(tokens)
        if self.ahead.feedback and tokens:
            self.feedback = self.ahead.feedback[min(len(tokens), len(self.ahead.feedback)) - 1]
            self.ahead = SpanChoice()

    def banned_next(self) -> list[int]:
        """Tokens that the next one can not be, for any logits."""
        banned = self.bias[0][self.bias[1] == -np.inf].tolist()
        return [*banned, *(self.bans.tolist() if self.n_history < self.n_banned else ())]

    def usable(self, drafts: Sequence[int]) -> list[int]:
        """The drafts before the first invalid token id; no token after it can be accepted."""
        if drafts and (min(drafts) < 0 or max(drafts) >= self.n_vocab):
            bad = (i for i, token in enumerate(drafts) if not 0 <= token < self.n_vocab)
            drafts = drafts[: next(bad)]
        return list(drafts)

    def noise(self, n_row: int) -> NDArray[np.float64]:
        """The random number of each row's draw: row i chooses the token at position n_history + i."""
        return uniform(self.seed, np.arange(self.n_history, self.n_history + n_row))

    def draft_noise(self, n: int) -> NDArray[np.float64]:
        """Random numbers of the next n drafts, if they are drawn apart from this request's tokens."""
        return uniform(of_round(self.seed, self.n_history, DRAFT), np.arange(n))

    def accepts(self, n: int) -> NDArray[np.float64]:
        """Random numbers that decide how many of this round's drafts are accepted."""
        return uniform(of_round(self.seed, self.n_history, ACCEPT), np.arange(n))

    def coins(self, n_row: int) -> NDArray[np.float64]:
        """A second random number of each row."""
        return uniform(self.seed, np.arange(self.n_history, self.n_history + n_row), XTC)

    def edits(self, drafts: Sequence[int]) -> Edits:
        """Changes to the len(drafts) + 1 rows of a span. `drafts` must be usable."""
        n_row = len(drafts) + 1
        bias = _on_rows(n_row, *self.bias)
        if drafts:
            self._reserve(self.n_history + len(drafts))
            # Scratch beyond the end
            self._tokens[self.n_history : self.n_history + len(drafts)] = drafts
        return Edits(self._row_bans(n_row), bias, self._row_counts(drafts), self._row_dry(n_row))

    def _row_bans(self, n_row: int) -> tuple[Ints, Ints, Floats]:
        n = min(n_row, max(0, self.n_banned - self.n_history)) if len(self.bans) else 0
        return _on_rows(n, self.bans, np.full(len(self.bans), -math.inf, np.float32))

    def _reserve(self, n: int) -> None:
        if n > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(max(n, 256), dtype=np.int64)])

    def _count(self, old: int) -> None:
        """Move the penalty window from the first `old` tokens to all of them."""
        last_n = self.params.repeat_last_n
        begin, was = [0 if last_n < 0 else max(0, end - last_n) for end in (self.n_history, old)]
        for token in self._tokens[max(old, begin) : self.n_history].tolist():
            self._counts[token] = self._counts.get(token, 0) + 1
        for token in self._tokens[was : min(begin, old)].tolist():
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]

    def _row_counts(self, drafts: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        if not self.penalises:
            return _NO_IDS, _NO_IDS, _NO_IDS
        column = {token: i for i, token in enumerate(dict.fromkeys((*self._counts, *drafts)))}
        ids = np.fromiter(column, np.int64)
        counts = np.zeros((len(drafts) + 1, len(ids)), dtype=np.int64)
        counts[:, : len(self._counts)] = np.fromiter(self._counts.values(), np.int64)
        for i, token in enumerate(drafts, start=1):
            counts[i:, column[token]] += 1
            gone = self.n_history + i - self.params.repeat_last_n - 1
            if self.params.repeat_last_n > 0 and gone >= 0:
                counts[i:, column[int(self._tokens[gone])]] -= 1
        rows, columns = np.nonzero(counts)
        return rows, ids[columns], counts[rows, columns]

    def _row_dry(self, n_row: int) -> tuple[Ints, Ints, Floats]:
        if not self.dry.active:
            return _NO_IDS, _NO_IDS, _NO_IDS.astype(np.float32)
        found = [self.dry.penalties(self._tokens[: self.n_history + i]) for i in range(n_row)]
        rows = [i for i, penalties in enumerate(found) for _ in penalties]
        ids = [token for penalties in found for token in penalties]
        values = [value for penalties in found for value in penalties.values()]
        return np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float32)


def _bias(params: SamplingParams, n_vocab: int, eog_ids: frozenset[int]) -> tuple[Ints, Floats]:
    """Logit bias and the ban on end-of-generation tokens as one list with unique ids."""
    total: dict[int, float] = {}
    for token, value in params.logit_bias:
        if not 0 <= token < n_vocab:
            ids = f"0..{n_vocab - 1}"
            raise RequestError(f"logit_bias names token {token}; the vocabulary has ids {ids}")
        total[token] = total.get(token, 0.0) + value
    if params.ignore_eos:
        total.update((token, -math.inf) for token in eog_ids if 0 <= token < n_vocab)
    return np.fromiter(total, np.int64), np.fromiter(total.values(), np.float32)


def _on_rows(n_row: int, ids: Ints, values: Floats) -> tuple[Ints, Ints, Floats]:
    """The same values on each of the first rows: (rows, ids, values). Most slots have one row, and many have no ids."""
    if not n_row or not len(ids):
        return _NO_IDS, _NO_IDS, values[:0]
    if n_row == 1:
        return np.zeros(len(ids), np.int64), ids, values
    return np.repeat(np.arange(n_row), len(ids)), np.tile(ids, n_row), np.tile(values, n_row)
