"""Chooses how many tokens to draft: the number with the most expected tokens per second, from running measurements.

It estimates for each slot the chance that its first i drafts are right (`Acceptance`), and times (`Timer`): of a round by its rows, and of
a draft by its slots, or by its rows if it is a block. Each round it gives rows to slots in the order of their chance to survive, up to each
depth at which deeper drafts cost another pass or a longer block. The best ratio of expected tokens to expected time wins, which may be
no draft at all.
Where the drafter says how sure it is of each token (`Certainty`), blocks are drafted whole, and `cut` shares the rows again once they are
known: over all slots, those likeliest to be kept, while a row gives more than its time would give elsewhere.
A draft also reveals the level of its text. If that is unknown and worth knowing, the draft is credited with tokens, within a budget of
lost time. After many rounds without drafts some slots draft anyway, because the reasons against it may have gone: texts that ended, or
times that the warm-up took on a busy machine.

Times and the shares of acceptance levels belong to the engine and outlive requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyspec.draft.blocks import BlockLength
from pyspec.engine.policy.costs import N_SAMPLE, Costs
from pyspec.engine.policy.estimate import Acceptance, Certainty, Floats
from pyspec.engine.policy.rests import LIMIT, Account, DraftReading
from pyspec.slots.table import Slot

# Sources in brackets: least part of the tokens a millisecond of a recording with other values, by tools/replay.py (docs/log, 2026-11-28 and 29)
DECAY = 0.96  # per round, of the draft counts in /slots
MARGIN = 1.02  # a draft must promise this factor more than none [1.0: 0.98, 1.05: 0.96]
ASK_DRAFT = 2  # tokens of a draft that only probes [1 and 4: the same]
TRY_FIRST, TRY_LAST = (
    6,
    192,
)  # rounds without drafts until some slots try, doubled each time [first 3: 0.92, never: 0.99; tests/test_control_noise.py: offers are taken again]
TRY_FREE = 64  # a shorter wait need not have earned the cost of the try: after a busy start half of the costs are wrong [0: 0.99; the same test: a doubtful draft time]
TRY_SLOTS = 8  # one in this many slots tries [2 and 64: the same]
PLAIN_FIRST, PLAIN_LAST = (
    16,
    384,
)  # rounds until an undrafted one is timed again, doubled each time [first 4: 0.97, 64: 0.93, never: 0.86]
DOUBT_EVERY = 512  # rounds until times that were not used are in doubt [128 and never: the same; a machine that became slower is a test]
RETHINK = 16  # rounds for which a choice of no drafts stands if only measured times could change it [0: 0.998, and 0.2 ms of the host]
HORIZON = 3.0  # rounds for which knowing a text counts, as credit of a draft of an unknown text [0: 0.94, 1: 0.96, 10: 0.99]
NO_OFFERS: Mapping[int, Sequence[float]] = {}
OFFERED = -1  # in place of a position in a draft

# reasons of a slot without drafts, for `/slots`
MUTE = "none: drafts are switched off for the request"
NO_CAP = "none: the request is at its last token, or past the drafter's length"
NO_OFFER = "none: the last tokens stand nowhere before"
NO_DRAFTER = "none: no drafter is loaded"
FAILED = "none: the choice of drafts failed, as the log says"
LOST_TRACK = "none: the drafter failed at the request, as the log says"
UNREAD = "none: drafts have not paid for long, so the drafter does not read this request"


@dataclass(slots=True)
class Lane:
    """One slot's last decision, and the outcome of its drafts."""

    n_draft: int = 0
    reason: str = "not started"
    drafted: float = 0.0
    kept: float = 0.0

    @property
    def acceptance(self) -> float:
        """Share of the recent drafted tokens that were right; 0.0 if none was drafted."""
        return self.kept / self.drafted if self.drafted else 0.0


