"""A drafter outside the tree: it remembers which token followed which, in all requests together, and proposes that again.

pyspec needs no change for it: the entry point in pyproject.toml says that `--spec-type own` means this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pyspec.config import EngineSettings
from pyspec.draft.host import HostDrafter
from pyspec.slots.drafts import DraftRequest, Drafts
from pyspec.slots.table import Slot

N_DRAFT = 4  # tokens a round, unless a number is asked for


def host_drafter(n_draft: int, settings: EngineSettings) -> Bigrams:
    return Bigrams(n_draft)


class Bigrams(HostDrafter):
    def __init__(self, n_draft: int) -> None:
        self.n_draft = n_draft
        self.follows: dict[int, int] = {}
        self.n_read: dict[int, int] = {}  # tokens of a slot that have been read

    def begin(self, slot: Slot) -> None:
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
