"""Everything that rounds have taught: the chance of drafts, the cost of work, and debts. `plan.py` decides by it.

Times and the shares of acceptance levels belong to the engine and outlive requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspec.draft.blocks import BlockLength
from pyspec.engine.policy.costs import LEAST, LIMIT, MOST_DEBT, Account, Costs, is_time
from pyspec.engine.policy.estimate import Acceptance
from pyspec.engine.policy.plan import (
    ONE_IN,
    PAUSE_MS,
    RETHINK,
    PromptRules,
    RoundPlan,
    RoundState,
    cut,
    plan,
)
from pyspec.engine.policy.row_costs import RoundExperts, RowCosts

# Sources in brackets: least part of the tokens a millisecond of a recording with other values, by tools/replay.py (docs/log, 2026-11-28 and 29)
DECAY = 0.96  # per round, of the draft counts in /slots and of the mean of tokens: chosen
# rounds without drafts until some slots try, doubled each time [first 3: 0.92, never: 0.99; tests/test_control_noise.py: offers are taken again].
# The last is also the longest wait for an undrafted round, and half of the rounds until times that were not used are in doubt [384: the same]
TRY_FIRST, TRY_LAST = 6, 192
# A drafter that rests: 0.991 of a server without a drafter at 64 streams and 1.2 tokens a round on a card, 0.967 without it; 0.98 is promised.
# In brackets: rounds until drafts come back to 64 slots of tests/engine/test_reading.py, with other values; now 218
REST_AFTER = 128  # choices without a draft that pays until new requests are not read; 0: all requests are read, always [32: 130, 512: 218]
AWAKE = 4.0  # paying choices until all are read again; each other choice takes 1 / AWAKE from their number [1: 215, 16: 230]


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


class DraftReading:
    """Whether the drafter reads new requests. It rests while drafts do not pay.

    A drafter that pairs tokens with the target's hidden states reads every token of a request, prompt and answer, whether it drafts or not:
    with many streams a percent of the time or more. Where no draft has paid for long, that is given away. So it then reads a few requests,
    whose drafts tell when texts or the load have changed, and no others. As soon as drafts pay again it reads all new requests, and the rest
    of those that run.

    n_idle  choices since drafts paid last
    """

    def __init__(self) -> None:
        self.n_idle = 0
        self._paid = AWAKE
        self._tried: set[int] = set()  # slots whose drafts are not judged yet
        self._missing = 0.0  # right drafts that the last ones lack to promise more than none

    def count(self, *, pays: bool) -> None:
        """The controller has chosen for slots that may draft. pays: it drafts because that promises more tokens, and not to learn."""
        self._paid = min(AWAKE, self._paid + 1.0) if pays else max(0.0, self._paid - 1 / AWAKE)
        self.n_idle = 0 if pays and self._paid >= AWAKE else self.n_idle + 1

    @property
    def rests(self) -> bool:
        return 0 < REST_AFTER <= self.n_idle

    def wants(self, n_read: int, n_busy: int) -> bool:
        """Whether the drafter reads one more request, beside `n_busy` others, `n_read` of which it reads."""
        n_least = max(ONE_IN // 2, -(-(n_busy + 1) // ONE_IN))
        return not self.rests or n_busy < ONE_IN or n_read < n_least

    def tries(self, slots: Sequence[int], least: float) -> None:
        """These slots draft, to learn or to gain. It would pay in all slots if this share of the first tokens were right."""
        self._tried, self._missing = set(slots), least * len(slots)

    def judge(self, slot: int, n_right: int) -> None:
        """The verdict on a slot's draft."""
        if slot in self._tried:
            self._tried.discard(slot)
            self._missing -= n_right > 0

    @property
    def is_hopeful(self) -> bool:
        """The last drafts went as if they paid: others at once tell whether texts have changed."""
        return self._missing < 0 and not self._tried


