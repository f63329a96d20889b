"""Drafts from the slot's own text: the tokens behind the longest suffix that stood before. Needs no model.

Suffix drafts with one setting: a match has `--spec-ngram-simple-size-n` tokens at least, drafts have their full length whatever they
promise, and answers to other requests serve none. As a drafter, the policy of drafts learns how often they are right.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspec.config import EngineSettings
from pyspec.draft.drafter import DraftOptions, DraftPlan, DraftRequest, Needs, TargetFile, refuse_file
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.gguf import GGUFFile
from pyspec.models.target import Out, Target
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import Drafts
from pyspec.slots.table import Slot, SlotTable

N_DRAFT = 8  # tokens a round, unless a number is asked for


def recognises(file: GGUFFile) -> bool:
    return False  # it drafts for any target, but only if it is asked for by name


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    refuse_file("ngram", file)
    needs = Needs(settings.n_draft_max or N_DRAFT, on_host=True)
    return DraftPlan(kind="ngram", needs=needs, no_copy="n-grams need no head")


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> NGram:
    return NGram(plan.needs.n_draft, options.settings.ngram_match)


class NGram:
    """Implements `Drafter`. A text is read when a draft is asked for first."""

    name = "ngram"

    def __init__(self, n_draft: int = N_DRAFT, n_match: int = 3) -> None:
        self.needs = Needs(n_draft, on_host=True)
        self.texts = SuffixDrafts(n_draft, n_match=n_match, least=0.0)

    def begin(self, slot: Slot, saved: object | None) -> None:
        self.end(slot)

    def absorb(self, batch: Batch, out: Out) -> None:
        pass

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        for slot in (request.slot for request in requests):
            text = self.texts.texts.get(slot.index)
            if text is None or text.slot is not slot:
                self.texts.begin(slot, slot.tokens)
                while self.texts.advance(len(slot.tokens)):
                    pass
        found = self.texts.draft_all([(r.slot, r.anchor, r.n_draft) for r in requests])
        return [Drafts(draft.tokens) for draft in found]

    def checkpoint(self, slot: Slot) -> object | None:
        return None

    def end(self, slot: Slot) -> None:
        self.texts.end(slot)
