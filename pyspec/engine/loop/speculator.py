"""Speculation's side of the loop: draft lengths, drafts, and failures of a drafter.

A drafter can cost drafts, but no text and no request. If it misses a slot's tokens, it has lost track of the slot: it drafts no
more for that request, and the request leaves no drafter state in the cache. The same holds for decisions of `engine/policy`: the loop
asks for every one through `Speculator.decide`, and one that fails means a round without drafts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

from pyspec.constrain.constraint import Constraint
from pyspec.constrain.phrases import Offer
from pyspec.cuda.faults import ALL_SLOTS
from pyspec.device.worker import Launched, Worker, is_device_error
from pyspec.draft.drafter import Drafter, DraftPlan
from pyspec.draft.suffix_draft import NO_DRAFT as NO_SUFFIX_DRAFT
from pyspec.draft.suffix_draft import SuffixDraft
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.read_slots import ReadSlots
from pyspec.engine.loop.round import pauses
from pyspec.engine.loop.stats import Stats
from pyspec.engine.loop.suffix_source import SuffixSource, TextToDraft
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import (
    FAILED,
    Prompt,
    PromptRules,
    RoundPlan,
    RoundState,
    window,
    would_take,
)
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.sample.draft_draws import draft_draw
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import NO_DRAFTS, DraftDraw, DraftRequest, Drafts
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

T = TypeVar("T")

WORTH_READING = (
    1.1  # factor of a round's tokens that an offer must promise, if the next round waits for it
)
LIKELY = 0.5  # least chance of a token behind a refused one to be worth its row


class Speculator:
    """Asks the worker's drafter for the drafts that the controller chose, and keeps its failures from the loop. clock: seconds"""

    def __init__(
        self,
        worker: Worker,
        controller: Controller,
        stats: Stats,
        suffixes: SuffixDrafts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.worker, self.controller, self.stats = worker, controller, stats
        self.suffixes = SuffixSource(suffixes, has_device=worker.device.type != "cpu")
        self.read = ReadSlots(worker, controller)
        self.waits_for_offers = False  # offered drafts are not verified yet
        self.lost_track: set[int] = set()  # slots whose drafter state is not trusted
        self.planned: RoundPlan | None = None  # of the next round, if it is planned already
        self.asked: list[
            int
        ] = []  # tokens of this round's drafts, before they were cut; none if they were not
        self.n_trained = worker.plan.n_trained
        self.offers: dict[int, Offer | SuffixDraft] = {}  # by slot, drafts that need no drafter
        self.refused: dict[
            int, int
        ] = {}  # by slot, the index of the drafted token that its grammar refused
        self.found_none: set[int] = set()  # slots for which a drafter on the host found nothing
        self.beside: float | None = None  # milliseconds of suffix drafts while the device ran
        self.failed: set[tuple[str, str]] = (
            set()
        )  # decisions that failed, each with the kind of its error
        self.raises_bugs = False  # raise unexpected exceptions of a drafter

    @property
    def drafter(self) -> Drafter | None:
        return self.worker.drafter

    @property
    def windowed(self) -> Drafter | None:
        """The drafter, if it has windows."""
        drafter = self.drafter
        return drafter if drafter is not None and drafter.has_windows else None

    @property
    def draft_plan(self) -> DraftPlan:
        return self.worker.plan

    def follows(self, index: int) -> bool:
        """The drafter knows the tokens of the request in this slot."""
        return index not in self.lost_track and index not in self.read.unread

    def decide(self, what: str, do: Callable[[], T], otherwise: T, *, is_of_one: bool = False) -> T:
        """Returns what `do` decides, or `otherwise` if it fails. A failure costs a round's drafts, but no request, and is logged once.

        what: names the decision in the log. is_of_one: it is about one request's grammar, and what is chosen for others stands
        """
        try:
            return do()
        except Exception as e:
            if is_device_error(e):
                raise
            self.stats.guard_trips += 1
            if (what, type(e).__name__) not in self.failed:
                self.failed.add((what, type(e).__name__))
                log.exception("%s failed, so the round has no drafts; later ones are not logged", what)
            if not is_of_one:
                self.controller.give_up(FAILED)
                self.offers, self.refused, self.found_none = {}, {}, set()
                self.planned, self.asked, self.waits_for_offers = None, [], False
        return otherwise

    # -- before a verify -----------------------------------------------------------------------------------------

    def state(
        self,
        decoding: Sequence[Job],
        reading: Sequence[Job] = (),
        *,
        now: float = 0.0,
        taken: Sequence[int] = (),
        look: Callable[[], Mapping[int, Sequence[float]]] = dict,
        n_under_way: int = 0,
    ) -> RoundState:
        """What the plan of a round knows. now: seconds, of the loop's clock; taken: of each decoding job, most tokens in flight; look: looks for
        offers, if any may be verified; n_under_way: tokens of the prompt that is read by itself now"""
        under_way, rules = taken or [0] * len(decoding), self.controller.rules
        slots = [job.slot for job in decoding if job.slot is not None]
        caps = [(s.index, self.most(j, n)) for s, j, n in zip(slots, decoding, under_way, strict=True)]
        windowed = [slot for slot in slots if self.windowed is not None and self.follows(slot.index)]
        return RoundState(
            self.controller,
            caps,
            [_prompt(job, rules) for job in reading],
            look,
            now,
            rules.graph_of(n_under_way) or 0,
            self.draft_plan.tells and not taken,
            [slot.index for slot in self.worker.table.slots if slot.busy] if self.read.unread else (),
            self.lost_track,
            {slot.index: slot.n_past for slot in windowed},
            self.n_trained,
        )

    def take(self, state: RoundState, made: RoundPlan) -> None:
        """The next round does this: the drafter joins requests, its windows are set, and the controller counts."""
        self.controller.take(state, made)
        slots, drafter = self.worker.table.slots, self.windowed
        for slot in [slots[index] for index in made.joins]:
            self._or_lose_track(partial(self.read.join, slot), [slot])
        if drafter is not None:
            for index, n in made.windows.items():
                drafter.set_window(slots[index], n)

    def plan_ahead(self, jobs: Sequence[Job], taken: Sequence[int]) -> list[int]:
        """Plan a round that is launched before the one in flight is read, and return the lengths of its drafts. No grammar offers drafts behind
        those. taken: as in `state`"""

        def planned() -> RoundPlan:
            state = self.state(jobs, taken=taken)
            made = self.controller.plan(state)
            self.take(state, made)
            return made

        self.planned = self.decide("the plan of a round", planned, self._no_drafts(jobs))
        return [n for _, n in self.planned.drafts]

    def plan(self, jobs: Sequence[Job], now: float) -> tuple[RoundPlan, list[Job]]:
        """Plan the next round, and return the jobs that take part. now: as in `state`"""
        decoding = [job for job in jobs if job.is_decoding]
        otherwise = self._no_drafts(decoding), list(jobs)
        return self.decide("the plan of a round", lambda: self._plan(jobs, decoding, now), otherwise)

    def _plan(
        self, jobs: Sequence[Job], decoding: Sequence[Job], now: float
    ) -> tuple[RoundPlan, list[Job]]:
        reading = [job for job in jobs if not job.is_decoding]
        made, self.planned, began, ms = self.planned, None, self.clock(), None
        self.refused.clear()

        @cache
        def look() -> Mapping[int, Sequence[float]]:
            nonlocal ms
            held = [job for job in decoding if job.constraint is not None]
            ms = self._collect_offers(decoding if self.suffixes.is_on else held)
            return {slot: offer.survival for slot, offer in self.offers.items()}

        slots = [job.slot.index for job in decoding if job.slot is not None]
        if made is None or reading or [slot for slot, _ in made.drafts] != slots or look():
            state = self.state(decoding, reading, now=now, look=look)
            made = self.controller.plan(state)
            self.take(state, made)
        self.controller.n_paused = len(made.paused)
        if made.alone is not None:
            return made, [reading[made.alone]]
        used = [slot for slot, n in made.drafts if n and slot in made.offered]
        for slot in used:
            lane = self.controller.lanes[slot]
            lane.reason = f"{self.offers[slot].source} draft; {lane.reason}"
        self.waits_for_offers = bool(used) or any(
            isinstance(self.offers[slot], Offer) for slot in made.offered
        )
        if ms is not None:  # a drafter needs a plan, too
            all_ms = ms if self.controller.n_own else 1e3 * (self.clock() - began)
            self.controller.looked_up(all_ms, len(decoding))
        paused = {reading[i].id for i in made.paused}
        return made, [job for job in jobs if job.id not in paused] if paused else list(jobs)

    def _no_drafts(self, jobs: Sequence[Job]) -> RoundPlan:
        """All together, and no drafts."""
        none = [(job.slot.index, 0) for job in jobs if job.slot is not None]
        return RoundPlan(drafts=none, asked=none, rows=self.controller.rules.most)

    def window(self, slot: Slot) -> int:
        """Last tokens of the slot's text that its drafts see; 0: all."""
        return 0 if self.windowed is None else window(slot.n_past, self.n_trained)

    def most(self, job: Job, taken: int) -> int:
        """Most tokens that the drafter may draft."""
        if job.slot is not None and not (self.follows(job.slot.index) and self.read.may_draft(job.slot)):
            return 0
        n_most = self.draft_plan.n_draft if self.controller.force is None else self.controller.n_max
        if job.slot is not None and self.draft_plan.n_ctx:
            n_most = max(0, min(n_most, self.draft_plan.n_ctx - job.slot.n_past - taken))
        return min(n_most, self._most_offered(job, taken))

    def _most_offered(self, job: Job, taken: int = 0) -> int:
        """Most tokens worth drafting: one less than the request may still emit, because the bonus token needs no draft."""
        asked, most = job.request.n_draft_max, self.controller.n_max
        return max(0, min(most, job.n_left - taken - 1, most if asked is None else asked))

    def draft(self, jobs: Sequence[Job], made: RoundPlan) -> dict[int, Drafts]:
        """Draft for these decoding jobs as planned, by slot. A failure costs only this round's drafts."""
        chosen = made.asked
        offers = [(slot, n, self.offers[slot]) for slot, n in chosen if slot in made.offered]
        found = {slot: Drafts(o.tokens[:n], source=o.source) for slot, n, o in offers}
        asked = [(slot, 0 if slot in found else n) for slot, n in chosen]
        found |= self._ask(jobs, asked)
        return self.decide("the cut of drafts", lambda: self._trim(jobs, chosen, asked, found), {})

    def _trim(
        self,
        jobs: Sequence[Job],
        chosen: list[tuple[int, int]],
        asked: Sequence[tuple[int, int]],
        found: dict[int, Drafts],
    ) -> dict[int, Drafts]:
        """Cut drafts where their drafter is unsure, or a grammar refuses them. asked: lengths that the drafter was asked for."""
        chosen = self._cut(chosen, found)
        if self.drafter is not None and self.drafter.on_host:
            self.asked = [n for _, n in asked if n]
            self.found_none = {slot for slot, n in asked if n and not found.get(slot, NO_DRAFTS).tokens}
        for job in (job for job in jobs if job.constraint is not None):
            fit = partial(self._fit, job, dict(chosen), found)
            self.decide("a grammar's cut of a draft", fit, None, is_of_one=True)
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
        none: list[DraftRequest] = []
        ask = partial(self._requests, jobs, chosen)
        if not (asks := self.decide("the requests to the drafter", ask, none)):
            return {}

        def by_slot() -> dict[int, Drafts]:
            found = zip(asks, drafter.draft(asks), strict=True)
            return {ask.slot.index: drafts.first(ask.n_draft) for ask, drafts in found if ask.n_draft}

        return self._or_lose_track(by_slot, [ask.slot for ask in asks], is_draft=True) or {}

    def _requests(self, jobs: Sequence[Job], chosen: Sequence[tuple[int, int]]) -> list[DraftRequest]:
        """What the drafter is asked for, of every slot that it follows."""
        return [
            DraftRequest(
                job.slot,
                job.anchor,
                min(n, self.draft_plan.n_draft),
                self.controller.cuts,
                self._draw(job) if n else None,
            )
            for job, (slot, n) in zip(jobs, chosen, strict=True)
            if job.slot is not None and job.anchor is not None and self.follows(slot)
        ]

    def _cut(self, chosen: list[tuple[int, int]], found: dict[int, Drafts]) -> list[tuple[int, int]]:
        """Cut drafts whose drafter tells how sure it is; the lengths of all then."""
        sure = {slot: drafts.sure for slot, drafts in found.items() if drafts.sure is not None}
        self.asked = [n for slot, n in chosen if slot in sure]
        if not sure:
            return chosen
        drafted = [(slot, len(found.get(slot, NO_DRAFTS).tokens)) for slot, _ in chosen]
        began = self.clock()
        kept = dict(self.controller.cut(drafted, sure))
        self.controller.cut_took(1e3 * (self.clock() - began))
        for slot in sure:
            found[slot] = found[slot].first(kept[slot])
        return [(slot, kept[slot] if slot in sure else n) for slot, n in chosen]

    def _draw(self, job: Job) -> DraftDraw | None:
        held = job.constraint is not None
        return draft_draw(job.sampler, self.draft_plan.draws, self.draft_plan.n_draft, is_held=held)

    def _collect_offers(self, jobs: Sequence[Job]) -> float | None:
        """Returns the milliseconds of looking up earlier text; None: nothing was looked up."""
        found, ms = self._find_offers(jobs)
        self.offers = {slot: offer for slot, offer in found.items() if offer.tokens}
        return ms

    @property
    def looks_up(self) -> bool:
        """Texts are looked up for suffix drafts this round."""
        return self.suffixes.is_on and self.controller.force is None and self.controller.looks_up

    def _find_offers(self, jobs: Sequence[Job]) -> tuple[dict[int, Offer | SuffixDraft], float | None]:
        """What each request's grammar or an earlier text offers, whichever promises more, by slot. Also the milliseconds of looking up earlier
        text; None: nothing was looked up."""
        drafts: dict[int, SuffixDraft] = {}
        wishes, slots, held, ms = [], [], [], None
        looks_up = self.looks_up
        for job in jobs:
            slot = job.slot
            if slot is None:
                continue
            if job.constraint is not None:
                held.append((job, slot.index, job.constraint))
            if looks_up and job.anchor is not None:
                wishes.append((slot, job.anchor, self._most_offered(job)))
                slots.append(slot.index)
        if wishes:
            began = self.clock()
            drafts = dict(zip(slots, self.suffixes.draft_all(wishes), strict=True))
            ms = 1e3 * (self.clock() - began)
        found: dict[int, Offer | SuffixDraft] = {**drafts}
        for job, index, constraint in held:
            if not (most := self._most_offered(job)):
                continue
            best = partial(_better, constraint, most, drafts.get(index, NO_SUFFIX_DRAFT))
            none: Offer | SuffixDraft = NO_SUFFIX_DRAFT
            found[index] = self.decide("a grammar's offer", best, none, is_of_one=True)
        return found, ms

    def has_offers(self, jobs: Iterable[Job]) -> bool:
        """A grammar or an earlier text offers one of the jobs likely tokens, more than the drafter promises, or has offered some that are not verified yet."""
        return self.waits_for_offers or self.decide(
            "the look for offers", lambda: self._has_offers(jobs), False
        )

    def _has_offers(self, jobs: Iterable[Job]) -> bool:
        jobs, looks_up = list(jobs), self.looks_up
        asked = [job for job in jobs if looks_up or job.constraint is not None]
        if not asked:
            return False
        found, self.beside = self._find_offers(asked)
        likely = {slot: each for slot, each in found.items() if each.chance_of_first >= LIKELY}
        if not likely:
            return False
        slots = ((job.slot.index, job) for job in asked if job.slot is not None)
        caps = [(slot, self.most(job, 0)) for slot, job in slots if slot in likely]
        offers = {slot: each.survival for slot, each in likely.items()}
        gain = WORTH_READING if self.suffixes.is_on else 1.0
        return would_take(self.controller, caps, offers, len(jobs), gain)

    def count_beside(self, launched: Launched, busy: int) -> None:
        """Count the time of suffix drafts beside this forward, unless the device still runs it: then no one waited."""
        beside, self.beside = self.beside, None
        if beside is not None and launched.is_over:
            self.decide("the host's account", lambda: self.controller.looked_up(beside, busy), None)

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
        self.decide("a verdict", lambda: self._judge(slot, n_draft, n_accepted), None)

    def _judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        if slot in self.controller.offered:
            offer = self.offers[slot]
            if isinstance(offer, Offer):
                offer.judge(n_draft, n_accepted)
            else:
                self.suffixes.judge(slot, n_draft, n_accepted)
                self.controller.record_offer(slot, n_draft, n_accepted)
            return
        if slot in self.found_none:
            self.found_none.discard(slot)
            self.controller.found_none(slot)
            return
        n = self.refused.pop(slot, None)
        if n is not None:  # the refused token is wrong, and so is every token behind it
            n_draft, n_accepted = n + 1, min(n, n_accepted)
        self.controller.record(slot, n_draft, n_accepted)

    # -- after a verify ------------------------------------------------------------------------------------------

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        """Report accepted rows to the drafter, before the slots' tokens grow. If this fails, its state for these slots is unknown."""
        drafter, busy = self.drafter, len(batch.seqs)
        self.decide("the host's account", lambda: self._enter_texts(batch.n_row, busy), None)
        known = [i for i, seq in enumerate(batch.seqs) if self.follows(seq.slot) and kept[i]]
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
        self.read.observed(batch.seqs)

    def _enter_texts(self, n_row: int, busy: int) -> None:
        """Enter a part of the texts that wait for suffix drafts, unless those rest."""
        if self.suffixes.has_rest and self.controller.looks_up:
            began = self.clock()
            self.suffixes.observe(n_row)
            self.controller.looked_up(1e3 * (self.clock() - began), busy)

    def enter_piece(self) -> bool:
        """Enter a piece of a text while the device runs. False if none waits, or suffix drafts rest."""
        return self.controller.looks_up and self.suffixes.enter_piece()

    def confirm_ahead(self, slots: Iterable[Slot]) -> None:
        """Confirm drafts that were made ahead: they continue the tokens that these slots have now."""
        drafter, known = self.drafter, [slot for slot in slots if self.follows(slot.index)]
        if drafter is not None and drafter.runs_ahead and known:
            self._or_lose_track(lambda: drafter.confirm_ahead(known), known)

    def launched(self, launch: Callable[[], Launched | None]) -> Launched | None:
        """A round that is launched behind another one. None if a slot is at fault: the round that the host starts raises it again, and blames the
        right request."""
        fetched = self.worker.draft_faults.fetched
        n_fetched = len(fetched)
        try:
            return launch()
        except SlotError:
            while len(fetched) > n_fetched:
                fetched.pop()
            return None

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
        n_unread: int = 0,
        may_draft: bool = True,
    ) -> None:
        """Seat a request in `slot`. saved: the drafter's share of the cached prefix. grammar: its source. text: for suffix drafts.
        n_unread: tokens up to which the drafter has not read that prefix. may_draft: the request does not forbid drafts"""
        self.suffixes.begin(slot, text)
        if self.drafter is not None:
            self._or_lose_track(lambda: self.read.begin(slot, saved, n_unread), [slot])

        begin = partial(self.controller.begin, slot.index, grammar, may_draft=may_draft)
        self.decide("a request's start", begin, None)

    def checkpoint(self, slot: Slot) -> object | None:
        """The drafter's share of a checkpoint. The drafter may lose track of the slot here."""
        drafter = self.drafter
        if drafter is None or slot.index in self.read.unread:
            return None
        return self._or_lose_track(lambda: drafter.checkpoint(slot), [slot])

    def filed(self, slot: Slot) -> None:
        """The slot reads pages of other requests from now on, where they have the same tokens."""
        self._or_lose_track(lambda: self.read.filed(slot), [slot])

    def end(self, slot: Slot) -> None:
        """End the slot's request."""
        drafter = self.drafter
        self.suffixes.end(slot)
        if drafter is not None and self.follows(slot.index):
            self._or_lose_track(lambda: drafter.end(slot), [slot])
        self.lost_track.discard(slot.index)
        self.read.end(slot)

    def _or_lose_track(
        self, do: Callable[[], T], slots: Sequence[Slot], *, is_draft: bool = False
    ) -> T | None:
        """Call the drafter; None if it fails, and its state for these slots is unknown then. is_draft: a SlotError leaves that valid"""
        try:
            return do()
        except Exception as e:
            is_refusal = isinstance(e, SlotError)
            if is_device_error(e) or (self.raises_bugs and not is_refusal):
                raise
            if is_refusal and is_draft:
                self.stats.guard_trips += 1
                log.warning("no drafts this round: %s", e)
                return None
            if not is_refusal:
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
        self.planned = None


def _better(constraint: Constraint, most: int, offer: SuffixDraft) -> Offer | SuffixDraft:
    """A grammar's own offer of up to `most` tokens, or the part of a suffix draft that it accepts, whichever promises more."""
    if offer.tokens:
        offer = offer.first(len(constraint.usable(offer.tokens)))
    own = constraint.offer(most)
    return own if sum(own.survival) >= offer.expected else offer


def _prompt(job: Job, rules: PromptRules) -> Prompt:
    """A request that is read, as plans see it."""
    is_taken = job.is_unread and (rules.graphs_see or not job.images)
    graph = rules.graph_of(job.n_prefill) if is_taken else None
    return Prompt(job.todo[0], graph or 0, job.started, pauses(job, rules))
