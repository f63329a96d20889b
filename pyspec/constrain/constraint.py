"""One request's position in its grammar. It advances with committed tokens only. Drafts are checked, but never consumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pyspec.constrain.phrases import LEAST_CHANCE, ORDER, Estimate, Offer, Phrasebook
from pyspec.constrain.trie import TokenTrie, begin, one_line
from pyspec.errors import GrammarTooLarge, RequestError, SlotError
from pyspec.request import Grammar

# rounds without a refusal; a refusal costs a pipelined round, and pipelining saves a few percent of each round
CALM = 32
# longest wait of a round for one grammar; slower requests take turns (engine/loop/grammar_turns.py)
SLOW_S = 0.03
# llguidance's text for a token that does not match; it has no error code
REFUSED = "satisfy the grammar"
T = TypeVar("T")
Masks = NDArray[np.int32]
"""[row, word]: bit t % 32 of word t // 32 is set if the row may choose token t."""


class Constraint:
    """A matcher and, before it, free text up to `after`.

    is_over  nothing can follow: the request ended with its last token
    spent    seconds spent in its grammar
    is_slow  its last masks took long
    """

    def __init__(self, trie: TokenTrie, grammar: Grammar) -> None:
        """grammar: a compiled one. Raises RequestError."""
        self.trie, self.source, self.matcher = trie, grammar.source, trie.matcher(grammar.source)
        self.read: list[int] = []  # tokens that the matcher consumed, for a new matcher
        self.is_over, self._n_calm, self.spent, self.is_slow = False, CALM, 0.0, False
        if grammar.begun:
            self._begin(grammar.begun)
        self.book: Phrasebook | None = None  # set if drafts are made; learns committed tokens
        self.free = FreeText(trie, grammar, self) if grammar.after else None

    def _begin(self, text: str) -> None:
        tokens = begin(self.trie.walked, self.matcher, text)
        if tokens is None:
            raise RequestError("the begun answer does not match its grammar")
        self.read, self.is_over = tokens, self.matcher.is_stopped()

    @property
    def is_plain(self) -> bool:
        """True if the next row may hold any token, as without a grammar."""
        return self.free is not None and not self.free.begun and not self.free.banned

    @property
    def is_calm(self) -> bool:
        """True if the model follows its grammar by itself, so that its best token is most likely allowed."""
        return self._n_calm >= CALM

    def record_best(self, is_refused: bool) -> None:
        """Count whether the best token of a row was refused."""
        self._n_calm = 0 if is_refused else self._n_calm + 1

    def charge(self, began: float) -> None:
        """Add the time since `began`, a value of `time.perf_counter`."""
        self.spent += time.perf_counter() - began

    # -- drafts --------------------------------------------------------------------------------------------------

    def usable(self, drafts: Sequence[int]) -> list[int]:
        """The drafts before the first refused one. Token ids only."""
        if self.free is not None:
            return list(drafts[: self.free.n_inside(drafts)])
        drafts, began = list(drafts), time.perf_counter()
        n = self.matcher.validate_tokens(drafts)
        if self.matcher.is_error():
            self.recover()
        self.charge(began)
        return drafts[:n]

    def draftable(self, drafts: Sequence[int]) -> list[int]:
        """The usable drafts without one that ends the text: nothing may follow it, and it needs no draft."""
        drafts = self.usable(drafts)
        while drafts and self.free is None and self._after(drafts, self.matcher.is_stopped):
            drafts.pop()
        return drafts

    def _after(self, tokens: list[int], ask: Callable[[], T]) -> T | None:
        """Ask the matcher behind valid tokens; None if they are not valid. The matcher's position stays."""
        began = time.perf_counter()
        n = self.matcher.try_consume_tokens(tokens) if tokens else 0
        found = ask() if n == len(tokens) and not self.matcher.is_error() else None
        if self.matcher.is_error() or (n and not self.matcher.rollback(n)):
            self.recover()
        self.charge(began)
        return found

    def offer(self, most: int, behind: Sequence[int] = ()) -> Offer:
        """Likely next tokens without a drafter: those that the grammar forces, and those of earlier texts. `behind`: usable drafts
        before them."""
        found = Offer()
        if self.free is not None:
            return found
        n = -1
        while n < len(found.tokens) < most:
            n = len(found.tokens)
            self._add_likely(found, most, behind)
            self._add_forced(found, most, behind)
        return found

    def _add_likely(self, found: Offer, most: int, behind: Sequence[int]) -> None:
        """Add tokens that followed in earlier texts, while they are likely."""
        if self.book is None:
            return
        n, chance = len(found.tokens), found.chance
        before = [*self.read[-ORDER:], *behind, *found.tokens]
        while len(found.tokens) < most:
            likely = self.book.next(before[-ORDER:])
            if likely is None or chance * likely[1] < LEAST_CHANCE:
                break
            found.add(*likely, self.book.likely)
            chance *= found.chances[-1]
            before.append(likely[0])
        if len(found.tokens) > n:
            found.cut(len(self.usable([*behind, *found.tokens])) - len(behind))

    def _add_forced(self, found: Offer, most: int, behind: Sequence[int]) -> None:
        """Add the tokens of a text that the grammar forces. The model may write the same text with other tokens."""
        if len(found.tokens) >= most:
            return
        before = [*behind, *found.tokens]
        text = self._forced_text(before)
        tokens = self.trie.tokenizer.encode_inside(text) if text else []
        ended = [*before, *tokens, self.trie.eog[0]]
        if tokens and len(self.usable(ended)) < len(ended):
            tokens = tokens[:-1]  # the last token may continue with later text
        spelled = Estimate() if self.book is None else self.book.spelled
        for token in tokens[: most - len(found.tokens)]:
            found.add(token, 1.0, spelled)

    def _forced_text(self, before: list[int]) -> str:
        if not self.trie.ends.isdisjoint(before):
            return ""
        matcher = self.matcher

        def forced() -> bytes:
            return b"" if matcher.is_stopped() else matcher.compute_ff_bytes()

        text = self._after(before, forced)
        return (text or b"").decode("utf-8", "ignore")

    def allows(self, before: Sequence[int], token: int) -> bool:
        """True if a token may follow usable drafts."""
        if self.free is not None and not self.free.begun:
            return token not in self.free.banned
        if self.free is not None:
            return bool(self.row()[token >> 5] >> (token & 31) & 1)
        return len(self.usable([*before, token])) > len(before)

    def row(self) -> NDArray[np.int32]:
        """[word]: the mask of the next row, without drafts."""
        return fill([(self, ())], self.trie)[0]

    # -- committed tokens ----------------------------------------------------------------------------------------

    def commit(self, tokens: Sequence[int]) -> int:
        """Consume committed tokens. Returns the number of tokens that belong to the text: none after the grammar's end.

        Raises SlotError if a token is refused, or the grammar exceeds its limits.
        """
        began = time.perf_counter()
        try:
            return self._commit(tokens)
        finally:
            self.charge(began)

    def _commit(self, tokens: Sequence[int]) -> int:
        for i, token in enumerate(tokens):
            if self.free is not None:
                self.free.commit(token)
            elif not self.matcher.consume_token(token):
                raise self.failure()
            else:
                if self.book is not None:
                    self.book.learn(self.read[-ORDER:], token)
                self.read.append(token)
            if self.free is None and self.matcher.is_stopped():
                if self.matcher.is_error():
                    raise self.failure()
                self.is_over = True
                return i + 1
        return len(tokens)

    def reread(self, text: bytes) -> None:
        """Restart the matcher and consume `text`."""
        self.matcher.reset()
        self.read = list(self.trie.walked.tokenize_bytes(text))
        if self.read and not self.matcher.consume_tokens(self.read):
            raise self.failure()

    def recover(self) -> None:
        """Replace the matcher, because text beyond the committed tokens has broken it for good."""
        self.matcher = self.trie.matcher(self.source)
        self.matcher.consume_tokens(self.read)

    def failure(self) -> SlotError:
        """The error of a matcher that does not advance: it refused a token, which is a bug, or it exceeds its limits."""
        why = one_line(self.matcher.get_error())
        if not self.matcher.is_error() or REFUSED in self.matcher.get_error():
            return SlotError(f"the text can not follow its grammar any further: {why}")
        return GrammarTooLarge(f"the grammar exceeds its limits: {why}")