class DraftRows(NamedTuple):
    """Candidate rows: slot, position in the draft (OFFERED: needs no drafter), and chance to be right."""

    slot: NDArray[np.int64]
    place: NDArray[np.int64]
    gain: Floats

    def up_to(self, depth: int) -> DraftRows:
        mask = self.place < depth
        return self if mask.all() else DraftRows(self.slot[mask], self.place[mask], self.gain[mask])

    def best(self, busy: int, verify: Floats, draft: Floats, price: float = 0.0) -> Way:
        """Take the number of rows with most tokens per millisecond, or with most left once milliseconds are paid at `price` tokens each.

        verify: by extra rows, from one on; draft: by drafting slots, from none on
        """
        if not len(self.slot):
            return NO_WAY
        tokens = busy + self.gain.cumsum()
        ms = verify[: len(self.slot)] + draft[(self.place == 0).cumsum()]
        worth = tokens - price * ms if price else tokens / ms
        n = int(worth.argmax())
        return Way(
            float(worth[n]),
            float(tokens[n]),
            float(ms[n]),
            self.slot[: n + 1],
        )


class Way(NamedTuple):
    """A candidate choice: expected tokens per millisecond (or those left of a price), tokens, milliseconds, and each row's slot."""

    worth: float
    tokens: float
    ms: float
    slot: NDArray[np.int64]


NO_WAY = Way(float("-inf"), 0.0, 0.0, np.zeros(0, np.int64))


def more_rows(rows: DraftRows, busy: int) -> range:
    """Rows of verifies with one to all of the candidates."""
    return range(busy + 1, busy + 1 + len(rows.slot))