@dataclass
class Controller:
    """Learns from rounds, and takes the plans that are used.

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
    rules: PromptRules = field(default_factory=PromptRules)

    def __post_init__(self) -> None:
        self.n_own = self.n_max if self.n_own < 0 else self.n_own
        self.since_plain = self.n_round = self.n_alone = 0
        self.plain_in = RETHINK  # drafting rounds until an undrafted one
        # what is expected to be lost to learn, and what was lost to cuts and to look-ups of the host
        self.asks, self.cut_account, self.host = Account(), Account(), Account()
        self.unread: set[int] = set()  # slots whose requests the drafter does not read
        self.mute: set[int] = set()  # slots whose requests forbid drafts
        # milliseconds: due to the decoding slots before the next chunk of a long prompt, and of the last chunk beyond a round of theirs
        self.owed = self.chunk_ms = 0.0
        self.n_paused = 0  # prompts that wait for that
        self.rested = 0.0  # ms that others have waited for lone prompts, since the last round for all
        self.balance = 0.0  # milliseconds that decoding slots have left of the operator's target, by all rounds so far
        self.tokens = 1.0  # of a slot, in the mean of rounds
        self.rows = RowCosts(self.n_slot, 1 + self.n_max)
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Reset all but the measured times. At the end of a warm-up, keep only reliable times."""
        if self.force is not None:
            self.costs.end_warm_up()
        # rounds without drafts so far, and rounds until some slots try
        self.silent, self.try_in = 0, TRY_FIRST
        # the last try, as in `RoundPlan`, and its slots that are not judged yet; tries that were right, less those that were not, or right tokens
        # beyond those that are enough; slots of the next choice, which tries again, whole
        self.tries, self.tried, self.n_right, self.again = dict[int, float](), set[int](), 0.0, 0
        self.reading = DraftReading()
        self.texts = Acceptance(self.n_slot, self.n_own)
        self.rows.forget()
        self.cut_account, self.host = Account(), Account()
        self.uncut: dict[int, int] = {}  # lengths that would be verified without a cut
        # of the last cut: what it saved, and a round without drafts; 0.0: there was none
        self.cut_gain_ms = self.cut_unit = 0.0
        # of the last plan: tokens a millisecond, rows of prompts, a choice of no drafts, and whether drafts would pay
        self.rate, self.beside = 0.0, 0
        self.stands: tuple[int, list[tuple[int, int]], str] | None = None
        self.would = -RETHINK, 0, False
        self.lanes = [Lane() for _ in range(self.n_slot)]
        self.force = None
        self.offered: Mapping[int, Sequence[float]] = {}
        # of these: tokens that the drafter would have given, and milliseconds of a token of a plain round, of a row, and of such a round
        self.instead: dict[int, float] = {}
        self.offer_ms = 0.0, 0.0, 0.0

    def give_up(self, reason: str) -> None:
        """A decision failed: nobody drafts until the next choice, and estimates start anew, because they may be the cause."""
        self.forget_acceptance()
        for lane in self.lanes:
            lane.reason = reason

    # -- plans -----------------------------------------------------------------------------------------------------

    def plan(self, state: RoundState) -> RoundPlan:
        """What the next round does. `take` the plan that is used."""
        if self.rows.is_known:
            self.costs.verify.shift = self.rows.ms([slot for slot, _ in state.decoding])[1]
        return plan(state)

    def take(self, state: RoundState, made: RoundPlan) -> None:
        """The next round does this."""
        n_decoding = len(state.decoding)
        self.n_alone += made.is_faster_alone
        most = self.chunk_ms * n_decoding / self.rules.weight if self.rules.weight else 0.0
        self.owed = min(self.owed, most)
        if made.alone is not None or not n_decoding:
            return
        self.n_round += 1
        if self.n_round % (2 * TRY_LAST) == 0:
            self.costs.expire()
        self.rate, self.beside, self.stands, self.would = made.rate, made.beside, made.stands, made.would
        for ms, unit in made.owes:
            self.asks.add(ms, unit)
        for slot, n in made.drafts:
            self.lanes[slot].n_draft, self.lanes[slot].reason = n, made.reasons[slot]
        if made.kind == "measure" and self.costs.verify.knows(n_decoding):
            self.plain_in = min(2 * self.plain_in, TRY_LAST)
        elif made.kind == "try":
            self.try_in = min(2 * self.try_in, TRY_LAST)
        if made.tried or made.pays:
            self.tries, self.tried, self.n_right, self.again = made.tried, set(made.tried), 0.0, 0
        if made.asked is not made.drafts:
            self.uncut = {slot: n for slot, n in made.drafts if n and slot not in made.offered}
        if not made.beside:  # only rounds without prompts are timed
            self.since_plain = self.since_plain + 1 if any(n for _, n in made.drafts) else 0
        if made.offered:
            self._take_offers(made)
        self.offered = made.offered
        offered = made.offered if self.n_own else ()
        asked = [slot for slot, n in made.drafts if n and slot not in offered]
        if self.is_unread and asked:
            self.reading.tries(asked, made.least)
        self.silent = 0 if asked else self.silent + made.may_draft
        if made.pays is not None and (made.may_draft or self.is_unread) and self.n_own:
            self.reading.count(pays=made.pays and bool(asked or self.is_unread))

    def _take_offers(self, made: RoundPlan) -> None:
        """Note what the offers of this round have to save, to pay for the look at earlier texts."""
        drafts = [(slot, n) for slot, n in made.drafts if n and slot in made.offered]
        busy, n_row, slots = len(made.drafts), sum(n for _, n in drafts), [slot for slot, _ in drafts]
        unit = self.plain_ms(busy)
        row_ms = max(0.0, self.costs.verify(busy + n_row) - unit) / max(n_row, 1)
        self.offer_ms, self.instead = (unit / busy, row_ms, unit), {}
        if slots and self.n_own:
            own = self.texts.survive(slots).sum(axis=1).tolist()
            self.instead = dict(zip(slots, own, strict=True))

    def cut(
        self, chosen: Sequence[tuple[int, int]], sure: Mapping[int, Sequence[float]]
    ) -> list[tuple[int, int]]:
        """Cut drafts that are known, as `plan.cut`; all lengths then. Follow with `cut_took`."""
        kept, self.cut_gain_ms, self.cut_unit = cut(self, chosen, sure) if self.cuts else ({}, 0.0, 0.0)
        for slot, n in kept.items():
            self.lanes[slot].n_draft = n
        return [(slot, kept.get(slot, n)) for slot, n in chosen]

    def cut_took(self, ms: float) -> None:
        """The last cut took so many milliseconds. Where cuts promise less than twice of that, rounds do without for a time: the drafter takes
        time for probabilities, too."""
        if self.cut_unit and is_time(ms):
            self.cut_account.add(ms - self.cut_gain_ms / 2, self.cut_unit)

    @property
    def cuts(self) -> bool:
        """It may choose among drafts that are known, and that pays."""
        return self.force is None and not self.fixed and not self.cut_account.rests

    @property
    def looks_up(self) -> bool:
        """The host may look for drafts in earlier texts. Fixed lengths are drafted at any cost."""
        return self.fixed or not self.host.rests

    @property
    def is_unread(self) -> bool:
        """The drafter leaves requests unread that may draft. Once awake, it leaves only those that forbid drafts."""
        return bool(self.unread) and self.reading.rests

    @property
    def is_pause_over(self) -> bool:
        """A paused prompt may run again."""
        return self.n_paused > 0 and self.owed <= 0

    @property
    def allowed(self) -> float:
        """Milliseconds of a round at the operator's target for output tokens."""
        return self.rules.tpot * self.tokens

    def may_ask(self, plain_ms: float) -> bool:
        """Drafts may cost time now to learn from them."""
        return self.asks.debt < LIMIT * plain_ms

    def is_plain_stale(self, busy: int) -> bool:
        """It is time for an undrafted round, to time it."""
        return not self.costs.verify.knows(busy) or self.since_plain >= self.plain_in

    def plain_ms(self, busy: int) -> float:
        """Milliseconds of a round without drafts; 0.0: not known yet."""
        is_known = self.force is None and busy > 0 and self.costs.verify.has_trusted
        return self.costs.verify(busy) if is_known else 0.0

    # -- requests and verdicts ---------------------------------------------------------------------------------------

    def begin(self, slot: int, grammar: str = "", *, may_draft: bool = True) -> None:
        """Start a request. Texts under a grammar have a prior of their own. may_draft: the request does not forbid it"""
        (self.mute.discard if may_draft else self.mute.add)(slot)
        self.texts.begin(slot, self.texts.of_grammar(grammar) if grammar else self.texts.free)
        self.rows.begin(slot)
        self.lanes[slot] = Lane()
        self.stands = None

    def record(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Record the verdict on one slot's draft."""
        lane = self.lanes[slot]
        self.texts.add(slot, n_draft, n_accepted)
        if n_draft:
            if slot in self.tried:
                self.tried.discard(slot)
                enough = self.tries[slot]
                self.n_right += n_accepted - enough if enough else 2 * (n_accepted == n_draft) - 1
                self.again = 0 if self.tried or self.n_right <= 0 else 2 * len(self.tries)
            self.reading.judge(slot, n_accepted)
            self.stands = None
            lane.drafted, lane.kept = DECAY * lane.drafted + n_draft, DECAY * lane.kept + n_accepted

    def record_offer(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Record the verdict on a draft from earlier text: what it saved pays for the looks."""
        each, row_ms, unit = self.offer_ms
        if unit and n_draft:
            self.host.add(n_draft * row_ms - (n_accepted - self.instead.get(slot, 0.0)) * each, unit)

    def found_none(self, slot: int) -> None:
        """The drafter was asked and had no draft for the slot: it took its time, and gave as much as a wrong token."""
        self.texts.add(slot, 1, 0)
        self.stands = None

    # -- times ---------------------------------------------------------------------------------------------------------

    def looked_up(self, ms: float, busy: int) -> None:
        """The host looked at earlier texts for `busy` slots, or entered some, in so many milliseconds, and the device waited."""
        if (unit := self.plain_ms(busy)) and is_time(ms):
            self.host.add(ms, unit)

    def landed(self, n_row: int, ms: float, n_read: int, n_decoding: int, n_long: int = 0) -> None:
        """A forward of so many rows took so long. n_read: rows of prompts among them, 0 if its time is not theirs; n_decoding: slots that decoded
        in it; n_long: prompts in it that pause."""
        if n_read and self.force is None:
            self.costs.prompts.add(n_row, ms)
        self.rested = 0.0
        if not n_decoding or not is_time(ms):
            return
        if self.rules.tpot:
            most = MOST_DEBT * self.allowed
            self.balance = min(max(self.balance + self.allowed - ms, -most), most)
        if n_read and self.rules.weight:
            own = self.costs.verify(n_row - n_read)
            if n_long:
                took = min(ms, self.costs.prompts.usual(n_row) or PAUSE_MS)  # or the machine had paused
                self.chunk_ms = max(0.0, took - own) / n_long
                self.owed += self.chunk_ms * n_decoding / self.rules.weight
            self.owed = max(0.0, self.owed - own)

    def landed_alone(self, rows: int, ms: float, *, others: bool) -> None:
        """A prompt's graph of so many rows took so long. others: requests waited for it."""
        self.costs.alone.add(rows, ms)
        if others and is_time(ms):
            self.rested += ms
            if self.rules.tpot:
                self.balance = max(self.balance - ms, -MOST_DEBT * self.allowed)

    def timed(
        self,
        rows: int,
        verify_ms: float,
        live: int,
        passes: int,
        draft_ms: float,
        experts: RoundExperts | None = None,
    ) -> None:
        """Record the times of a round with decoding slots only. experts: of its rows, where a model has some in host memory."""
        if not is_time(verify_ms, draft_ms):
            return
        self.timed_beside(verify_ms + draft_ms)
        if experts is None:
            self.costs.verify.add(rows, verify_ms)
        else:
            self._timed_with(rows, verify_ms, experts)
        self.owed = max(0.0, self.owed - self.costs.verify(rows) - draft_ms)
        if live and self.n_own:
            passes = min(passes, self.n_own)  # a warm-up pads drafts
            size = self.block.forward_rows(live, passes)[-1] if self.block else live
            self.costs.draft.add(size, draft_ms / (max(passes, 1) if self.chained else 1))

    def _timed_with(self, rows: int, ms: float, experts: RoundExperts) -> None:
        """Of its time what its experts are beyond the usual ones."""
        timer, brought, old = self.costs.verify, experts.sum, self.rows.factors
        self.rows.see(experts)
        timer.add(rows, max(ms - old.beyond(brought), LEAST * ms), brought)
        if self.rows.learn(timer.bucket(rows), brought, ms):
            timer.recount(old, self.rows.factors)

    def timed_beside(self, ms: float) -> None:
        """Record the time of a round that read prompts, too, or recorded its forwards."""
        for account in (self.asks, self.cut_account, self.host) if is_time(ms) else ():
            account.passes(ms)

    def gave(self, n_tokens: Iterable[int]) -> None:
        """Decoding slots were given so many tokens each in a round."""
        if found := list(n_tokens):
            self.tokens += (1 - DECAY) * (max(1.0, sum(found) / len(found)) - self.tokens)
