"""One slot's text and its suffix drafts, in Python: what `suffix_native` does in C++ where a library is at hand, token for token.

The draft follows the likeliest branch behind the longest suffix that stands before, while the product of its chances stays above a bound
(SuffixDecoding: Oliaro et al., 2024). Chances are learned from the tokens that come (`suffix_chances`), so they can be compared with a
drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pyspec.draft.suffix_automaton import Branch, SuffixAutomaton
from pyspec.draft.suffix_chances import MOST_CHANCE, Promise, SuffixChances, TextFactor
from pyspec.draft.suffix_draft import NO_DRAFT, SuffixDraft
from pyspec.slots.table import Slot

LEAST_MATCH = 2  # tokens
MOST_TEXT = 1 << 18  # tokens of a text; drafts of a longer one come from finished answers only
LATE = 64  # tokens that a draft enters itself: of a prompt, more wait for `advance`; of an answer, the next drafts enter them
BEFORE = (
    64  # tokens of a text looked up in automata that are new to it, or that it has not followed for long
)


class GrowingText(Protocol):
    """An automaton of texts, as `SuffixAutomaton`."""

    @property
    def n_token(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    def begin(self) -> None:
        """Begin another text: no substring crosses its border."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the present text."""


class Learned(NamedTuple):
    """Chances of texts' own suffixes and of answers' suffixes, and what drafts keep of their promises."""

    of_text: SuffixChances
    of_answers: SuffixChances
    promise: Promise