class FreeText:
    """The text before `after`, and the border: a token that completes `after` may add text that the grammar must allow.

    While the text may end with the start of `after`, the matcher decides: it reads free text, `after` and the grammar. Elsewhere only
    two kinds of tokens are banned: end tokens, unless the text may stay free, and tokens that contain `after` and then text that the
    grammar refuses.

    begun   bytes of `after` at the end of the text; the matcher stands there
    banned  tokens that may not follow while `begun` is 0
    """

    def __init__(self, trie: TokenTrie, grammar: Grammar, constraint: Constraint) -> None:
        self.trie, self.constraint, self.after = trie, constraint, grammar.after.encode()
        self.lazy, self.tail, self.begun = grammar.lazy, b"", 0
        self.banned = frozenset(self._banned())
        self.mask = trie.bits(sorted(self.banned))

    def _banned(self) -> list[int]:
        matcher, tokenizer = self.constraint.matcher, self.trie.tokenizer
        banned = [] if self.lazy else list(self.trie.eog)
        special = tokenizer.special | tokenizer.eog
        for token, rest in self.trie.having(self.after):
            if token not in special and len(rest) > len(self.after):
                spelled = tokenizer.encode_inside(rest.decode("utf-8", "replace"))
                if matcher.validate_tokens(spelled) < len(spelled):
                    banned.append(token)
        return banned

    def n_inside(self, drafts: Sequence[int]) -> int:
        """Number of drafts before the first that reaches `after`."""
        if self.begun:
            return 0
        tail = self.tail
        for i, token in enumerate(drafts):
            tail, text = self._add(tail, token)
            if token in self.banned or self.after in text or self._begun(tail):
                return i
        return len(drafts)

    def commit(self, token: int) -> None:
        """Consume one token."""
        self.tail, text = self._add(self.tail, token)
        at = text.find(self.after)
        self.begun = self._begun(self.tail) if at < 0 else 0
        if at >= 0 or self.begun:
            self.constraint.reread(text[at:] if at >= 0 else self.tail[-self.begun :])
        if at >= 0:
            self.constraint.free = None

    def _add(self, tail: bytes, token: int) -> tuple[bytes, bytes]:
        text = tail + self.trie.tokenizer.token_bytes(token)
        return (text[-(len(self.after) - 1) :] if len(self.after) > 1 else b""), text

    def _begun(self, tail: bytes) -> int:
        return next((n for n in range(len(tail), 0, -1) if self.after.startswith(tail[-n:])), 0)


