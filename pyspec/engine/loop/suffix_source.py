"""Suffix drafts' side of the loop: texts of requests, pieces of them beside rounds, and failures, which end suffix drafts alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pyspec.draft.suffix_draft import NO_DRAFT, SuffixDraft
from pyspec.draft.suffix_drafts import PER_ROUND, PIECE, SuffixDrafts
from pyspec.engine.loop.job import Job
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_PER_ROUND = 2048  # tokens of texts that a round enters if no device runs beside


@dataclass(frozen=True, slots=True)
class TextToDraft:
    """A request's text: its tokens so far, its client, and whether its answer may serve later requests."""

    tokens: Sequence[int]
    client: str
    keeps: bool

    @classmethod
    def of(cls, job: Job) -> TextToDraft | None:
        """None if the request wants no drafts."""
        request = job.request
        return (
            None if request.n_draft_max == 0 else cls(job.prefill, request.client, request.cache_prompt)
        )


class SuffixSource:
    """Suffix drafts of all slots, or none if they are off or have failed.

    has_device  rounds run beside the host, which enters texts meanwhile
    raises_bugs  raise unexpected exceptions
    """

    def __init__(self, drafts: SuffixDrafts | None, *, has_device: bool) -> None:
        self.drafts, self.has_device, self.raises_bugs = drafts, has_device, False

    @property
    def is_on(self) -> bool:
        return self.drafts is not None

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated. Safe to call from any thread."""
        return 0 if self.drafts is None else self.drafts.n_bytes

    def begin(self, slot: Slot, text: TextToDraft | None) -> None:
        """A request starts in `slot`."""
        if text is not None:
            self._attempt(lambda drafts: drafts.begin(slot, text.tokens, text.client, keeps=text.keeps))

    def end(self, slot: Slot) -> None:
        """The slot's request is over."""
        self._attempt(lambda drafts: drafts.end(slot))

    def draft_all(self, wishes: Sequence[tuple[Slot, int, int]]) -> list[SuffixDraft]:
        """For each (slot, its last chosen token, most tokens) the likely tokens behind."""
        found = self._attempt(lambda drafts: drafts.draft_all(wishes)) if wishes else []
        return [NO_DRAFT] * len(wishes) if found is None else found

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on a slot's draft."""
        self._attempt(lambda drafts: drafts.judge(slot, n_draft, n_accepted))

    @property
    def has_rest(self) -> bool:
        """Texts wait to be entered."""
        return self.drafts is not None and self.drafts.has_rest

    def observe(self, n_row: int) -> None:
        """A round of so many rows has ended: enter a part of the texts that wait."""
        n = PIECE if self.has_device else min(PER_ROUND + n_row, MOST_PER_ROUND)
        self._attempt(lambda drafts: drafts.advance(n))

    def enter_piece(self) -> bool:
        """Enter a piece of a text while the device runs. False if none waits."""
        return bool(self._attempt(lambda drafts: drafts.advance(PIECE)))

    def forget_learned(self) -> None:
        """Forget a warm-up."""
        self._attempt(lambda drafts: drafts.forget_learned())

    def _attempt(self, do: Callable[[SuffixDrafts], T]) -> T | None:
        if self.drafts is None:
            return None
        try:
            return do(self.drafts)
        except Exception:  # they are worth no request
            if self.raises_bugs:
                raise
            log.exception("no more suffix drafts: they failed")
            self.drafts = None
        return None