@dataclass
class Controller:
    """Chooses n_draft per slot and round.

    n_max    tokens of the longest draft of any source
    n_own    tokens of the drafter's longest; -1: n_max
    chained  drafting n tokens costs n passes; otherwise one pass for any n
    block    how long the drafter's blocks are; None: it drafts no blocks
    """

    n_slot: int
    n_max: int
    n_own: int = -1
    chained: bool = False
    block: BlockLength | None = None
    fixed: bool = False
    force: tuple[int, int] | None = None  # (slots that draft, tokens each), set by the warm-up
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self.n_own = self.n_max if self.n_own < 0 else self.n_own
        self.since_plain = self.n_round = 0
        self.ms = 0.0  # of all rounds
        self.asks = (
            Account()
        )  # of probing and trying: what they are expected to lose, and drafts to gain
        self.plain_in = PLAIN_FIRST  # drafting rounds until an undrafted one
        # round and caps of the last choice of no drafts, and its reason
        self._plain: tuple[int, list[tuple[int, int]], str] | None = None
        self.unread: set[int] = set()  # slots whose requests the drafter does not read
        self.mute: set[int] = set()  # slots whose requests forbid drafts
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Reset all but the measured times. At the end of a warm-up, keep only reliable times."""
        if self.force is not None:
            self.costs.end_warm_up()
        # rounds without drafts so far, and rounds until some slots try
        self.silent, self.try_in = 0, TRY_FIRST
        # slots whose try is not judged yet; tries that were right, less those that were not; the next choice tries again, whole
        self._tried_slots, self._n_right, self.again = set[int](), 0, False
        # round, slots and result of the last `_would_pay`
        self.reading, self._would = DraftReading(), (-RETHINK, 0, False)
        self.pays: bool | None = None  # this choice drafts to gain tokens; None: it says nothing of that
        self.texts = Acceptance(self.n_slot, self.n_own)
        self.beside = 0  # rows of prompts in the forward of the last choice
        self.certainty = Certainty(self.n_own)
        self.cut_account = Account(
            self.ms
        )  # of cutting drafts: its time, and what it is expected to gain
        self.cut_gain_ms = self.cut_unit = (
            0.0  # of the last cut: against no cut, and of a round without drafts
        )
        self.uncut: dict[int, int] = {}  # lengths that would be verified without a cut
        self.rate = 0.0  # tokens a millisecond that the last choice promised
        self.lanes = [Lane() for _ in range(self.n_slot)]
        self.force = self._plain = None
        self.offered: dict[int, Sequence[float]] = {}

    def give_up(self, reason: str) -> None:
        """A decision failed: nobody drafts until the next choice, and estimates start anew, because they may be the cause."""
        self.forget_acceptance()
        for lane in self.lanes:
            lane.reason = reason

    def begin(self, slot: int, grammar: str = "", *, may_draft: bool = True) -> None:
        """Start a request. Texts under a grammar have a prior of their own. may_draft: the request does not forbid it"""
        (self.mute.discard if may_draft else self.mute.add)(slot)
        self.texts.begin(slot, self.texts.of_grammar(grammar) if grammar else self.texts.free)
        self.lanes[slot] = Lane()
        self._plain = None

    def choose(
        self,
        caps: Sequence[tuple[int, int]],
        offers: Mapping[int, Sequence[float]] = NO_OFFERS,
        beside: int = 0,
    ) -> list[int]:
        """Choose n_draft for each decoding slot of this round. caps: (slot, most tokens that the drafter may draft).

        offers  by slot, drafts that need no drafter: the chance of each token to be reached and right. `offered` is then the set of slots
                that use their offer
        beside  rows of prompts in the same forward
        """
        self.beside = beside if self.costs.prompts.has_trusted else 0
        n_most = self.n_own if self.force is None else self.n_max
        own_caps = caps = [(slot, min(cap, n_most)) for slot, cap in caps]
        self.offered = self.preferred(caps, offers) if offers and self.force is None else {}
        if self.offered:
            caps = [(slot, len(self.offered.get(slot, range(cap)))) for slot, cap in caps]
        self.n_round, self.pays = self.n_round + 1, None
        # once awake, the drafter leaves only requests unread that forbid drafts
        rests = bool(self.unread) and self.reading.rests
        if self.n_round % DOUBT_EVERY == 0:
            self.costs.expire()
        if self.force is not None:
            live, n = self.force
            picked, why = [min(cap, n) if i < live else 0 for i, (_, cap) in enumerate(caps)], "warm-up"
        elif self.fixed or not (self.n_own or self.offered):
            picked = [cap for _, cap in caps]
            why = "fixed" if self.fixed else "no drafter"
        elif not self.beside and self._plain_is_stale(len(caps)):
            picked, why = [0] * len(caps), "measuring an undrafted round"
        else:
            picked, why = self._weigh(caps)
            own = any(n and slot not in self.offered for (slot, _), n in zip(caps, picked, strict=True))
            if rests and not (self.pays and own):
                self.pays = self._would_pay(caps)
            is_due = self.again or (
                self.silent >= self.try_in
                and (self.try_in < TRY_FREE or self._may_ask(self.costs.verify(len(caps))))
            )
            if is_due or (rests and self.reading.is_hopeful):
                tried = self._tried(own_caps, picked) if self.n_own else self._tried_offer(caps, picked)
                picked, why = tried, f"trying again after {self.silent} rounds without; {why}"
        for (slot, cap), n in zip(caps, picked, strict=True):
            lane = self.lanes[slot]
            lane.n_draft, lane.reason = n, why
            if not cap:
                unable = (
                    UNREAD
                    if slot in self.unread
                    else NO_CAP
                    if self.n_own
                    else NO_OFFER
                    if self.n_max
                    else NO_DRAFTER
                )
                lane.reason = MUTE if slot in self.mute else unable
            elif not n and any(picked):
                lane.reason = f"none: drafts of other slots are likelier to be right; {why}"
        if not self.beside:  # only rounds without prompts are timed
            self.since_plain = self.since_plain + 1 if any(picked) else 0
        offered = self.offered if self.n_own else ()
        asked = [slot for (slot, _), n in zip(caps, picked, strict=True) if n and slot not in offered]
        if rests and asked:
            plain, all_ = ([n] * len(caps) for n in (0, 1))
            self.reading.tries(asked, MARGIN * self._costs(caps, all_) / self._costs(caps, plain) - 1)
        may_ask = any(cap for _, cap in caps)
        self.silent = 0 if asked else self.silent + may_ask
        if self.pays is not None and (may_ask or rests) and self.n_own:
            self.reading.count(pays=self.pays and bool(asked or rests))
        return picked

    @property
    def cuts(self) -> bool:
        """It may choose among drafts that are known, and that pays."""
        self.cut_account.settle(self.ms)
        return self.force is None and not self.fixed and not self.cut_account.rests

    def whole(self, caps: Sequence[tuple[int, int]], picked: Sequence[int]) -> list[int]:
        """The same slots, with drafts as long as the drafter computes at that price, to be `cut`. A chain computes as many as the longest."""
        asked = [
            (slot, n)
            for (slot, _), n in zip(caps, picked, strict=True)
            if n and slot not in self.offered
        ]
        if not asked or not self.cuts:
            return list(picked)
        self.uncut = dict(asked)
        depth = max(n for _, n in asked)
        if not self.chained:
            depth = next((end for end in self._depths(len(asked)) if end >= depth), depth)
        return [
            min(cap, depth) if n and slot not in self.offered else n
            for (slot, cap), n in zip(caps, picked, strict=True)
        ]

    def cut(
        self, chosen: Sequence[tuple[int, int]], sure: Mapping[int, Sequence[float]]
    ) -> list[tuple[int, int]]:
        """Cut drafts by how sure the drafter is of them, over all slots. Their own cost is paid.

        chosen  (slot, drafted tokens)
        sure    by slot, the drafter's probability of each of them. Drafts of other slots stay
        """
        drafted = [(slot, n) for slot, n in chosen if n and slot in sure]
        self.certainty.learn_judged()
        if not drafted or not self.cuts:
            return list(chosen)
        believed = self.texts.survive([slot for slot, _ in drafted])
        survive = self.certainty.survive([(slot, sure[slot][:n]) for slot, n in drafted], believed)
        is_drafted = np.arange(survive.shape[1]) < np.array([n for _, n in drafted])[:, None]
        lane, gain = is_drafted.nonzero()[0], survive[is_drafted]
        order = (-gain).argsort(kind="stable")
        others = len(chosen) + sum(n for _, n in chosen) - len(gain)
        ms = self._forward_ms(range(others, others + len(gain) + 1))
        worth = np.append(0.0, gain[order].cumsum()) - self.rate * ms
        uncut = [min(self.uncut.get(slot, n), n) for slot, n in drafted]
        is_uncut = np.arange(survive.shape[1]) < np.array(uncut)[:, None]
        gain_now = float(worth.max() - (survive[is_uncut].sum() - self.rate * ms[sum(uncut)]))
        self.cut_gain_ms = max(gain_now, 0.0) / self.rate if self.rate > 0 else 0.0
        self.cut_unit = float(ms[0])
        kept = np.bincount(lane[order[: int(worth.argmax())]], minlength=len(drafted)).tolist()
        lengths = {slot: n for (slot, _), n in zip(drafted, kept, strict=True)}
        for slot, n in lengths.items():
            self.lanes[slot].n_draft = n
        return [(slot, lengths.get(slot, n)) for slot, n in chosen]

    def cut_took(self, ms: float) -> None:
        """The last cut took so many milliseconds. Where cuts promise less than twice of that, rounds do without for a time: the drafter takes
        time for probabilities, too."""
        self.cut_account.add(ms - self.cut_gain_ms / 2, self.cut_unit)

    def preferred(
        self, caps: Sequence[tuple[int, int]], offers: Mapping[int, Sequence[float]], gain: float = 1.0
    ) -> dict[int, Sequence[float]]:
        """The offers that promise more than the drafter. gain: factor of the tokens of a round that they promise at least."""
        asked = [(slot, cap) for slot, cap in caps if slot in offers]
        if not asked:
            return {}
        slots = [slot for slot, _ in asked]
        survive = self.texts.survive(slots) if self.n_own else np.zeros((len(slots), 0))
        return {
            slot: offers[slot]
            for (slot, cap), own in zip(asked, survive, strict=True)
            if 1 + sum(offers[slot]) >= gain * (1 + own[:cap].sum())
        }

    def would_take(
        self,
        caps: Sequence[tuple[int, int]],
        offers: Mapping[int, Sequence[float]],
        busy: int,
        gain: float,
    ) -> bool:
        """A round of `busy` slots would verify some of these offers: they are `preferred`, and their rows pay."""
        found = list(self.preferred(caps, offers, gain).values())
        if not found or self.fixed or self.force is not None:
            return bool(found)
        survive = -np.sort(-np.concatenate(found))
        ms = self.costs.verify.of_all(range(busy + 1, busy + 1 + len(survive)))
        plain = busy / self.costs.verify(busy)
        return bool(((busy + survive.cumsum()) / ms).max() > MARGIN * plain)

    def _weigh(self, caps: list[tuple[int, int]]) -> tuple[list[int], str]:
        """Choose by `_best`. A choice of no drafts stands for some rounds, because choosing takes time."""
        if self.beside:
            return self._best(caps)
        self.pays, last = False, None if self.offered else self._plain
        if last is not None and last[1] == caps and self.n_round - last[0] < RETHINK:
            return [0] * len(caps), last[2]
        picked, why = self._best(caps)
        self._plain = None if any(picked) or self.offered else (self.n_round, caps, why)
        return picked, why

    def _would_pay(self, caps: list[tuple[int, int]]) -> bool:
        """Drafts would promise more than none if the drafter read all requests, also those in their prompts: of unread texts the others tell."""
        whole = [(slot, cap) for slot, cap in caps if slot not in self.unread]
        whole += [(slot, 0 if slot in self.mute else self.n_own) for slot in sorted(self.unread)]
        (at, of, pays), busy = self._would, len(whole)
        if self.n_round - at >= RETHINK or abs(busy - of) > of // 8:
            offered, self.offered = self.offered, {}
            rows = self._rows(whole, np.zeros(busy))
            verify = self.costs.verify.of_all(more_rows(rows, busy))
            pays = self._best_way(rows, busy, verify).worth > MARGIN * busy / self.costs.verify(busy)
            self.offered, self._would = offered, (self.n_round, busy, pays)
        return pays

    def _plain_is_stale(self, busy: int) -> bool:
        if not self.costs.verify.knows(busy):
            return True
        if self.since_plain < self.plain_in:
            return False
        self.plain_in = min(2 * self.plain_in, PLAIN_LAST)
        return True

    def _may_ask(self, plain_ms: float) -> bool:
        """Drafts may cost time now to learn from them."""
        self.asks.settle(self.ms)
        return self.asks.debt < LIMIT * plain_ms

    def _tried(self, caps: Sequence[tuple[int, int]], picked: list[int]) -> list[int]:
        """Have some slots draft, others each time: texts or times may have changed. caps: the drafter's own, of all slots.

        The first try has few tokens. If they are right, then only times speak against drafts, maybe those of sizes that few tokens do not
        time: the next try is at once, and whole.
        """
        able = [i for i, (slot, cap) in enumerate(caps) if cap and slot not in self.unread]
        n_unread = sum(slot in self.unread for slot, _ in caps)
        tried, before = picked.copy(), self._costs(caps, picked)
        again, self.again = self.again, False
        most = 1 if self.chained else self.n_own if again else ASK_DRAFT
        slots = set[int]()
        for k in range(min(len(able), -(-(len(able) + n_unread) // TRY_SLOTS))):
            i = able[(self.n_round + k) % len(able)]
            tried[i] = min(caps[i][1], most)
            self.offered.pop(caps[i][0], None)
            slots.add(caps[i][0])
        self.asks.add(self._costs(caps, tried) - before, self.costs.verify(len(caps)))
        if able and not again:
            self.try_in = min(2 * self.try_in, TRY_LAST)
            self._tried_slots, self._n_right = slots, 0
        return tried

    def _tried_offer(self, caps: Sequence[tuple[int, int]], picked: list[int]) -> list[int]:
        """Have the likeliest offer verified, a few tokens of it, where there is no drafter: times may have changed."""
        best = max(range(len(caps)), key=lambda i: sum(self.offered.get(caps[i][0], ())))
        tried, before = picked.copy(), self._costs(caps, picked)
        tried[best] = min(caps[best][1], ASK_DRAFT)
        self.asks.add(self._costs(caps, tried) - before, self.costs.verify(len(caps)))
        self.try_in = min(2 * self.try_in, TRY_LAST)
        return tried

    def _costs(self, caps: Sequence[tuple[int, int]], picked: Sequence[int]) -> float:
        """Milliseconds of a round."""
        verify = self.costs.verify(len(picked) + sum(picked))
        asked = [n for (slot, _), n in zip(caps, picked, strict=True) if n and slot not in self.offered]
        return verify + float(self._draft_ms(len(picked), max(asked))[len(asked)] if asked else 0.0)

    def _draft_ms(self, busy: int, depth: int) -> Floats:
        """[1 + busy]: milliseconds of a draft of up to `depth` tokens, by drafting slots."""
        sizes = self.block.forward_rows(busy, depth) if self.block else range(1, busy + 1)
        return np.append(0.0, self.costs.draft.of_all(sizes) * (depth if self.chained else 1))

    def _depths(self, busy: int) -> Sequence[int]:
        """Depths at which drafting deeper costs more."""
        if self.chained:
            return range(1, self.n_own + 1) or (0,)
        return self.block.depths(busy, self.n_own) if self.block and self.n_own else (self.n_own,)

    def _best(self, caps: list[tuple[int, int]]) -> tuple[list[int], str]:
        """Give rows to slots in the order of their chance to survive, and take the most tokens a millisecond. A round that reads prompts, too,
        is as long as those: there a draft has to be worth its time at the rate of rounds without prompts."""
        busy = len(caps)
        plain_ms = self.costs.verify(busy)
        if not any(cap for _, cap in caps):
            return [0] * busy, "plain: no slot may draft"
        news = self._news(caps, busy / plain_ms)
        rows = self._rows(caps, news)
        verify = self.costs.verify.of_all(more_rows(rows, busy))
        if self.costs.verify.n(busy) < N_SAMPLE or self.since_plain >= PLAIN_FIRST:
            # fewer rows never take longer, so this was noise
            plain_ms = min(plain_ms, float(verify.min()))
        price = plain = busy / plain_ms
        best = self._best_way(rows, busy, verify)
        is_worth, where = best.worth > MARGIN * plain, ""
        if self.beside:
            price, where = MARGIN * max(best.worth, plain), f" beside {self.beside} rows of prompts"
            forward = self._forward_ms(range(busy, busy + 1 + len(rows.slot)))
            best, plain_ms = self._best_way(rows, busy, forward[1:], price), float(forward[0])
            is_worth = best.worth > busy - price * plain_ms
        self.rate = price
        if not is_worth:
            return [0] * busy, f"plain: no draft promises more than {1e3 * price:.0f} tok/s{where}"
        picked = np.bincount(best.slot, minlength=busy).tolist()
        tokens = best.tokens - news[np.unique(best.slot)].sum()
        saved = (tokens - busy) / price - (best.ms - plain_ms)
        if saved <= 0:  # it only probes
            self.asks.add(-saved, plain_ms)
            return [
                min(n, ASK_DRAFT) for n in picked
            ], f"probing texts: some would give more than {1e3 * price:.0f} tok/s{where}"
        self.pays = True
        if self.beside:
            return picked, f"worth their time{where}"
        self.rate = max(tokens / best.ms, plain)
        return picked, f"expects {1e3 * self.rate:.0f} tok/s, plain {1e3 * plain:.0f}"

    def _forward_ms(self, sizes: range) -> Floats:
        """Milliseconds of forwards with so many rows of decoding slots, beside the prompts of this round."""
        if not self.beside:
            return self.costs.verify.of_all(sizes)
        ends = [self.beside + n for n in (sizes.start, sizes.stop - 1)]
        ms = [max(self.costs.verify(n), self.costs.prompts(n)) for n in ends]
        return np.linspace(ms[0], ms[1], len(sizes))

    def _news(self, caps: Sequence[tuple[int, int]], rate: float) -> Floats:
        """The information in each slot's draft, in tokens; zero if probing has spent its budget. rate: of plain decoding."""
        busy = len(caps)
        if not self.n_own or not self._may_ask(busy / rate):
            return np.zeros(busy)
        each = rate / busy
        row = each * (self.costs.verify(busy * (1 + self.n_own)) - self.costs.verify(busy)) / self.n_own
        ends = self._depths(busy)
        draft = each * np.array(
            [self._draft_ms(busy, depth)[busy] for depth in (ends[:1] if self.chained else ends)]
        )
        costs = (row + draft[0], 0.0) if self.chained else (row, draft.repeat(np.diff(ends, prepend=0)))
        value = HORIZON * self.texts.value_of_information([slot for slot, _ in caps], *costs)
        return (
            np.where([slot in self.offered for slot, _ in caps], 0.0, value) if self.offered else value
        )

    def _rows(self, caps: Sequence[tuple[int, int]], news: Floats) -> DraftRows:
        """Candidate rows, likeliest first, ties by slot. news: the information in each slot's first draft, in tokens."""
        survive = self.texts.survive([slot for slot, _ in caps])
        survive[:, :1] += news[:, None]
        if self.offered:  # they may be longer than the drafter's
            survive = np.pad(survive, ((0, 0), (0, self.n_max - self.n_own)))
        asked = np.arange(survive.shape[1]) < np.array([cap for _, cap in caps])[:, None]
        needs_drafter = np.ones(len(caps), bool)
        for i in [i for i, (slot, _) in enumerate(caps) if slot in self.offered] if self.offered else ():
            offer = self.offered[caps[i][0]]
            survive[i, : len(offer)] = offer
            needs_drafter[i] = False
        slot, place = asked.nonzero()
        gain = survive[asked]
        order = (-gain).argsort(kind="stable")
        slot, place = slot[order], place[order]
        if self.offered:
            place = np.where(needs_drafter[slot], place, OFFERED)
        return DraftRows(slot, place, gain[order])

    def _best_way(self, rows: DraftRows, busy: int, verify: Floats, price: float = 0.0) -> Way:
        """The best choice over all depths, each of which takes one more pass or a longer block for all slots. price: as in `DraftRows.best`."""
        if not len(rows.slot):  # no slot may draft
            return NO_WAY
        ways = [
            rows.up_to(depth).best(busy, verify, self._draft_ms(busy, depth), price)
            for depth in self._depths(busy)
        ]
        return max(ways, key=lambda way: way.worth)

    def record(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Record the verdict on one slot's draft."""
        lane, beyond = self.lanes[slot], self.certainty.judge(slot, n_draft, n_accepted)
        self.texts.add(slot, n_draft, n_accepted, beyond)
        if n_draft:
            if slot in self._tried_slots:
                self._tried_slots.discard(slot)
                self._n_right += 1 if n_accepted == n_draft else -1
                self.again = not self._tried_slots and self._n_right > 0
            self.reading.judge(slot, n_accepted)
            self._plain = None
            lane.drafted, lane.kept = DECAY * lane.drafted + n_draft, DECAY * lane.kept + n_accepted

    def found_none(self, slot: int) -> None:
        """The drafter was asked and had no draft for the slot: it took its time, and gave as much as a wrong token."""
        self.texts.add(slot, 1, 0)
        self._plain = None

    def timed(self, rows: int, verify_ms: float, live: int, passes: int, draft_ms: float) -> None:
        """Record the times of a round with decoding slots only."""
        self.ms += verify_ms + draft_ms
        self.costs.verify.add(rows, verify_ms)
        if live and self.n_own:
            passes = min(passes, self.n_own)  # a warm-up pads drafts
            size = self.block.forward_rows(live, passes)[-1] if self.block else live
            self.costs.draft.add(size, draft_ms / (max(passes, 1) if self.chained else 1))

    def timed_beside(self, ms: float) -> None:
        """Record the time of a round that read prompts, too, or recorded its forwards."""
        self.ms += ms

    def drafts_of(self, slot: Slot | None) -> int:
        """Tokens of a slot's last draft."""
        return 0 if slot is None else self.lanes[slot.index].n_draft
