"""The contract of suffix drafts' texts, and plain lookups for machines without a C++ library and compiler (`suffix_native`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple, Protocol

from pyspec.draft.suffix_draft import NO_DRAFT, Promise, SuffixChances, SuffixDraft, guess
from pyspec.slots.table import Slot

LEAST_MATCH = 2  # tokens
MOST_TEXT = 1 << 18  # tokens of a text; drafts of a longer one come from finished answers only
LATE = 64  # tokens that a draft enters itself: of a prompt, more wait for `advance`; of an answer, the next drafts enter them
LOOK_BACK, LATEST = 64, 8  # of a plain lookup: tokens compared, and places


class GrowingText(Protocol):
    """An index of texts."""

    @property
    def n_token(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    def begin(self) -> None:
        """Begin another text: no match crosses its border."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the present text."""


class Learned(NamedTuple):
    """Chances of texts' own suffixes and of answers' suffixes, and what drafts keep of their promises."""

    of_text: SuffixChances
    of_answers: SuffixChances
    promise: Promise


class SlotText(ABC):
    """One slot's text.

    slot       None: no request has it
    keeps      its answer may be kept for later ones
    n_begin    tokens before the first one of the answer
    n_entered  tokens in its index, from the first on
    """

    def __init__(self, client: str) -> None:
        self.client, self.keeps, self.n_begin = client, False, 0
        self.slot: Slot | None = None

    @property
    @abstractmethod
    def n_entered(self) -> int: ...

    @property
    @abstractmethod
    def n_bytes(self) -> int: ...

    @abstractmethod
    def continues(self, prompt: Sequence[int]) -> bool:
        """What is entered is the begin of the prompt."""

    @abstractmethod
    def start(self, slot: Slot, prompt: Sequence[int], learned: Learned) -> None:
        """A request starts in `slot`. prompt: every token before its answer."""

    def end(self) -> None:
        """The request is over."""
        self.slot = None

    @abstractmethod
    def enter(self, n: int) -> None:
        """Enter up to n further tokens of the prompt."""

    @abstractmethod
    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on the last draft."""


# A wish for a draft: text, the slot's last chosen token, most tokens, and indices of answers, the young one first
SuffixAsk = tuple[SlotText, int, int, Sequence[GrowingText]]


# -- plain lookups -----------------------------------------------------------------------------------------------------


class PlainIndex:
    """Implements `GrowingText`: where each two tokens stood last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: defaultdict[tuple[int, ...], deque[int]] = defaultdict(lambda: deque(maxlen=LATEST))
        self.n_token = 0

    @property
    def n_bytes(self) -> int:
        return 100 * len(self.tokens)

    def begin(self) -> None:
        self.tokens.append(-1)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.n_token += len(tokens)
        for end in range(len(self.tokens) - len(tokens), len(self.tokens)):
            self.ends[tuple(self.tokens[end - 2 : end])].append(end)

    def behind(self, last: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The longest of the latest matches of the last tokens, and what follows it in its text."""
        found: tuple[int, Sequence[int]] = (0, ())
        for end in self.ends.get(tuple(last[-2:]), ()):
            before = reversed(self.tokens[max(0, end - LOOK_BACK) : end])
            n = sum(takewhile(bool, map(eq, before, reversed(last))))
            if n >= found[0]:
                found = n, [*takewhile(lambda token: token >= 0, self.tokens[end : end + LOOK_BACK])]
        return found


class PlainText(SlotText):
    """Chances are first guesses by a match's length, which the promises of its drafts correct."""

    def __init__(self, client: str) -> None:
        super().__init__(client)
        self.index, self.prompt, self.offer = PlainIndex(), [0][:0], NO_DRAFT

    @property
    def n_entered(self) -> int:
        return len(self.index.tokens)

    @property
    def n_bytes(self) -> int:
        return self.index.n_bytes

    def continues(self, prompt: Sequence[int]) -> bool:
        return self.n_entered <= len(prompt) and self.index.tokens == list(prompt[: self.n_entered])

    def start(self, slot: Slot, prompt: Sequence[int], learned: Learned) -> None:
        self.slot, self.prompt, self.n_begin = slot, list(prompt), len(prompt)
        self.promise, self.offer, self.n_offered = Promise(learned.promise), NO_DRAFT, 0

    def enter(self, n: int) -> None:
        self.index.extend(self.prompt[self.n_entered : min(self.n_entered + n, MOST_TEXT)])

    def judge(self, n_draft: int, n_accepted: int) -> None:
        self.offer.judge(n_draft, n_accepted)
        self.offer = NO_DRAFT

    def draft(
        self, anchor: int, most: int, indices: Sequence[GrowingText], least: float, n_match: int
    ) -> SuffixDraft:
        """As `PlainTexts.draft_all`, for this text."""
        assert self.slot is not None
        came = [*self.slot.tokens[self.n_offered :], anchor][: len(self.offer.tokens)]
        self.judge(len(came), sum(takewhile(bool, map(eq, came, self.offer.tokens))))
        self.n_offered = self.slot.n_past + 1
        last = [*self.slot.tokens[1 - LOOK_BACK :], anchor]
        found = [each.behind(last) for each in indices if isinstance(each, PlainIndex)]
        if self.n_entered < self.n_begin <= self.n_entered + LATE:
            self.enter(LATE)
        if self.n_begin <= self.n_entered <= MOST_TEXT:
            n = self.n_entered
            self.index.extend([*self.slot.tokens[n:], anchor] if n <= self.slot.n_past else ())
            found.append(self.index.behind(last))
        n, tokens = max(found, key=lambda each: each[0], default=(0, ()))
        chances = [guess(n + i) for i in range(min(most, len(tokens)) if n >= n_match else 0)]
        offer = SuffixDraft(list(tokens[: len(chances)]), chances, self.promise)
        kept = sum(1 for _ in takewhile(lambda chance: chance >= least, offer.survival))
        self.offer = offer.first(kept) if kept else NO_DRAFT
        return self.offer


class PlainTexts:
    """Makes texts and indices of answers, and drafts for them. n_draft: most tokens of a draft"""

    name = "Python"

    def automaton(self) -> GrowingText:
        """An empty one."""
        return PlainIndex()

    def text(self, client: str) -> SlotText:
        """A text of this client without tokens."""
        return PlainText(client)

    def draft_all(
        self, asks: Sequence[SuffixAsk], least: float, n_draft: int, n_match: int
    ) -> list[SuffixDraft]:
        """The draft of each, behind `n_match` tokens or more that stood before; it ends where the product of its chances would be below
        `least`. MemoryError without memory."""
        return [
            text.draft(anchor, min(most, n_draft), indices, least, n_match)
            for text, anchor, most, indices in asks
            if isinstance(text, PlainText)
        ]