class SlotText(Protocol):
    """One slot's text.

    slot       None: no request has it
    keeps      its answer may be kept for later ones
    n_begin    tokens before the first one of the answer
    n_entered  tokens in its automaton, from the first on
    """

    client: str
    slot: Slot | None
    keeps: bool
    n_begin: int

    @property
    def n_entered(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    def continues(self, prompt: Sequence[int]) -> bool:
        """What is entered is the begin of the prompt."""

    def start(self, slot: Slot, prompt: Sequence[int], learned: Learned) -> None:
        """A request starts in `slot`. prompt: every token before its answer."""

    def end(self) -> None:
        """The request is over."""

    def enter(self, n: int) -> None:
        """Enter up to n further tokens of the prompt."""

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on the last draft."""


# A wish for a draft: text, the slot's last chosen token, most tokens, and automata of answers, the young one first
SuffixAsk = tuple[SlotText, int, int, Sequence[GrowingText]]


class SuffixKind(Protocol):
    """Makes texts and automata, and drafts for them. n_draft: most tokens of a draft"""

    name: str

    def automaton(self) -> GrowingText:
        """An empty one."""

    def text(self, client: str) -> SlotText:
        """A text of this client without tokens."""

    def draft_all(self, asks: Sequence[SuffixAsk], least: float, n_draft: int) -> list[SuffixDraft]:
        """The draft of each, which ends where the product of its chances would be below `least`. MemoryError without memory."""


class PythonTexts:
    """Implements `SuffixKind`."""

    name = "Python"

    def automaton(self) -> SuffixAutomaton:
        return SuffixAutomaton()

    def text(self, client: str) -> SuffixText:
        return SuffixText(client)

    def draft_all(self, asks: Sequence[SuffixAsk], least: float, n_draft: int) -> list[SuffixDraft]:
        found = []
        for text, anchor, most, automata in asks:
            assert isinstance(text, SuffixText)
            found.append(text.draft(anchor, min(most, n_draft), automata, least))
        return found


@dataclass(slots=True)
class _Match:
    """Where a text stands in an automaton: the state of its longest suffix there."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    @classmethod
    def of_text(cls, automaton: SuffixAutomaton) -> _Match:
        """The place of the automaton's own text."""
        return cls(automaton, automaton.match, automaton.length[automaton.match])

    def step(self, token: int) -> None:
        self.state, self.length = self.automaton.step(self.state, self.length, token)

    def likeliest(self) -> Branch | None:
        """The likeliest next token. Goes to a shorter suffix if nothing follows this one; None if that is too short."""
        automaton = self.automaton
        while self.length >= LEAST_MATCH:
            follower = automaton.likeliest(self.state)
            if follower is not None:
                return follower
            self.state = automaton.link[self.state]
            self.length = automaton.length[self.state]
        return None


@dataclass(slots=True)
class SuffixText:
    """Implements `SlotText`.

    entered  tokens in its automaton
    places   in finished answers, behind the first `n_followed` tokens
    offer    the last one, for the tokens behind the first `n_offered`
    """

    client: str
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    entered: list[int] = field(default_factory=list)
    prompt: Sequence[int] = ()
    slot: Slot | None = None
    keeps: bool = False
    n_begin: int = 0
    places: list[_Match] = field(default_factory=list)
    n_followed: int = 0
    offer: SuffixDraft | None = None
    n_offered: int = 0
    learned: Learned | None = None
    promise: Promise = field(default_factory=Promise)
    own: TextFactor = field(default_factory=TextFactor)
    others: TextFactor = field(default_factory=TextFactor)

    @property
    def n_entered(self) -> int:
        return len(self.entered)

    @property
    def n_bytes(self) -> int:
        return self.automaton.n_bytes

    def continues(self, prompt: Sequence[int]) -> bool:
        n = len(self.entered)
        return n <= len(prompt) and self.entered == list(prompt[:n])

    def start(self, slot: Slot, prompt: Sequence[int], learned: Learned) -> None:
        self.slot, self.prompt, self.n_begin, self.learned = slot, prompt, len(prompt), learned
        self.own, self.others, self.places = TextFactor(), TextFactor(), []
        self.promise, self.offer = Promise(learned.promise), None

    def end(self) -> None:
        self.slot, self.prompt, self.places = None, (), []

    def enter(self, n: int) -> None:
        at = len(self.entered)
        piece = self.prompt[at : min(at + n, MOST_TEXT)]
        self.automaton.extend(piece)
        self.entered.extend(piece)

    def draft(
        self, anchor: int, most: int, automata: Sequence[GrowingText], least: float
    ) -> SuffixDraft:
        """As `SuffixKind.draft_all`, for this text."""
        assert self.learned is not None and self.slot is not None
        self._compare(anchor)
        found = NO_DRAFT
        if automata:
            self._follow_answers(anchor, automata)
            place = max(self.places, key=_length)
            found = self._follow(place, most, least, self.learned.of_answers, self.others)
        if self._catch_up(anchor):
            match = _Match.of_text(self.automaton)
            own = self._follow(match, most, least, self.learned.of_text, self.own)
            found = own if own.expected >= found.expected else found
        self.offer, self.n_offered = found, self.slot.n_past + 1
        return found

    def _since(self, n: int, anchor: int) -> Sequence[int]:
        """The slot's chosen tokens from the n-th on."""
        slot = self.slot
        return [*slot.tokens[n:], anchor] if slot is not None and n <= slot.n_past else ()

    def _compare(self, anchor: int) -> None:
        """Learn from an offer that was not taken: its first tokens stand beside those that came."""
        offer, self.offer = self.offer, None
        if offer is None or not offer.tokens:
            return
        came = self._since(self.n_offered, anchor)[: len(offer.tokens)]
        right = [a == b for a, b in zip(offer.tokens, came, strict=False)]
        offer.judge(len(right), right.index(False) if False in right else len(right))

    def judge(self, n_draft: int, n_accepted: int) -> None:
        if self.offer is not None and n_draft:
            self.offer.judge(n_draft, n_accepted)
            self.offer = None

    def _catch_up(self, anchor: int) -> bool:
        """Enter the answer's new tokens, and learn from them. False if the text is not entered up to its end, or too long."""
        assert self.slot is not None and self.learned is not None
        if 0 < min(self.n_begin, MOST_TEXT) - len(self.entered) <= LATE:
            self.enter(LATE)
        n, automaton = len(self.entered), self.automaton
        if n < self.n_begin or self.slot.n_past >= MOST_TEXT:
            return False
        new = self._since(n, anchor)
        if len(new) > LATE:
            automaton.extend(new[:LATE])
            self.entered.extend(new[:LATE])
            return False
        for token in new:
            if n > self.n_begin:
                _learn(_Match.of_text(automaton), token, self.learned.of_text, self.own)
            automaton.extend((token,))
            n += 1
        self.entered.extend(new)
        return True

    def _follow_answers(self, anchor: int, automata: Sequence[GrowingText]) -> None:
        """Follow the client's answers."""
        assert self.slot is not None and self.learned is not None
        is_known = len(automata) == len(self.places) and all(
            a is place.automaton for a, place in zip(automata, self.places, strict=True)
        )
        if not is_known or self.slot.n_past - self.n_followed > BEFORE:
            self.places = [_Match(each) for each in automata if isinstance(each, SuffixAutomaton)]
            self.n_followed = max(0, self.slot.n_past - BEFORE)
        for token in self._since(self.n_followed, anchor):
            if self.n_followed > self.n_begin:
                _learn(max(self.places, key=_length), token, self.learned.of_answers, self.others)
            for place in self.places:
                place.step(token)
            self.n_followed += 1

    def _follow(
        self, match: _Match, most: int, least: float, chances: SuffixChances, text: TextFactor
    ) -> SuffixDraft:
        """The likeliest branch behind a match."""
        tokens: list[int] = []
        found: list[float] = []
        survives, factor = 1.0, text.factor
        match = _Match(match.automaton, match.state, match.length)
        while len(tokens) < most:
            branch = match.likeliest()
            if branch is None:
                break
            chance = min(MOST_CHANCE, chances.of(match.length, branch) * factor)
            survives *= chance
            if survives < least:
                break
            tokens.append(branch.token)
            found.append(chance)
            match.state, match.length = branch.state, match.length + 1
        return SuffixDraft(tokens, found, self.promise) if tokens else NO_DRAFT


def _length(place: _Match) -> int:
    return place.length


def _learn(match: _Match, token: int, chances: SuffixChances, text: TextFactor) -> None:
    """Compare the token that came with the one that would have been drafted."""
    branch = match.likeliest()
    if branch is not None:
        came = branch.token == token
        text.add(chances.learn(match.length, branch, came), came)
