"""Suffix drafts: the tokens behind the longest suffix of a text where it stood before, in the text itself or in finished answers.

Needs no model, and goes beside any drafter (`--spec-type dflash,suffix`). The draft follows the likeliest branch while the product of
its chances stays above a bound (SuffixDecoding: Oliaro et al., 2024). Chances are learned from the tokens that come (`suffix_chances`), so they
can be compared with a drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

from pyspec.draft.suffix_answers import Answers
from pyspec.draft.suffix_automaton import Branch, SuffixAutomaton
from pyspec.draft.suffix_chances import MOST_CHANCE, Promise, SuffixChances, TextFactor
from pyspec.registry import SUFFIX
from pyspec.slots.table import Slot

LEAST_MATCH = 2  # tokens
MOST_TEXT = 1 << 18  # tokens of a text; drafts of a longer one come from finished answers only
PIECE = 32  # tokens of prompts and finished answers that are entered at once while a device runs: about 0.1 ms
PER_ROUND = 256  # the same of a round without such a time, beside as many as it has rows
LATE = 64  # tokens that a draft enters itself; more wait for `advance`
BEFORE = 64  # tokens of a text looked up in automata that are new to it


class SuffixDraft:
    """Tokens that followed before.

    chances   of each token, if all before it are right
    survival  for each token, the probability that it and all tokens before it are right
    expected  tokens that will be right
    """

    __slots__ = ("_found", "_promise", "chances", "expected", "survival", "tokens")
    source: ClassVar[str] = SUFFIX

    def __init__(self, tokens: list[int], chances: list[float], promise: Promise) -> None:
        """promise: the share that drafts like it keep."""
        self.tokens, self.chances, self._promise = tokens, chances, promise
        self._found = list(accumulate(chances, mul))
        size = sum(self._found)
        factor = promise.factor(size)
        self.survival, self.expected = [factor * each for each in self._found], factor * size

    @property
    def chance_of_first(self) -> float:
        return self.survival[0] if self.survival else 0.0

    def first(self, n: int) -> SuffixDraft:
        """The first n tokens."""
        return (
            self
            if n >= len(self.tokens)
            else SuffixDraft(self.tokens[:n], self.chances[:n], self._promise)
        )

    def judge(self, n_draft: int, n_accepted: int) -> None:
        """Report that the first `n_draft` tokens were drafted and `n_accepted` of them were right."""
        if n_draft:
            self._promise.add(sum(self._found), sum(self._found[:n_draft]), n_accepted)


NO_DRAFT = SuffixDraft([], [], Promise())


@dataclass(slots=True)
class _Match:
    """Where a text stands in finished answers: the state of its longest suffix there."""

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
class _Text:
    """One slot's text.

    entered  tokens in its automaton, from the first on
    n_begin  tokens before the first one of the answer
    places   in finished answers, behind the first `n_followed` tokens
    keeps    its answer may be kept for later ones
    """

    client: str
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    entered: list[int] = field(default_factory=list)
    prompt: Sequence[int] = ()
    slot: Slot | None = None
    keeps: bool = False
    places: list[_Match] = field(default_factory=list)
    n_followed: int = 0
    offer: SuffixDraft | None = None  # the last one, for the tokens behind the first `n_offered`
    n_offered: int = 0
    promise: Promise = field(default_factory=Promise)
    own: TextFactor = field(default_factory=TextFactor)
    others: TextFactor = field(default_factory=TextFactor)

    @property
    def n_begin(self) -> int:
        return len(self.prompt)


class SuffixDrafts:
    """One text for each slot, and finished answers. Called on the engine's thread.

    n_draft      most tokens of a draft
    least        a draft ends where the product of its chances would be less
    answer_bytes host memory of finished answers
    shared       clients' answers serve all clients
    """

    def __init__(
        self, n_draft: int, *, least: float = 0.1, answer_bytes: int = 0, shared: bool = False
    ) -> None:
        self.n_draft, self.least = n_draft, least
        self.answers = Answers(answer_bytes, shared=shared)
        self.texts: dict[int, _Text] = {}
        self.forget_learned()

    def forget_learned(self) -> None:
        """Forget chances, texts and answers: they were of a warm-up."""
        self.of_text, self.of_answers, self.promise = SuffixChances(), SuffixChances(), Promise()
        self.texts.clear()
        self.answers.clear()

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts. Safe to call from any thread."""
        return sum(text.automaton.n_bytes for text in list(self.texts.values())) + self.answers.n_bytes

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, prompt: Sequence[int], client: str = "", *, keeps: bool = False) -> None:
        """A request starts in `slot`. prompt: every token before its answer. keeps: its answer may serve the client's later ones."""
        text = self.texts.get(slot.index)
        n = 0 if text is None else len(text.entered)
        if text is None or text.client != client or n > len(prompt) or text.entered != list(prompt[:n]):
            text = self.texts[slot.index] = _Text(client)
        text.prompt, text.slot, text.keeps = prompt, slot, keeps
        text.own, text.others, text.places = TextFactor(), TextFactor(), []
        text.promise, text.offer = Promise(self.promise), None

    def end(self, slot: Slot) -> None:
        """The request is over. Its text stays for a next one that continues it."""
        text = self.texts.get(slot.index)
        if text is None or text.slot is None:
            return
        if text.keeps:
            self.answers.add(text.client, tuple(slot.tokens[text.n_begin :]))
        text.slot, text.prompt, text.places = None, (), []

    # -- rounds --------------------------------------------------------------------------------------------------

    def advance(self, n: int) -> bool:
        """Enter up to n tokens of prompts, the shortest rest first, and of finished answers. False if none is left."""
        behind = [text for text in self.texts.values() if text.slot is not None and self._rest(text) > 0]
        for text in sorted(behind, key=self._rest):
            at = len(text.entered)
            piece = text.prompt[at : min(at + n, MOST_TEXT)]
            self._enter(text, piece)
            n -= len(piece)
            if n <= 0:
                return True
        return bool(behind) or self.answers.read(n) < n

    @staticmethod
    def _rest(text: _Text) -> int:
        """Tokens of the prompt that are not entered yet."""
        return min(text.n_begin, MOST_TEXT) - len(text.entered)

    @staticmethod
    def _enter(text: _Text, tokens: Sequence[int]) -> None:
        text.automaton.extend(tokens)
        text.entered.extend(tokens)

    def draft(self, slot: Slot, anchor: int, most: int) -> SuffixDraft:
        """The likeliest tokens behind `anchor`, the slot's last chosen token; empty if nothing stands there before."""
        text = self.texts.get(slot.index)
        if text is None or text.slot is not slot or most <= 0:
            return NO_DRAFT
        most = min(most, self.n_draft)
        self._compare(text, anchor)
        found = self._of_answers(text, anchor, most)
        if self._catch_up(text, anchor):
            match = _Match.of_text(text.automaton)
            own = self._follow(match, most, self.of_text, text.own, text.promise)
            found = own if own.expected >= found.expected else found
        text.offer, text.n_offered = found, slot.n_past + 1
        return found

    @staticmethod
    def _compare(text: _Text, anchor: int) -> None:
        """Learn from an offer that was not taken: its first tokens stand beside those that came."""
        offer, text.offer = text.offer, None
        if offer is None or text.slot is None:
            return
        came = _since(text.slot, text.n_offered, anchor)[: len(offer.tokens)]
        right = [a == b for a, b in zip(offer.tokens, came, strict=False)]
        offer.judge(len(right), right.index(False) if False in right else len(right))

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on a slot's last draft. Of one that was not verified, the tokens that come are the verdict."""
        text = self.texts.get(slot)
        if text is not None and text.offer is not None and n_draft:
            text.offer.judge(n_draft, n_accepted)
            text.offer = None

    def _catch_up(self, text: _Text, anchor: int) -> bool:
        """Enter the answer's new tokens, and learn from them. False if the prompt is not entered yet, or the text is too long."""
        assert text.slot is not None
        if 0 < self._rest(text) <= LATE:
            self._enter(text, text.prompt[len(text.entered) :])
        n, automaton = len(text.entered), text.automaton
        if n < text.n_begin or text.slot.n_past >= MOST_TEXT:
            return False
        for token in _since(text.slot, n, anchor):
            if n > text.n_begin:
                _learn(_Match.of_text(automaton), token, self.of_text, text.own)
            automaton.extend((token,))
            text.entered.append(token)
            n += 1
        return True

    def _of_answers(self, text: _Text, anchor: int, most: int) -> SuffixDraft:
        """The same from finished answers."""
        assert text.slot is not None
        automata = self.answers.automata(text.client)
        if not automata:
            return NO_DRAFT
        if len(automata) != len(text.places) or any(
            a is not place.automaton for a, place in zip(automata, text.places, strict=True)
        ):
            text.places, text.n_followed = (
                [_Match(each) for each in automata],
                max(0, text.slot.n_past - BEFORE),
            )
        for token in _since(text.slot, text.n_followed, anchor):
            if text.n_followed > text.n_begin:
                _learn(max(text.places, key=_length), token, self.of_answers, text.others)
            for place in text.places:
                place.step(token)
            text.n_followed += 1
        return self._follow(
            max(text.places, key=_length), most, self.of_answers, text.others, text.promise
        )

    def _follow(
        self, match: _Match, most: int, chances: SuffixChances, text: TextFactor, promise: Promise
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
            if survives < self.least:
                break
            tokens.append(branch.token)
            found.append(chance)
            match.state, match.length = branch.state, match.length + 1
        return SuffixDraft(tokens, found, promise) if tokens else NO_DRAFT


def _since(slot: Slot, n: int, anchor: int) -> Sequence[int]:
    """The slot's chosen tokens from the n-th on."""
    return [*slot.tokens[n:], anchor] if n <= slot.n_past else ()


def _length(place: _Match) -> int:
    return place.length


def _learn(match: _Match, token: int, chances: SuffixChances, text: TextFactor) -> None:
    """Compare the token that came with the one that would have been drafted."""
    branch = match.likeliest()
    if branch is not None:
        came = branch.token == token
        text.add(chances.learn(match.length, branch, came), came)
