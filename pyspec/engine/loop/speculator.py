"""Speculation's side of the loop: draft lengths, drafts, and failures of a drafter.

A drafter can cost drafts, but no text and no request. If it misses a slot's tokens, it has lost track of the slot: it drafts no
more for that request, and the request leaves no drafter state in the cache.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pyspec.constrain.offer import Offer
from pyspec.cuda.faults import ALL_SLOTS
from pyspec.device.worker import Worker, is_device_error
from pyspec.draft.drafter import (
    Drafter,
    DraftRequest,
    LookaheadDrafter,
    Needs,
    WindowedDrafter,
)
from pyspec.draft.suffix_drafts import NO_DRAFT as NO_SUFFIX_DRAFT
from pyspec.draft.suffix_drafts import SuffixDraft, SuffixDrafts
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.stats import Stats
from pyspec.engine.loop.suffix_source import Patience, SuffixSource, TextToDraft
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.decay import Decay
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.sample.draft_draws import draft_draw
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import NO_DRAFTS, DraftDraw, Drafts
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

T = TypeVar("T")

WORTH_READING = (
    1.1  # factor of a round's tokens that an offer must promise, if the next round waits for it
)
LIKELY = 0.5  # least chance of a token behind a refused one to be worth its row


class Speculator:
    """Asks the worker's drafter for the drafts that the controller chose, and keeps its failures from the loop."""

    def __init__(
        self, worker: Worker, controller: Controller, stats: Stats, suffixes: SuffixDrafts | None = None
    ) -> None:
        self.worker, self.controller, self.stats = worker, controller, stats
        self.suffixes = SuffixSource(suffixes, has_device=worker.device.type != "cpu")
        self.patience = Patience()
        self.waits_for_offers = False  # offered drafts are not verified yet
        self.lost_track: set[int] = set()  # slots whose drafter state is not trusted
        self.chosen: list[tuple[int, int]] | None = (
            None  # (slot, drafts) of the next round, if they are chosen already
        )
        self.asked: list[
            int
        ] = []  # tokens of this round's drafts, before they were cut; none if they were not
        self.watch = AcceptanceWatch()
        self.decay = Decay(len(worker.table.slots), worker.needs.n_trained)
        self.offers: dict[int, Offer | SuffixDraft] = {}  # by slot, drafts that need no drafter
        self.refused: dict[
            int, int
        ] = {}  # by slot, the index of the drafted token that its grammar refused
        self.raises_bugs = False  # raise unexpected exceptions of a drafter
        # the drafter that was asked last whether it has windows, and its answer
        self._asked_windows: tuple[Drafter | None, bool] = (None, False)

    @property
    def has_windows(self) -> bool:
        """The drafter may read windows of a text. Asked for each slot in each round, so a protocol is compared once: that takes 10 us."""
        if self._asked_windows[0] is not self.drafter:
            self._asked_windows = self.drafter, isinstance(self.drafter, WindowedDrafter)
        return self._asked_windows[1]

    @property
    def drafter(self) -> Drafter | None:
        return self.worker.drafter

    @property
    def needs(self) -> Needs:
        return self.worker.needs

    # -- before a verify -----------------------------------------------------------------------------------------

    def lengths(
        self, jobs: Sequence[Job], taken: Sequence[int] = (), *, whole: bool = False, beside: int = 0
    ) -> list[tuple[int, int]]:
        """Choose (slot, drafts) of the next round. taken: of each, most tokens in flight; no grammar offers drafts behind those.

        whole: they will be cut when they are known. beside: rows of prompts in the same forward
        """
        self._set_windows(jobs)
        under_way = taken or [0] * len(jobs)
        caps = [
            (j.slot.index, self.most(j, n))
            for j, n in zip(jobs, under_way, strict=True)
            if j.slot is not None
        ]
        offers = {} if taken else {slot: offer.survival for slot, offer in self.offers.items()}
        picked = self.controller.choose(caps, offers, beside)
        if whole:
            picked = self.controller.whole(caps, picked)
        return [(slot, n) for (slot, _), n in zip(caps, picked, strict=True)]

    def _set_windows(self, jobs: Iterable[Job]) -> None:
        drafter = self.drafter
        if isinstance(drafter, WindowedDrafter):
            for slot in (job.slot for job in jobs if job.slot is not None):
                drafter.set_window(slot, self.decay.window(slot.index, slot.n_past))

    def most(self, job: Job, taken: int) -> int:
        """Most tokens that the drafter may draft."""
        if job.slot is not None and job.slot.index in self.lost_track:
            return 0
        n_most = self.needs.n_draft if self.controller.force is None else self.controller.n_max
        if job.slot is not None and self.needs.n_ctx:
            n_most = max(0, min(n_most, self.needs.n_ctx - job.slot.n_past - taken))
        return min(n_most, self._most_offered(job, taken))

    def _most_offered(self, job: Job, taken: int = 0) -> int:
        """Most tokens worth drafting: one less than the request may still emit, because the bonus token needs no draft."""
        asked, most = job.request.n_draft_max, self.controller.n_max
        return max(0, min(most, job.n_left - taken - 1, most if asked is None else asked))

    def draft(self, jobs: Sequence[Job], beside: int = 0) -> dict[int, Drafts]:
        """Draft for these decoding jobs, by slot. A failure costs only this round's drafts. beside: as in `lengths`"""
        chosen, self.chosen = self.chosen, None
        held = [job for job in jobs if job.constraint is not None]
        self._collect_offers(jobs if self.suffixes.is_on else held)
        if (
            chosen is None
            or self.offers
            or [slot for slot, _ in chosen] != [job.slot.index for job in jobs if job.slot is not None]
        ):
            chosen = self.lengths(jobs, whole=self.needs.tells, beside=beside)
        offered = self.controller.offered
        taken = [slot for slot, n in chosen if n and slot in offered]
        for slot in taken:
            lane = self.controller.lanes[slot]
            lane.reason = f"{self.offers[slot].source} draft; {lane.reason}"
        self.waits_for_offers = bool(taken) or any(
            isinstance(self.offers[slot], Offer) for slot in offered
        )
        self.patience.count(bool(offered), self.waits_for_offers)
        found = {slot: _drafts_of(self.offers[slot], n) for slot, n in chosen if slot in offered}
        asked = [(slot, 0 if slot in found else n) for slot, n in chosen]
        found |= self._ask(jobs, asked)
        chosen = self._cut(chosen, found)
        for job in held:
            self._fit(job, dict(chosen), found)
        if self.controller.force is not None:  # a warm-up times rows, whatever their tokens
            found = {
                slot: found.get(slot, NO_DRAFTS).then([0] * (n - len(found.get(slot, NO_DRAFTS).tokens)))
                for slot, n in chosen
            }
        return found

    def _ask(self, jobs: Sequence[Job], chosen: Sequence[tuple[int, int]]) -> dict[int, Drafts]:
        """Ask the drafter for the slots that need it."""
        drafter = self.drafter
        if drafter is None or not any(n for _, n in chosen):
            return {}
        asks = [
            DraftRequest(
                job.slot,
                job.anchor,
                min(n, self.needs.n_draft),
                self.controller.cuts,
                self._draw(job) if n else None,
            )
            for job, (slot, n) in zip(jobs, chosen, strict=True)
            if job.slot is not None and job.anchor is not None and slot not in self.lost_track
        ]

        def by_slot() -> dict[int, Drafts]:
            found = zip(asks, drafter.draft(asks), strict=True)
            return {ask.slot.index: drafts.first(ask.n_draft) for ask, drafts in found if ask.n_draft}

        return self._attempt("no drafts this round", by_slot, [ask.slot for ask in asks]) or {}

    def _cut(self, chosen: list[tuple[int, int]], found: dict[int, Drafts]) -> list[tuple[int, int]]:
        """Cut drafts whose drafter tells how sure it is; the lengths of all then."""
        sure = {slot: drafts.sure for slot, drafts in found.items() if drafts.sure is not None}
        self.asked = [n for slot, n in chosen if slot in sure]
        if not sure:
            return chosen
        drafted = [(slot, len(found.get(slot, NO_DRAFTS).tokens)) for slot, _ in chosen]
        began = time.perf_counter()
        kept = dict(self.controller.cut(drafted, sure))
        self.controller.cut_took(1e3 * (time.perf_counter() - began))
        for slot in sure:
            found[slot] = found[slot].first(kept[slot])
        return [(slot, kept[slot] if slot in sure else n) for slot, n in chosen]

    def _draw(self, job: Job) -> DraftDraw | None:
        held = job.constraint is not None
        return draft_draw(job.sampler, self.needs.draws, self.needs.n_draft, is_held=held)

    def _collect_offers(self, jobs: Iterable[Job]) -> None:
        self.refused.clear()
        found = ((job.slot.index, self._offer(job)) for job in jobs if job.slot is not None)
        self.offers = {slot: offer for slot, offer in found if offer.tokens}

    def _offer(self, job: Job) -> Offer | SuffixDraft:
        """What the request's grammar or an earlier text offers, whichever promises more."""
        most, constraint = self._most_offered(job), job.constraint
        if not most:
            return NO_SUFFIX_DRAFT
        offer = NO_SUFFIX_DRAFT if self.controller.force is not None else self.suffixes.draft(job, most)
        if constraint is None:
            return offer
        if offer.tokens:
            offer = offer.first(len(constraint.usable(offer.tokens)))
        held = constraint.offer(most)
        return held if sum(held.survival) >= offer.expected else offer

    def has_offers(self, jobs: Iterable[Job]) -> bool:
        """A grammar or an earlier text offers one of the jobs likely tokens, more than the drafter promises, or has offered some that are not verified yet."""
        if self.waits_for_offers:
            return True
        caps, offers = [], {}
        for job in jobs:
            if job.slot is not None and (job.constraint is not None or self.suffixes.is_on):
                offer = self._offer(job)
                if offer.chance_of_first >= LIKELY:
                    caps.append((job.slot.index, self.most(job, 0)))
                    offers[job.slot.index] = offer.survival
        gain = WORTH_READING if self.suffixes.is_on else 1.0
        return bool(offers and self.controller.preferred(caps, offers, gain)) and self.patience.is_left

    def _fit(self, job: Job, n_chosen: Mapping[int, int], found: dict[int, Drafts]) -> None:
        """Replace the drafter's tokens behind the first one that the grammar refuses by the grammar's own offer, if it is likely."""
        slot, constraint = job.slot, job.constraint
        if (
            slot is None
            or constraint is None
            or slot.index in self.controller.offered
            or slot.index not in found
        ):
            return
        drafts = found[slot.index]
        draft = job.sampler.usable(drafts.tokens)
        usable = constraint.usable(draft)
        if len(usable) < len(draft):
            self.refused[slot.index] = len(usable)
            offer = constraint.offer(n_chosen[slot.index] - len(usable), usable)
            likely = (t for t, p in zip(offer.tokens, offer.survival, strict=True) if p >= LIKELY)
            found[slot.index] = drafts.first(len(usable)).then(likely)

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Report a slot's verdict to the source of its drafts."""
        if slot in self.controller.offered:
            offer = self.offers[slot]
            if isinstance(offer, Offer):
                offer.judge(n_draft, n_accepted)
            else:
                self.suffixes.judge(slot, n_draft, n_accepted)
            return
        n = self.refused.pop(slot, None)
        if n is not None:  # the refused token is wrong, and so is every token behind it
            n_draft, n_accepted = n + 1, min(n, n_accepted)
        self.controller.record(slot, n_draft, n_accepted)
        n_past = self.worker.table.slots[slot].n_past
        if self.has_windows and self.decay.add(slot, n_past, n_draft, n_accepted):
            log.info("slot %d: %s", slot, self.decay.reason(slot))
            self.controller.restart(slot)

    def _attempt(self, outcome: str, do: Callable[[], T], slots: Sequence[Slot]) -> T | None:
        """Call the drafter; None if it fails. A SlotError leaves its state valid; any other exception makes it unknown."""
        try:
            return do()
        except SlotError as e:
            self.stats.guard_trips += 1
            log.warning("%s: %s", outcome, e)
        except Exception as e:
            if is_device_error(e) or self.raises_bugs:
                raise
            log.exception("%s: the drafter failed", outcome)
            self.lose_track(slots, e)
        return None

    # -- after a verify ------------------------------------------------------------------------------------------

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """Report accepted rows to the drafter, before the slots' tokens grow. If this fails, its state for these slots is unknown."""
        drafter = self.drafter
        self.suffixes.observe(batch.n_row)
        known = [i for i, seq in enumerate(batch.seqs) if seq.slot not in self.lost_track and kept[i]]
        if drafter is None or not known:
            return
        if len(known) < len(batch.seqs):
            starts = [*(batch.starts[i] for i in known), batch.n_row]
            batch, kept = (
                replace(batch, seqs=[batch.seqs[i] for i in known], starts=starts),
                [kept[i] for i in known],
            )
        self._or_lose_track(
            lambda: drafter.observe(batch, kept, out),
            [self.worker.table.slots[q.slot] for q in batch.seqs],
        )

    def confirm_ahead(self, slots: Iterable[Slot]) -> None:
        """Confirm drafts that were made ahead: they continue the tokens that these slots have now."""
        drafter, known = self.drafter, [slot for slot in slots if slot.index not in self.lost_track]
        if isinstance(drafter, LookaheadDrafter) and known:
            self._or_lose_track(lambda: drafter.confirm_ahead(known), known)

    def take_faults(self) -> None:
        """Report guards that tripped while drafting. Wrong drafts cost their rows, but no text."""
        fault = self.worker.draft_faults.take()
        if fault is not None:
            self.stats.guard_trips += 1
            log.warning("while drafting: %s", fault.error(ALL_SLOTS))

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(
        self,
        slot: Slot,
        saved: object | None,
        *,
        grammar: str = "",
        text: TextToDraft | None = None,
        n_prompt: int = 0,
    ) -> None:
        """Seat a request in `slot`. saved: the drafter's share of the cached prefix. grammar: its source. text: for suffix drafts."""
        drafter = self.drafter
        self.suffixes.begin(slot, text)
        if drafter is not None:
            self._or_lose_track(lambda: drafter.begin(slot, saved), [slot])
        self.decay.begin(slot.index, n_prompt)
        self.controller.begin(slot.index, grammar)

    def checkpoint(self, slot: Slot) -> object | None:
        """The drafter's share of a checkpoint. The drafter may lose track of the slot here."""
        drafter = self.drafter
        return None if drafter is None else self._or_lose_track(lambda: drafter.checkpoint(slot), [slot])

    def end(self, slot: Slot) -> None:
        """End the slot's request."""
        drafter = self.drafter
        self.suffixes.end(slot)
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
        """Stop drafting for the requests in these slots; they leave no drafter state in the cache."""
        self.stats.guard_trips += 1
        log.warning(
            "no more drafts for the requests in slots %s: %s", [slot.index for slot in slots], error
        )
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
        """End the requests of these slots after a failed round. The drafter's state for them is unknown."""
        for slot in slots:
            self.end(slot)
        self.lost_track.clear()
        self.chosen = None

    def has_collapsed(self, job: Job) -> bool:
        """True once if a good drafter was bad for many requests, up to `job`."""
        return self.watch.add(sum(job.drafted), sum(job.accepted))


