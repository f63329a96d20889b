"""Drafts from the slot's own text: the tokens behind the longest suffix that stood before. Needs no model.

Suffix drafts with one setting: a match has `--spec-ngram-simple-size-n` tokens at least, drafts have their full length whatever they
promise, and answers to other requests serve none. As a drafter, the policy of drafts learns how often they are right.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.config import EngineSettings
from pyspec.draft.host import HostDrafter
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.table import Slot

N_DRAFT = 8


def host_drafter(n_draft: int, settings: EngineSettings) -> NGram:
    """The drafter of up to `n_draft` tokens a round."""
    return NGram(n_draft, settings.ngram_match)


class NGram(HostDrafter):
    """A text is read when a draft is asked for first."""

    def __init__(self, n_draft: int = N_DRAFT, n_match: int = 3) -> None:
        self.n_draft = n_draft
        self.texts = SuffixDrafts(n_draft, n_match=n_match, least=0.0)

    def begin(self, slot: Slot) -> None:
        self.end(slot)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        for slot in (request.slot for request in requests):
            text = self.texts.texts.get(slot.index)
            if text is None or text.slot is not slot:
                self.texts.begin(slot, slot.tokens)
                while self.texts.advance(len(slot.tokens)):
                    pass
        found = self.texts.draft_all([(r.slot, r.anchor, r.n_draft) for r in requests])
        return [Drafts(draft.tokens) for draft in found]

    def end(self, slot: Slot) -> None:
        self.texts.end(slot)