def fill(spans: Sequence[tuple[Constraint, Sequence[int]]], trie: TokenTrie) -> Masks:
    """Masks of the rows of several requests: for each request its next row and the rows behind its drafts, which are usable.

    A row that nothing can follow, or whose mask exceeds the limits, has no bit: its request ends when it gets there.
    """
    masks = np.zeros((sum(len(drafts) + 1 for _, drafts in spans), trie.n_word), np.int32)
    asked, row = [], 0
    for constraint, drafts in spans:
        free = constraint.free
        if free is not None and not free.begun:
            masks[row : row + len(drafts) + 1] = free.mask
        elif not constraint.is_over and not constraint.matcher.is_error():
            asked.append((constraint, drafts, row))
        row += len(drafts) + 1
    together = [each for each in asked if not each[0].is_slow]
    slow = [[each] for each in asked if each[0].is_slow]  # each alone, to measure its time
    for part in (together, *slow):
        began = time.perf_counter()
        _fill_together(part, masks, trie)
        for constraint, drafts, row in part:
            if constraint.matcher.is_error():
                _fill_apart(constraint, drafts, masks[row : row + len(drafts) + 1])
            constraint.charge(began)
            constraint.is_slow = time.perf_counter() - began >= SLOW_S
    for constraint, _, row in asked:
        if constraint.free is not None and constraint.free.lazy:
            # text that may stay free may end, even if `after` seems to begin
            masks[row] |= ~trie.bits(trie.eog)
    return masks


def _fill_together(
    asked: Sequence[tuple[Constraint, Sequence[int], int]], masks: Masks, trie: TokenTrie
) -> None:
    """Masks of several requests, each from its first row on, on several threads."""
    drafted = [(c.matcher, row, list(drafts)) for c, drafts, row in asked if drafts]
    plain = [(c.matcher, row) for c, drafts, row in asked if not drafts]
    shape = masks.ctypes.data, 4 * trie.n_word, len(masks)
    if drafted:
        trie.executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *shape)
    if len(plain) > 1:
        trie.executor.unsafe_compute_mask_ptr(plain, *shape)
    elif plain:
        plain[0][0].unsafe_compute_mask_ptr(masks[plain[0][1]].ctypes.data, 4 * trie.n_word)


def _fill_apart(constraint: Constraint, drafts: Sequence[int], masks: Masks) -> None:
    """Find the row that broke the matcher, so that the rows before it get their masks."""
    masks[:] = 0
    for i in range(len(masks)):
        constraint.recover()
        if i:
            constraint.matcher.consume_tokens(list(drafts[:i]))
        mask = bytearray(constraint.matcher.compute_bitmask())
        row = np.frombuffer(mask, np.int32)[: masks.shape[1]]
        if constraint.matcher.is_error():
            break
        masks[i] = row
    constraint.recover()