def _drafts_of(offer: Offer | SuffixDraft, n: int) -> Drafts:
    return Drafts(offer.tokens[:n], source=offer.source)


class AcceptanceWatch:
    """Detects over many requests that a good drafter's acceptance collapsed. It does not find the reason."""

    LEAST_DRAFTED = 8  # drafted tokens of a request that counts
    MANY = 24  # requests
    GOOD, COLLAPSED = 0.3, 0.25  # acceptance that counts as good; share of it that counts as collapsed

    def __init__(self) -> None:
        self.was = self.now = 0.0
        self.recent: deque[float] = deque(maxlen=self.MANY)

    def add(self, n_drafted: int, n_accepted: int) -> bool:
        """Add a finished request. Returns True once if the last MANY of them show a collapse."""
        if n_drafted < self.LEAST_DRAFTED:
            return False
        if len(self.recent) == self.MANY:  # a request that leaves the window counts into the past mean
            self.was += (self.recent[0] - self.was) * (1 / self.MANY if self.was else 1.0)
        self.recent.append(n_accepted / n_drafted)
        self.now = sum(self.recent) / len(self.recent)
        if len(self.recent) < self.MANY or self.was < self.GOOD or self.now > self.COLLAPSED * self.was:
            return False
        self.was = self.now  # so that the collapse is reported once
        return True
