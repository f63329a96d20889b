"""A drafter outside the tree: it remembers which token followed which, in all requests together, and proposes that again.

pyspec needs no change for it: the entry point in pyproject.toml says that `--spec-type own` means this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pyspec.config import EngineSettings
from pyspec.draft.drafter import DraftOptions, DraftPlan, DraftRequest, Needs, TargetFile, refuse_file
from pyspec.gguf import GGUFFile
from pyspec.models.target import Out, Target
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import Drafts
from pyspec.slots.table import Slot, SlotTable


def recognises(file: GGUFFile) -> bool:
    return False  # no file asks for it: it drafts where it is named


def plan(file: GGUFFile | None, target: TargetFile, settings: EngineSettings) -> DraftPlan:
    refuse_file("own", file)
    return DraftPlan(kind="own", needs=Needs(settings.n_draft_max or 4), no_copy="it needs no head")


def load(plan: DraftPlan, target: Target, table: SlotTable, options: DraftOptions) -> Bigrams:
    return Bigrams(plan)


class Bigrams:
    def __init__(self, plan: DraftPlan) -> None:
        self.name, self.needs = plan.kind, plan.needs
        self.follows: dict[int, int] = {}
        self.n_read: dict[int, int] = {}  # tokens of a slot that have been read

    def begin(self, slot: Slot, saved: object | None) -> None:
        self.n_read[slot.index] = 0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Drafts]:
        return [Drafts(self.continued(r.slot, r.anchor, r.n_draft)) for r in requests]

    def continued(self, slot: Slot, anchor: int, n: int) -> list[int]:
        tokens, first = [*slot.tokens, anchor], self.n_read[slot.index]
        self.follows |= dict(pairwise(tokens[first:]))
        self.n_read[slot.index] = len(slot.tokens)  # the anchor is the first of the next pair
        for _ in range(n):
            if tokens[-1] in self.follows:
                tokens.append(self.follows[tokens[-1]])
        return tokens[len(slot.tokens) + 1 :]

    def absorb(self, batch: Batch, out: Out) -> None: ...  # it reads nothing of the target's forward
    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None: ...
    def checkpoint(self, slot: Slot) -> object | None: ...
    def end(self, slot: Slot) -> None: ...
