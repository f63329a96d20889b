"""Speculation's side of the loop: how much each slot drafts, who proposes it, and what happens when a drafter fails.

A drafter can cost drafts, never a text or a request. What it was not told of it has lost track of: such a slot is not asked
again until its request ends, and leaves nothing for later requests to go on from.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pyspec.constrain.offer import Offer
from pyspec.cuda.faults import ALL_SLOTS
from pyspec.device.worker import Worker, is_device_error
from pyspec.draft.drafter import Drafter, DraftRequest, LookaheadDrafter, Needs
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.stats import Stats
from pyspec.engine.policy.controller import Controller
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

T = TypeVar("T")

LIKELY = 0.5  # that a token behind a refused one is reached and right: else it is not worth its row


class Speculator:
    """Asks the worker's drafter for what the controller wants, and keeps its failures away from the loop."""

    def __init__(self, worker: Worker, controller: Controller, stats: Stats) -> None:
        self.worker, self.controller, self.stats = worker, controller, stats
        self.lost_track: set[int] = set()  # slots whose drafter state is not to be trusted
        self.chosen: list[tuple[int, int]] | None = None  # (slot, drafts) of the next round, if that is known already
        self.watch = AcceptanceWatch()
        self.offers: dict[
            int, Offer
        ] = {}  # by slot, what a grammar and texts under it say: drafts that need no drafter
        self.refused: dict[int, int] = {}  # by slot, at which token its grammar refused the drafter's draft
        self.raises_bugs = False  # a drafter that fails otherwise than by a SlotError is not done without

    @property
    def drafter(self) -> Drafter | None:
        return self.worker.drafter

    @property
    def needs(self) -> Needs:
        return self.worker.needs

    # -- before a verify -----------------------------------------------------------------------------------------

    def lengths(self, jobs: Sequence[Job], taken: Sequence[int] = ()) -> list[tuple[int, int]]:
        """(slot, drafts) of the next round. `taken`: of each, the most tokens that are under way, so that nobody can offer any."""
        under_way = taken or [0] * len(jobs)
        caps = [(j.slot.index, self.most(j, n)) for j, n in zip(jobs, under_way, strict=True) if j.slot is not None]
        offers = {} if taken else {slot: offer.survival for slot, offer in self.offers.items()}
        return [(slot, n) for (slot, _), n in zip(caps, self.controller.choose(caps, offers), strict=True)]

    def most(self, job: Job, taken: int) -> int:
        """Most tokens worth drafting: the bonus token comes for free, so one less than the request may still emit."""
        asked, most = job.request.n_draft_max, self.needs.n_draft
        if job.slot is not None and job.slot.index in self.lost_track:
            return 0
        return max(0, min(most, job.n_left - taken - 1, most if asked is None else asked))

    def draft(self, jobs: Sequence[Job]) -> dict[int, Sequence[int]]:
        """Drafts by slot for these decoding jobs. A failure costs this round's drafts, nothing else."""
        chosen, self.chosen = self.chosen, None
        held = [job for job in jobs if job.constraint is not None]
        self._collect_offers(held)
        if (
            chosen is None
            or self.offers
            or [slot for slot, _ in chosen] != [job.slot.index for job in jobs if job.slot is not None]
        ):
            chosen = self.lengths(jobs)
        found: dict[int, Sequence[int]] = {
            slot: self.offers[slot].tokens[:n] for slot, n in chosen if slot in self.controller.offered
        }
        found |= self._ask(jobs, [(slot, 0 if slot in found else n) for slot, n in chosen])
        for job in held:
            self._fit(job, dict(chosen), found)
        return found

    def _ask(self, jobs: Sequence[Job], chosen: Sequence[tuple[int, int]]) -> dict[int, Sequence[int]]:
        """The drafter's, for those slots that it is to draft for."""
        drafter = self.drafter
        if drafter is None or not any(n for _, n in chosen):
            return {}
        asks = [
            DraftRequest(job.slot, job.anchor, n)
            for job, (slot, n) in zip(jobs, chosen, strict=True)
            if job.slot is not None and job.anchor is not None and slot not in self.lost_track
        ]
        found = self._attempt("no drafts this round", lambda: drafter.draft(asks), [ask.slot for ask in asks])
        drafts = zip(asks, found or [], strict=bool(found))
        return {ask.slot.index: draft[: ask.n_draft] for ask, draft in drafts if ask.n_draft}

    def _collect_offers(self, jobs: Sequence[Job]) -> None:
        self.offers.clear()
        self.refused.clear()
        for job in jobs:
            if job.slot is not None and job.constraint is not None and (most := self.most(job, 0)):
                offer = job.constraint.offer(most)
                if offer.tokens:
                    self.offers[job.slot.index] = offer

    def has_offers(self, jobs: Iterable[Job]) -> bool:
        """Whether a grammar would offer one of them likely tokens, behind what is committed, and more than the drafter promises. Or has:
        the verdict on those comes first."""
        if self.controller.offered:
            return True
        caps, offers = [], {}
        for job in jobs:
            if job.constraint is not None and job.slot is not None and (most := self.most(job, 0)):
                offer = job.constraint.offer(most)
                if offer.chance_of_first >= LIKELY:
                    caps.append((job.slot.index, most))
                    offers[job.slot.index] = offer.survival
        return bool(offers and self.controller.preferred(caps, offers))

    def _fit(self, job: Job, n_chosen: Mapping[int, int], drafts: dict[int, Sequence[int]]) -> None:
        """Where a grammar refuses a token of the drafter's, go on with what it offers there, if that is likely."""
        slot, constraint = job.slot, job.constraint
        if slot is None or constraint is None or slot.index in self.controller.offered or not drafts.get(slot.index):
            return
        draft = job.sampler.usable(drafts[slot.index])
        usable = constraint.usable(draft)
        if len(usable) < len(draft):
            self.refused[slot.index] = len(usable)
            offer = constraint.offer(n_chosen[slot.index] - len(usable), usable)
            drafts[slot.index] = [
                *usable,
                *(t for t, p in zip(offer.tokens, offer.survival, strict=True) if p >= LIKELY),
            ]

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """The verdict on a slot's drafts, for whoever made them."""
        if slot in self.controller.offered:
            self.offers[slot].judge(n_draft, n_accepted)
            return
        n = self.refused.pop(slot, None)
        if n is not None:  # what a grammar refuses is wrong, and so is all behind it
            n_draft, n_accepted = n + 1, min(n, n_accepted)
        self.controller.record(slot, n_draft, n_accepted)

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
        known = [i for i, seq in enumerate(batch.seqs) if seq.slot not in self.lost_track and kept[i]]
        if drafter is None or not known:
            return
        if len(known) < len(batch.seqs):
            starts = [*(batch.starts[i] for i in known), batch.n_row]
            batch, kept = replace(batch, seqs=[batch.seqs[i] for i in known], starts=starts), [kept[i] for i in known]
        self._or_lose_track(
            lambda: drafter.observe(batch, kept, out), [self.worker.table.slots[q.slot] for q in batch.seqs]
        )

    def confirm_ahead(self, slots: Iterable[Slot]) -> None:
        """What was drafted ahead is for the tokens that these slots have now."""
        drafter, known = self.drafter, [slot for slot in slots if slot.index not in self.lost_track]
        if isinstance(drafter, LookaheadDrafter) and known:
            self._or_lose_track(lambda: drafter.confirm_ahead(known), known)

    def take_faults(self) -> None:
        """A guard that tripped while drafting: drafts may be wrong, which costs their rows and no text."""
        fault = self.worker.draft_faults.take()
        if fault is not None:
            self.stats.guard_trips += 1
            log.warning("while drafting: %s", fault.error(ALL_SLOTS))

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, saved: object | None, *, grammar: str = "") -> None:
        """A request sits in `slot`; `saved` is the drafter's share of what the cache gave it. grammar: that it keeps to."""
        drafter = self.drafter
        if drafter is not None:
            self._or_lose_track(lambda: drafter.begin(slot, saved), [slot])
        self.controller.begin(slot.index, grammar)

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
