"""Speculation's side of the loop: how much each slot drafts, who proposes it, and what happens when a drafter fails.

A drafter can cost drafts, never a text or a request. What it was not told of it has lost track of: such a slot is not asked
again until its request ends, and leaves nothing for later requests to go on from.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from pyspec.cuda.faults import EVERYONE
from pyspec.device.worker import Worker, is_device_error
from pyspec.draft.drafter import Drafter, DraftRequest, LookaheadDrafter, Needs
from pyspec.engine.controller import Controller
from pyspec.engine.job import Job
from pyspec.engine.stats import Stats
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

T = TypeVar("T")


class Speculator:
    """Asks the worker's drafter for what the controller wants, and keeps its failures away from the loop."""

    def __init__(self, worker: Worker, controller: Controller, stats: Stats) -> None:
        self.worker, self.controller, self.stats = worker, controller, stats
        self.lost_track: set[int] = set()  # slots whose drafter state is not to be trusted
        self.chosen: list[tuple[int, int]] | None = None  # (slot, drafts) of the next round, if that is known already
        self.watch = AcceptanceWatch()
        self.forced: set[int] = set()  # slots whose drafts are what their grammar forces, and nobody's guess
        self.raises_bugs = False  # a drafter that fails otherwise than by a SlotError is not done without

    @property
    def drafter(self) -> Drafter | None:
        return self.worker.drafter

    @property
    def needs(self) -> Needs:
        return self.worker.needs

    # -- before a verify -----------------------------------------------------------------------------------------

    def lengths(self, jobs: Sequence[Job], taken: Sequence[int] = ()) -> list[tuple[int, int]]:
        """(slot, drafts) of the next round. `taken`: of each, the most tokens that are under way."""
        under_way = taken or [0] * len(jobs)
        caps = [(j.slot.index, self.most(j, n)) for j, n in zip(jobs, under_way, strict=True) if j.slot is not None]
        return [(slot, n) for (slot, _), n in zip(caps, self.controller.choose(caps), strict=True)]

    def most(self, job: Job, taken: int) -> int:
        """Most tokens worth drafting: the bonus token comes for free, so one less than the request may still emit."""
        asked, most = job.request.n_draft_max, self.needs.n_draft
        if job.slot is not None and job.slot.index in self.lost_track:
            return 0
        return max(0, min(most, job.n_left - taken - 1, most if asked is None else asked))

    def draft(self, jobs: Sequence[Job]) -> dict[int, Sequence[int]]:
        """Drafts by slot for these decoding jobs. A failure costs this round's drafts, nothing else."""
        chosen, self.chosen = self.chosen, None
        if chosen is None or [slot for slot, _ in chosen] != [job.slot.index for job in jobs if job.slot is not None]:
            chosen = self.lengths(jobs)
        forced = self._forced([job for job in jobs if job.constraint is not None])
        drafter = self.drafter
        if drafter is None or not any(n > len(forced.get(slot, ())) for slot, n in chosen):
            return forced
        asks = [
            DraftRequest(job.slot, job.anchor, n)
            for job, (slot, n) in zip(jobs, chosen, strict=True)
            if job.slot is not None and job.anchor is not None and slot not in self.lost_track
        ]
        found = self._attempt("no drafts this round", lambda: drafter.draft(asks), [ask.slot for ask in asks])
        drafts = {ask.slot.index: d[: ask.n_draft] for ask, d in zip(asks, found or [], strict=bool(found))}
        for slot, tokens in forced.items():
            if tuple(drafts.get(slot, ())[: len(tokens)]) == tuple(tokens):
                self.forced.discard(slot)  # the drafter says so, too, and goes on
            else:
                drafts[slot] = tokens
        return drafts

    def _forced(self, jobs: Sequence[Job]) -> dict[int, Sequence[int]]:
        """By slot, what a grammar leaves no choice about: drafts that need no drafter, if their rows pay."""
        self.forced.clear()
        found = {}
        for job in jobs:
            if job.slot is not None and job.constraint is not None:
                tokens = job.constraint.forced(self.most(job, 0))
                if tokens and self.controller.pays(len(jobs), len(tokens)):
                    found[job.slot.index] = tokens
        self.forced.update(found)
        return found

    def _attempt(self, what: str, do: Callable[[], T], slots: Sequence[Slot]) -> T | None:
        """What the drafter returns; None if it fails. A SlotError leaves its state as it was; after anything else nobody knows."""
        try:
            return do()
        except SlotError as e:
            self.stats.guard_trips += 1
            log.warning("%s: %s", what, e)
        except Exception as e:
            if is_device_error(e) or self.raises_bugs:
                raise
            log.exception("%s: the drafter failed", what)
            self.lose_track(slots, e)
        return None

    # -- after a verify ------------------------------------------------------------------------------------------

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """Tell the drafter what is kept, before the slots' tokens grow. If it fails, nobody knows whom it heard of."""
        drafter = self.drafter
        heard = [i for i, seq in enumerate(batch.seqs) if seq.slot not in self.lost_track and kept[i]]
        if drafter is None or not heard:
            return
        if len(heard) < len(batch.seqs):
            starts = [*(batch.starts[i] for i in heard), batch.n_row]
            batch, kept = replace(batch, seqs=[batch.seqs[i] for i in heard], starts=starts), [kept[i] for i in heard]
        self._or_lose_track(
            lambda: drafter.observe(batch, kept, out), [self.worker.table.slots[q.slot] for q in batch.seqs]
        )

    def confirm_ahead(self, slots: Iterable[Slot]) -> None:
        """What was drafted ahead is for the tokens that these slots have now."""
        drafter, heard = self.drafter, [slot for slot in slots if slot.index not in self.lost_track]
        if isinstance(drafter, LookaheadDrafter) and heard:
            self._or_lose_track(lambda: drafter.confirm_ahead(heard), heard)

    def take_faults(self) -> None:
        """A guard that tripped while drafting: drafts may be wrong, which costs their rows and no text."""
        fault = self.worker.draft_faults.take()
        if fault is not None:
            self.stats.guard_trips += 1
            log.warning("while drafting: %s", fault.error(EVERYONE))

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, saved: object | None) -> None:
        """A request sits in `slot`; `saved` is the drafter's share of what the cache gave it."""
        drafter = self.drafter
        if drafter is not None:
            self._or_lose_track(lambda: drafter.begin(slot, saved), [slot])
        self.controller.begin(slot.index)

    def checkpoint(self, slot: Slot) -> object | None:
        """The drafter's share of what is filed. The slot may have been lost track of when this returns."""
        drafter = self.drafter
        return None if drafter is None else self._or_lose_track(lambda: drafter.checkpoint(slot), [slot])

    def end(self, slot: Slot) -> None:
        """The slot's request is over."""
        drafter = self.drafter
        if drafter is not None and slot.index not in self.lost_track:
            self._or_lose_track(lambda: drafter.end(slot), [slot])
        self.lost_track.discard(slot.index)

    def _or_lose_track(self, do: Callable[[], T], slots: Sequence[Slot]) -> T | None:
        try:
            return do()
        except Exception as e:
            if is_device_error(e) or (self.raises_bugs and not isinstance(e, SlotError)):
                raise
            if not isinstance(e, SlotError):
                log.exception("the drafter failed")
            self.lose_track(slots, e)
        return None

    def lose_track(self, slots: Sequence[Slot], error: Exception) -> None:
        """The drafter is not asked again for these slots' requests, and they leave nothing more."""
        self.stats.guard_trips += 1
        log.warning("no more drafts for the requests in slots %s: %s", [slot.index for slot in slots], error)
        for slot in slots:
            self.lost_track.add(slot.index)
            try:
                if self.drafter is not None:
                    self.drafter.end(slot)
            except Exception as e:
                if is_device_error(e):
                    raise
                log.debug("the drafter could not let go of slot %d: %s", slot.index, e)

    def forget(self, slots: Iterable[Slot]) -> None:
        """Their requests are gone, and nobody knows what the drafter made of their last round."""
        for slot in slots:
            self.end(slot)
        self.lost_track.clear()
        self.chosen = None

    def has_collapsed(self, job: Job) -> bool:
        """True once, when a drafter that was good has been bad for many requests, of which `job` is the last."""
        return self.watch.add(sum(job.drafted), sum(job.accepted))


class AcceptanceWatch:
    """Sees the acceptance of a drafter that was good collapse, over requests: other engines know this and not why it happens."""

    LEAST_DRAFTED = 8  # tokens a request must have drafted to count
    MANY = 24  # requests
    GOOD, COLLAPSED = 0.3, 0.25  # acceptance that was good; share of it that is left

    def __init__(self) -> None:
        self.was = self.now = 0.0
        self.recent: deque[float] = deque(maxlen=self.MANY)

    def add(self, n_drafted: int, n_accepted: int) -> bool:
        """One request is over. True if the last MANY of them say that acceptance has collapsed, which is said once."""
        if n_drafted < self.LEAST_DRAFTED:
            return False
        if len(self.recent) == self.MANY:  # what leaves the window is what once was
            self.was += (self.recent[0] - self.was) * (1 / self.MANY if self.was else 1.0)
        self.recent.append(n_accepted / n_drafted)
        self.now = sum(self.recent) / len(self.recent)
        if len(self.recent) < self.MANY or self.was < self.GOOD or self.now > self.COLLAPSED * self.was:
            return False
        self.was = self.now  # told once: what it is from here on is what it was
        return True
