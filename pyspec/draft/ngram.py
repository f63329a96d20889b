"""Drafts from the slot's own text: find where its last tokens stood before, propose the tokens that followed.

Needs no model. Among the latest occurrences of the last `n_match` tokens the one with the longest common past wins.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspec.config import EngineSettings
from pyspec.draft.drafter import DraftOptions, DraftPlan, DraftRequest, Needs, TargetFile, refuse_file
from pyspec.gguf import GGUFFile
from pyspec.models.target import Out, Target
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import NO_DRAFTS, Drafts
from pyspec.slots.table import Slot, SlotTable

LOOK_BACK = 64  # tokens compared when occurrences compete
N_DRAFT = 8  # tokens a round, unless a number is asked for


def recognises(file: GGUFFile) -> bool:
    return False  # it drafts for any target, but only if it is asked for by name


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    refuse_file("ngram", file)
    return DraftPlan(
        kind="ngram",
        needs=Needs(settings.n_draft_max or N_DRAFT, on_host=True),
        no_copy="n-grams need no head",
    )


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> NGram:
    return NGram(len(table.slots), plan.needs.n_draft, options.settings.ngram_match)


@dataclass(slots=True)
class _Index:
    """Where each n-gram ended, for the first tokens of a slot."""

    generation: int = -1
    tokens: list[int] = field(default_factory=list)
    ends: defaultdict[tuple[int, ...], deque[int]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=8))
    )


class NGram:
    """Implements `Drafter`."""

    name = "ngram"

    def __init__(self, n_slot: int, n_draft: int = N_DRAFT, n_match: int = 3) -> None:
        self.needs = Needs(n_draft, on_host=True)
        self.n_match = n_match
        self.index = [_Index() for _ in range(n_slot)]

    def begin(self, slot: Slot, saved: object | None) -> None:
        self.index[slot.index] = _Index(slot.generation)

    def absorb(self, batch: Batch, out: Out) -> None:
        pass

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        pass  # it reads the slot's tokens when asked

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [
            Drafts(self._propose(request)) if request.n_draft > 0 else NO_DRAFTS for request in requests
        ]

    def _propose(self, request: DraftRequest) -> list[int]:
        slot, m = request.slot, self.n_match
        index = self.index[slot.index]
        assert index.generation == slot.generation, "n-gram index of another request"
        tokens, n = index.tokens, len(index.tokens)
        if n <= slot.n_past:  # else it was asked for these already
            tokens += slot.tokens[n:]
            tokens.append(request.anchor)
        for end in range(max(n, m), len(tokens)):  # the n-gram at the very end has no continuation yet
            index.ends[tuple(tokens[end - m : end])].append(end)
        found = index.ends.get(tuple(tokens[-m:]), ())
        best = max(found, key=lambda end: (self._past(tokens, end), end), default=None)
        return [] if best is None else tokens[best : best + request.n_draft]

    @staticmethod
    def _past(tokens: list[int], end: int) -> int:
        """How many tokens before `end` equal those at the end of the text."""
        n, most = 0, min(LOOK_BACK, end)
        while n < most and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        return n

    def checkpoint(self, slot: Slot) -> object | None:
        return None

    def end(self, slot: Slot) -> None:
        self.index[slot.index] = _Index()
