"""Suffix drafts: the tokens behind the longest suffix of a text where it stood before, in the text itself or in finished answers.

Needs no model, and goes beside any drafter (`--spec-type dflash,suffix`). This file keeps one text for each slot and the finished answers.
A round asks for all slots in one call, which `suffix_native` answers in C++, and plain lookups (`suffix_text`) where there is no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.draft.suffix_answers import Answers
from pyspec.draft.suffix_chances import Promise, SuffixChances
from pyspec.draft.suffix_draft import NO_DRAFT, SuffixDraft
from pyspec.draft.suffix_native import fastest
from pyspec.draft.suffix_text import LEAST_MATCH, MOST_TEXT, Learned, SlotText, SuffixKind
from pyspec.slots.table import Slot

PIECE = (
    32  # tokens of prompts and finished answers that are entered at once while a device runs: 0.01 ms
)
PER_ROUND = 256  # the same of a round without such a time, beside as many as it has rows


class SuffixDrafts:
    """One text for each slot, and finished answers. Called on the engine's thread.

    n_draft      most tokens of a draft
    n_match      fewest tokens that stood before in the same order
    least        a draft ends where the product of its chances would be less
    answer_bytes host memory of finished answers
    shared       clients' answers serve all clients
    kind         None: the fastest one that this machine has
    """

    def __init__(
        self,
        n_draft: int,
        *,
        n_match: int = LEAST_MATCH,
        least: float = 0.1,
        answer_bytes: int = 0,
        shared: bool = False,
        kind: SuffixKind | None = None,
    ) -> None:
        self.n_draft, self.n_match, self.least, self.kind = n_draft, n_match, least, kind or fastest()
        self.answers = Answers(answer_bytes, shared=shared, kind=self.kind)
        self.texts: dict[int, SlotText] = {}
        self.behind: set[int] = set()  # slots whose prompts are not entered yet
        self.forget_learned()

    def forget_learned(self) -> None:
        """Forget chances, texts and answers: they were of a warm-up."""
        self.learned = Learned(SuffixChances(), SuffixChances(), Promise())
        self.texts.clear()
        self.behind.clear()
        self.answers.clear()

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts. Safe to call from any thread."""
        return sum(text.n_bytes for text in list(self.texts.values())) + self.answers.n_bytes

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, prompt: Sequence[int], client: str = "", *, keeps: bool = False) -> None:
        """A request starts in `slot`. prompt: every token before its answer. keeps: its answer may serve the client's later ones."""
        text = self.texts.get(slot.index)
        if text is None or text.client != client or not text.continues(prompt):
            text = self.texts[slot.index] = self.kind.text(client)
        text.keeps = keeps
        text.start(slot, prompt, self.learned)
        self.behind.add(slot.index)

    def end(self, slot: Slot) -> None:
        """The request is over. Its text stays for a next one that continues it."""
        text = self.texts.get(slot.index)
        if text is None or text.slot is None:
            return
        self.behind.discard(slot.index)
        if text.keeps:
            self.answers.add(text.client, tuple(slot.tokens[text.n_begin :]))
        text.end()

    # -- rounds --------------------------------------------------------------------------------------------------

    @property
    def has_rest(self) -> bool:
        """Prompts or finished answers wait to be entered."""
        return bool(self.behind or self.answers.queue)

    def advance(self, n: int) -> bool:
        """Enter up to n tokens of prompts, the shortest rest first, and of finished answers. False if none is left."""
        self.behind = {slot for slot in self.behind if self._rest(self.texts[slot]) > 0}
        was_behind = bool(self.behind)
        for slot in sorted(self.behind, key=lambda slot: self._rest(self.texts[slot])):
            text = self.texts[slot]
            before = text.n_entered
            text.enter(n)
            n -= text.n_entered - before
            if n <= 0:
                return True
            self.behind.discard(slot)
        return was_behind or self.answers.read(n) < n

    @staticmethod
    def _rest(text: SlotText) -> int:
        """Tokens of the prompt that are not entered yet."""
        return min(text.n_begin, MOST_TEXT) - text.n_entered

    def draft(self, slot: Slot, anchor: int, most: int) -> SuffixDraft:
        """The likeliest tokens behind `anchor`, the slot's last chosen token; empty if nothing stands there before."""
        return self.draft_all([(slot, anchor, most)])[0]

    def draft_all(self, wishes: Sequence[tuple[Slot, int, int]]) -> list[SuffixDraft]:
        """A draft for each (slot, anchor, most tokens): as `draft`."""
        asks, at = [], []
        texts, automata_of = self.texts, self.answers.automata
        for i, (slot, anchor, most) in enumerate(wishes):
            text = texts.get(slot.index)
            if text is not None and text.slot is slot and most > 0 and len(slot.tokens) >= text.n_begin:
                asks.append((text, anchor, most, automata_of(text.client)))
                at.append(i)
        found = self.kind.draft_all(asks, self.least, self.n_draft, self.n_match) if asks else []
        if len(at) == len(wishes):
            return found
        made = dict(zip(at, found, strict=True))
        return [made.get(i, NO_DRAFT) for i in range(len(wishes))]

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on a slot's last draft. Of one that was not verified, the tokens that come are the verdict."""
        text = self.texts.get(slot)
        if text is not None:
            text.judge(n_draft, n_accepted)
