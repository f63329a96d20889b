"""What one round does: `plan` answers it, from what rounds have taught so far and what waits now. Arithmetic only: no torch, no clock, and
nothing is changed by asking.

**Prompts.** Decoding slots wait for the prompt rows of their forward; requests that are still read wait for more of them. A prompt's rows cost
their time in any forward, and fewer forwards have fewer fixed parts, so one takes all prompts that wait, as long as it is expected to last no
longer than a person notices, and in any case the rows that are not too many anywhere. Targets of the operator change that: a time per output
token makes it smaller, a time to first token larger. A prompt may run alone, as a CUDA graph, while other requests rest for a round: a forward
with prompts and decoding slots is no graph. The host launches its kernels one by one, which takes it longer than the device needs if the model
is small or divided over several GPUs: 62 ms for a forward of a 27B model on four H100, where the graph of a prompt of 300 tokens takes about
20. A long prompt pauses after each of its chunks until the decoding slots have had their share. By default it takes as much time as each of
them, so one beside eight slows them by a ninth.

**Drafts.** Rows go to slots in the order of their chance to survive, up to each depth at which deeper drafts cost another pass or a longer
block. The best ratio of expected tokens to expected time wins, which may be no draft at all. A draft also reveals the level of its text. If
that is unknown and worth knowing, the draft is credited with tokens, while the lost time that is owed is small. After many rounds without drafts
some slots draft anyway, because the reasons against it may have gone: texts that ended, or times that the warm-up took on a busy machine.
Where the drafter says how sure it is of each token, blocks are drafted whole, and `cut` shares the rows again once they are known: over all
slots, those likeliest to be kept, while a row gives more than its time would give elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyspec.engine.policy.costs import N_SAMPLE
from pyspec.engine.policy.estimate import Floats

if TYPE_CHECKING:
    from pyspec.engine.policy.controller import Controller

Offers = Mapping[int, Sequence[float]]  # by slot, the chance of each token to be reached and right

# Sources in brackets: least part of the tokens a millisecond of a recording with other values, by tools/replay.py (docs/log, 2026-11-28 and 29)
ASK_DRAFT = 2  # tokens of a draft that only probes or tries [1 and 4: the same; tests/test_control_noise.py: fresh engines on a busy machine]
MARGIN = 1.02  # a draft must promise this factor more than none [1.0: 0.98, 1.05: 0.96]
TRY_FREE = 64  # a shorter wait need not have earned the cost of the try: after a busy start half of the costs are wrong [0: 0.99; tests/test_control_noise.py: a doubtful draft time]
ONE_IN = 8  # one slot in this many tries [2 and 64: the same]; while drafts do not pay, one request in this many is read, and half as many at least [of 64 slots in tests/engine/test_reading.py one in 4: they draft again after 117 rounds, now 218]
RETHINK = 16  # rounds for which a choice stands that only measured times could change: one of no drafts [0: 0.998, and 0.2 ms of the host], and, doubled each time, drafts without an undrafted round between [4: 0.97, 64: 0.93, never: 0.86]
HORIZON = 3.0  # rounds for which knowing a text counts, as credit of a draft of an unknown text [0: 0.94, 1: 0.96, 10: 0.99]
OFFERED = -1  # in place of a position in a draft
# In brackets: of the tokens a second of the servers of tests/test_prompt_pace.py
PAUSE_MS = 400.0  # most that decoding slots wait for one forward, unless `least` rows take longer: a person notices more [200: 0.988, 800: the same]
LEAST = 64  # prompt rows that a forward has in any case, so that prompts go on [16: the same, 256: 1.02]
URGENT = 0.5  # share of the time to first token after which a waiting prompt takes all rows: chosen
ANEW = 50  # lone prompts until one forward for all is measured anew [10 and never: 0.93]
LONG = 8192  # uncached tokens of a long prompt: chosen, a flag has its weight

# reasons of a slot without drafts, for `/slots`
MUTE = "none: drafts are switched off for the request"
NO_CAP = "none: the request is at its last token, or past the drafter's length"
NO_OFFER = "none: the last tokens stand nowhere before"
NO_DRAFTER = "none: no drafter is loaded"
FAILED = "none: the choice of drafts failed, as the log says"
LOST_TRACK = "none: the drafter failed at the request, as the log says"
UNREAD = "none: drafts have not paid for long, so the drafter does not read this request"
RESTS = "none: drafts from earlier text took more of the host's time than they saved, and are tried again later"


def no_graph(n_token: int) -> int | None:
    """No prompt runs as a graph."""
    return None


@dataclass(frozen=True, slots=True)
class PromptRules:
    """Limits of prompts by the operator and the device.

    least, most  rows of a forward with decoding slots: between these by measured times, or a fixed number where both are equal
    tpot, ttft   targets in milliseconds: per output token, in the mean over an answer; from a request's arrival to its first token. 0: none
    weight       time of a long prompt in units of a decoding slot's; 0: no limit
    n_free       rows of it that never pause
    graph_of     rows of the graph that holds a whole prompt of so many tokens; None: there is none
    graphs_see   it holds prompts with pictures, too
    """

    least: int = 1 << 30
    most: int = 1 << 30
    tpot: float = 0.0
    ttft: float = 0.0
    weight: float = 1.0
    n_free: int = 0
    graph_of: Callable[[int], int | None] = no_graph
    graphs_see: bool = False

    @property
    def are_fixed(self) -> bool:
        return self.least >= self.most and not self.tpot

    def pauses(self, n_token: int, n_read: int) -> bool:
        """Whether a prompt of so many uncached tokens, of which so many are read, is one that pauses between its chunks."""
        return self.weight > 0 and n_token > LONG and n_read >= self.n_free


class Prompt(NamedTuple):
    """A prompt that is not read to its end.

    n_left   tokens to read
    graph    rows of the graph that holds it; 0: none, or a part of it is read
    started  seconds, of the loop's clock
    pauses   as in `PromptRules`
    """

    n_left: int
    graph: int = 0
    started: float = 0.0
    pauses: bool = False


@dataclass(frozen=True, slots=True)
class RoundState:
    """All that a decision knows.

    known      learned in rounds: the estimate, the costs, what is owed, and the drafter's kind
    decoding   (slot, most tokens that the drafter may draft) of each slot that decodes
    prompts    oldest first
    offers     looks for drafts that need no drafter; called once, if decoding slots take part
    now        seconds, of the loop's clock
    under_way  rows of the prompt that is read by itself now
    tells      drafts come to the host with the drafter's probabilities, to be cut
    busy, lost  slots with requests, and those of which the drafter has lost track
    n_past     of each slot whose drafter has windows, the tokens in it
    n_trained  tokens for which that drafter was trained; 0: unknown
    """

    known: Controller
    decoding: Sequence[tuple[int, int]]
    prompts: Sequence[Prompt] = ()
    offers: Callable[[], Offers] = dict
    now: float = 0.0
    under_way: int = 0
    tells: bool = False
    busy: Sequence[int] = ()
    lost: Set[int] = frozenset()
    n_past: Mapping[int, int] = field(default_factory=dict)
    n_trained: int = 0


@dataclass(slots=True)
class RoundPlan:
    """What a round does.

    drafts    (slot, tokens) of each decoding slot to be verified
    asked     the same as the drafter is asked for: longer, where drafts are cut once they are known
    offered   of these slots the offers are verified
    reasons   by slot, for `/slots`
    alone     the prompt that is read by itself while all others rest, by its place; None: all take part
    paused    places of the prompts that wait for the decoding slots' share
    rows      most rows of a forward with prompts and decoding slots
    joins     slots whose requests the drafter reads from now on
    windows   by slot, the last tokens of its text that its drafts see; 0: all

    The rest is for the controller, once the round is taken:

    kind      "try", "again" (a whole try), "measure" (an undrafted round), or none of these
    is_faster_alone  measured times say that a prompt should run alone
    beside    rows of prompts in the forward
    rate      tokens a millisecond that it promises
    pays      it drafts to gain tokens; None: it says nothing of that
    owes      (milliseconds, of a plain round) that it is expected to lose, to learn
    tried     slots that draft to find out, and the right tokens of each that would pay if all slots had them; 0: all of a short draft
    stands    round, caps and reason of a choice of no drafts, until it is rethought
    would     round, slots and result of asking whether drafts would pay if all requests were read
    least     share of first tokens that have to be right so that drafts pay in all slots
    may_draft  some slot may
    """

    drafts: list[tuple[int, int]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    offered: Offers = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    alone: int | None = None
    paused: Set[int] = frozenset()
    rows: int = 0
    joins: list[int] = field(default_factory=list)
    windows: dict[int, int] = field(default_factory=dict)
    kind: str = ""
    is_faster_alone: bool = False
    beside: int = 0
    rate: float = 0.0
    pays: bool | None = None
    owes: list[tuple[float, float]] = field(default_factory=list)
    tried: dict[int, float] = field(default_factory=dict)
    stands: tuple[int, list[tuple[int, int]], str] | None = None
    would: tuple[int, int, bool] = (0, 0, False)
    least: float = 0.0
    may_draft: bool = False


def plan(state: RoundState) -> RoundPlan:
    """What the next round does. It changes nothing: the controller takes the plan that is used."""
    known = state.known
    made = RoundPlan(rate=known.rate, stands=known.stands, would=known.would)
    made.joins = _joins(state)
    made.windows = {slot: window(n, state.n_trained) for slot, n in state.n_past.items()}
    if state.decoding and known.owed > 0:
        made.paused = {i for i, prompt in enumerate(state.prompts) if prompt.pauses}
    reading = [(i, p) for i, p in enumerate(state.prompts) if i not in made.paused]
    if reading:
        n_verify = sum(1 + known.lanes[slot].n_draft for slot, _ in state.decoding)
        _read(state, made, reading, n_verify)
        if made.alone is not None:
            return made
        if known.costs.prompts.has_trusted and state.decoding:
            n_left = sum(prompt.n_left for _, prompt in reading)
            made.beside = min(n_left, max(made.rows - len(state.decoding), 1))
    if state.decoding:
        _draft(state, made)
    return made


def window(n_past: int, n_trained: int) -> int:
    """Last tokens of a slot's text that its drafts see; 0: all. Behind the drafter's trained length (its file's key) half of that, because few
    distances in its training were longer."""
    return max(1, n_trained // 2) if 0 < n_trained <= n_past else 0


# -- prompts -----------------------------------------------------------------------------------------------------------


def _read(
    state: RoundState, made: RoundPlan, reading: Sequence[tuple[int, Prompt]], n_verify: int
) -> None:
    """Choose whether one of the prompts runs alone, and the rows of a forward for all. n_verify: rows of the decoding slots, about."""
    known, rules = state.known, state.known.rules
    made.rows = rules.most
    soon = state.now - 1e-3 * URGENT * rules.ttft
    is_urgent = rules.ttft > 0 and any(prompt.started <= soon for _, prompt in reading)
    if rules.are_fixed or is_urgent or not known.costs.prompts.has_trusted:
        return
    most_ms = known.allowed + known.balance if rules.tpot else PAUSE_MS
    pause_ms = min(PAUSE_MS, most_ms) - known.rested
    if state.under_way and known.costs.alone.knows(state.under_way):
        pause_ms -= known.costs.alone(state.under_way)
    made.alone, made.is_faster_alone = _alone(state, reading, n_verify, pause_ms)
    least = min(n_verify + LEAST, rules.least) if rules.tpot else rules.least
    made.rows = max(least, min(rules.most, known.costs.prompts.most(most_ms)))


def _alone(
    state: RoundState, reading: Sequence[tuple[int, Prompt]], n_verify: int, pause_ms: float
) -> tuple[int | None, bool]:
    """The prompt that runs by itself, if one does, and whether measured times say that this is faster. pause_ms: most that others wait for it"""
    known, costs = state.known, state.known.costs
    graphs = [(i, prompt) for i, prompt in reading if prompt.graph]
    n_together = sum(prompt.n_left for _, prompt in reading) + n_verify
    if not graphs or n_together == graphs[0][1].n_left:  # or it is alone in any case
        return None, False
    first, is_known = graphs[0][1].graph, costs.alone.knows(graphs[0][1].graph)
    first_ms = costs.alone(first) if is_known else 0.0
    if pause_ms <= 0 or first_ms > pause_ms:
        return None, False
    if not is_known:
        return graphs[0][0], False  # one round tells
    each = [costs.alone(p.graph) if costs.alone.knows(p.graph) else first_ms for _, p in graphs]
    n_rest = n_together - sum(prompt.n_left for _, prompt in graphs)
    rest_ms = (
        _together_ms(known, n_rest) if n_rest > n_verify else costs.verify(n_rest) if n_rest else 0.0
    )
    if sum(each) + rest_ms >= _together_ms(known, n_together):
        return None, False
    return None if known.n_alone % ANEW == ANEW - 1 else graphs[0][0], True


def _together_ms(known: Controller, n_row: int) -> float:
    """Milliseconds of forwards for so many rows. One that is larger than all that were measured takes no longer, so that it is tried."""
    most, prompts = max(known.rules.most, 1), known.costs.prompts
    return prompts(min(n_row, most, prompts.largest)) * max(1.0, n_row / most)


# -- requests that the drafter reads -----------------------------------------------------------------------------------


def _joins(state: RoundState) -> list[int]:
    """Unread slots that the drafter joins: all of them once drafts pay again, and before that so many that a few are read, as of new requests:
    others may have ended. Those whose requests can not draft stay unread."""
    known = state.known
    if not known.unread:
        return []
    unable = known.mute | state.lost
    able, reading = sorted(known.unread - unable), known.reading
    if not reading.rests:
        return able
    n_read = sum(slot not in known.unread and slot not in unable for slot in state.busy)
    n = next(
        (n for n in range(len(able)) if not reading.wants(n_read + n, len(state.busy) - 1)), len(able)
    )
    return able[:n]


# -- drafts ------------------------------------------------------------------------------------------------------------


def _draft(state: RoundState, made: RoundPlan) -> None:
    """Choose the drafts of each decoding slot."""
    known = state.known
    n_most = known.n_own if known.force is None else known.n_max
    own = [(slot, min(cap, n_most)) for slot, cap in state.decoding]
    offers = state.offers() if known.force is None else {}
    offered = preferred(known, own, offers) if offers else {}
    table = Table(
        known, [(slot, len(offered.get(slot, range(cap)))) for slot, cap in own], offered, made.beside
    )
    caps, busy = table.caps, len(own)
    rests = known.is_unread
    made.may_draft = any(cap for _, cap in caps)
    if known.force is not None:
        live, n = known.force
        picked, why = [min(cap, n) if i < live else 0 for i, (_, cap) in enumerate(caps)], "warm-up"
    elif known.fixed or not (known.n_own or offered):
        picked, why = [cap for _, cap in caps], "fixed" if known.fixed else "no drafter"
    elif not made.beside and known.is_plain_stale(busy):
        picked, why, made.kind = [0] * busy, "measuring an undrafted round", "measure"
    else:
        picked, why = _weigh(table, made)
        if rests and not (made.pays and table.asks_drafter(picked)):
            made.pays = _would_pay(table, made)
        may_try = known.try_in < TRY_FREE or known.may_ask(known.costs.verify(busy))
        is_again = known.again and not (made.pays and any(known.tries.values()))
        is_due = is_again or (known.silent >= known.try_in and may_try)
        if is_due or (rests and known.reading.is_hopeful):
            table, picked = _tried(table, own, picked, made)
            why = f"trying again after {known.silent} rounds without; {why}"
    made.offered = table.offered
    made.drafts = [(slot, n) for (slot, _), n in zip(own, picked, strict=True)]
    made.asked = _whole(table, own, picked) if state.tells and known.cuts else made.drafts
    if rests:
        made.least = MARGIN * table.round_ms([1] * busy) / known.costs.verify(busy) - 1
    for (slot, cap), n in zip(caps, picked, strict=True):
        made.reasons[slot] = why
        if not cap:
            made.reasons[slot] = LOST_TRACK if slot in state.lost else _unable(known, slot, made.joins)
        elif not n and any(picked):
            made.reasons[slot] = f"none: drafts of other slots are likelier to be right; {why}"


def _unable(known: Controller, slot: int, joins: Sequence[int]) -> str:
    """Why the slot may not draft."""
    if slot in known.mute:
        return MUTE
    if slot in known.unread and slot not in joins:
        return UNREAD
    if known.n_own:
        return NO_CAP
    return NO_DRAFTER if not known.n_max else NO_OFFER if known.looks_up else RESTS


def preferred(
    known: Controller, caps: Sequence[tuple[int, int]], offers: Offers, gain: float = 1.0
) -> dict[int, Sequence[float]]:
    """The offers that promise more than the drafter. gain: factor of the tokens of a round that they promise at least."""
    asked = [(slot, cap) for slot, cap in caps if slot in offers]
    if not asked:
        return {}
    slots = [slot for slot, _ in asked]
    survive = known.texts.survive(slots) if known.n_own else np.zeros((len(slots), 0))
    return {
        slot: offers[slot]
        for (slot, cap), own in zip(asked, survive, strict=True)
        if 1 + sum(offers[slot]) >= gain * (1 + own[:cap].sum())
    }


def would_take(
    known: Controller, caps: Sequence[tuple[int, int]], offers: Offers, busy: int, gain: float
) -> bool:
    """A round of `busy` slots would verify some of these offers: they are `preferred`, and their rows pay."""
    found = preferred(known, caps, offers, gain)
    if not found or known.fixed or known.force is not None:
        return bool(found)
    chances: Floats = np.zeros((len(found), max(map(len, found.values()))))
    for line, offer in zip(chances, found.values(), strict=True):
        line[: len(offer)] = offer
    lengths = np.array([len(offer) for offer in found.values()])
    is_offered = np.arange(chances.shape[1]) < lengths[:, None]
    plain = busy / known.costs.verify(busy)
    rows = DraftRows.sorted(is_offered, chances, _own_ms(known, list(found), chances.shape[1]), plain)
    best = rows.best(busy, known.costs.forward(range(busy + 1, busy + 1 + len(rows.slot))))
    return best.worth > MARGIN * plain


def _own_ms(known: Controller, slots: Sequence[int], n: int) -> Floats:
    """[slot, n]: milliseconds of each draft's row by the experts that it brings."""
    own = known.rows.ms(slots)[0]
    return own[:, :n] if n <= own.shape[1] else np.pad(own, ((0, 0), (0, n - own.shape[1])), "edge")


def cut(
    known: Controller, chosen: Sequence[tuple[int, int]], sure: Mapping[int, Sequence[float]]
) -> tuple[dict[int, int], float, float]:
    """Cut drafts by how sure the drafter is of them, over all slots. Their own cost is paid. Also the milliseconds that this saves, and those of a
    round without them.

    chosen  (slot, drafted tokens)
    sure    by slot, the drafter's probability of each of them. Drafts of other slots stay
    """
    drafted = [(slot, n) for slot, n in chosen if n and slot in sure]
    if not drafted or not known.rate:
        return {}, 0.0, 0.0
    survive = known.texts.survive([slot for slot, _ in drafted], [sure[slot][:n] for slot, n in drafted])
    place = np.arange(survive.shape[1])
    is_drafted = place < np.array([n for _, n in drafted])[:, None]
    own_ms = _own_ms(known, [slot for slot, _ in drafted], survive.shape[1])
    rows = DraftRows.sorted(is_drafted, survive, own_ms, known.rate)
    others = len(chosen) + sum(n for _, n in chosen) - len(rows.slot)
    ms = known.costs.forward(range(others, others + len(rows.slot) + 1), known.beside)
    best, none = rows.best(0, ms[1:], known.rate), float(-known.rate * ms[0])
    kept = np.bincount(best.slot if best.worth > none else best.slot[:0], minlength=len(drafted))
    uncut = np.array([min(known.uncut.get(slot, n), n) for slot, n in drafted])
    is_uncut = place < uncut[:, None]
    before = survive[is_uncut].sum() - known.rate * (ms[uncut.sum()] + own_ms[is_uncut].sum())
    saved_ms = max(float(max(best.worth, none) - before), 0.0) / known.rate
    lengths = zip([slot for slot, _ in drafted], kept.tolist(), strict=True)
    return dict(lengths), saved_ms, float(ms[0])


def _whole(table: Table, own: Sequence[tuple[int, int]], picked: Sequence[int]) -> list[tuple[int, int]]:
    """Drafts as long as the drafter computes at that price. A chain computes as many as the longest."""
    needs = [n for (slot, _), n in zip(own, picked, strict=True) if n and slot not in table.offered]
    if not needs:
        return list(zip([slot for slot, _ in own], picked, strict=True))
    depth = max(needs)
    if not table.known.chained:
        depth = next((end for end in table.depths(len(needs)) if end >= depth), depth)
    return [
        (slot, min(cap, depth) if n and slot not in table.offered else n)
        for (slot, cap), n in zip(own, picked, strict=True)
    ]


def _weigh(table: Table, made: RoundPlan) -> tuple[list[int], str]:
    """Give rows by `Table`. A choice of no drafts stands for some rounds, because choosing takes time."""
    known = table.known
    if made.beside:
        return _best(table, made)
    made.pays, stands = False, None if table.offered else known.stands
    if stands is not None and stands[1] == table.caps and known.n_round - stands[0] < RETHINK:
        return [0] * len(table.caps), stands[2]
    picked, why = _best(table, made)
    made.stands = None if any(picked) or table.offered else (known.n_round, table.caps, why)
    return picked, why


def _best(table: Table, made: RoundPlan) -> tuple[list[int], str]:
    """Take the most tokens a millisecond. A round that reads prompts, too, is as long as those: there a draft has to be worth its time at the
    rate of rounds without prompts."""
    known, busy = table.known, len(table.caps)
    plain_ms = known.costs.verify(busy)
    if not any(cap for _, cap in table.caps):
        return [0] * busy, "plain: no slot may draft"
    news = table.news(busy / plain_ms)
    rows = table.rows(news, busy / plain_ms)
    verify = known.costs.forward(range(busy + 1, busy + 1 + len(rows.slot)))
    if known.costs.verify.n(busy) < N_SAMPLE or known.since_plain >= RETHINK:
        # fewer rows never take longer, so this was noise
        plain_ms = min(plain_ms, float(verify.min()))
    price = plain = busy / plain_ms
    best = table.best(rows, verify)
    if best.worth > plain and rows.ms.any():  # the time of a row is worth more
        best = max(best, table.best(table.rows(news, best.worth), verify), key=lambda way: way.worth)
    is_worth, where = best.worth > MARGIN * plain, ""
    if made.beside:
        price, where = MARGIN * max(best.worth, plain), f" beside {made.beside} rows of prompts"
        forward = known.costs.forward(range(busy, busy + 1 + len(rows.slot)), made.beside)
        # rows of a prompt bring most experts
        rows = rows._replace(ms=np.zeros_like(rows.ms))
        best, plain_ms = table.best(rows, forward[1:], price), float(forward[0])
        is_worth = best.worth > busy - price * plain_ms
    made.rate = price
    if not is_worth:
        return [0] * busy, f"plain: no draft promises more than {1e3 * price:.0f} tok/s{where}"
    picked = np.bincount(best.slot, minlength=busy).tolist()
    tokens = best.tokens - news[np.unique(best.slot)].sum()
    saved = (tokens - busy) / price - (best.ms - plain_ms)
    if saved <= 0:
        made.owes.append((-saved, plain_ms))
        why = f"probing texts: some would give more than {1e3 * price:.0f} tok/s{where}"
        return [min(n, ASK_DRAFT) for n in picked], why
    made.pays = True
    if made.beside:
        return picked, f"worth their time{where}"
    made.rate = max(tokens / best.ms, plain)
    return picked, f"expects {1e3 * made.rate:.0f} tok/s, plain {1e3 * plain:.0f}"


def _would_pay(table: Table, made: RoundPlan) -> bool:
    """Drafts would promise more than none if the drafter read all requests, also those in their prompts: of unread texts the others tell."""
    known = table.known
    whole = [(slot, cap) for slot, cap in table.caps if slot not in known.unread]
    whole += [(slot, 0 if slot in known.mute else known.n_own) for slot in sorted(known.unread)]
    (at, of, pays), busy = known.would, len(whole)
    if known.n_round - at >= RETHINK or abs(busy - of) > of // ONE_IN:
        every = Table(known, whole)
        rows = every.rows(np.zeros(busy), busy / known.costs.verify(busy))
        best = every.best(rows, known.costs.forward(range(busy + 1, busy + 1 + len(rows.slot))))
        pays = best.worth > MARGIN * busy / known.costs.verify(busy)
        made.would = known.n_round, busy, pays
    return pays


def _tried(
    table: Table, own: Sequence[tuple[int, int]], picked: list[int], made: RoundPlan
) -> tuple[Table, list[int]]:
    """Have some slots draft, others each time: texts or times may have changed. Where there is no drafter, the likeliest offer.

    The first try has few tokens. If they are right, then only times speak against drafts, maybe those of sizes that few tokens do not
    time: the next try is at once, and whole, in twice as many slots each time, while it gives what would pay in all.
    """
    known, tried, before = table.known, picked.copy(), table.round_ms(picked)
    able = [i for i, (slot, cap) in enumerate(own) if cap and slot not in known.unread]
    if not known.n_own:
        best = max(range(len(own)), key=lambda i: sum(table.offered.get(own[i][0], ())))
        tried[best], able = min(table.caps[best][1], ASK_DRAFT), [best]
    else:
        most = 1 if known.chained else known.n_own if known.again else ASK_DRAFT
        n_asked = len(able) + sum(slot in known.unread for slot, _ in own)
        n = min(len(able), max(known.again, -(-n_asked // ONE_IN)))
        turns = [able[(known.n_round + k) % len(able)] for k in range(n)]
        all_ms = table.round_ms([min(cap, most) for _, cap in own]) if n < len(able) else inf
        enough = MARGIN * all_ms / known.costs.verify(len(own)) - 1 if known.again else 0.0
        for i in turns:
            tried[i] = min(own[i][1], most)
        made.tried = {own[i][0]: enough for i in turns}
        left = {slot: offer for slot, offer in table.offered.items() if slot not in made.tried}
        table = replace(table, offered=left)
    made.owes.append((table.round_ms(tried) - before, known.costs.verify(len(own))))
    made.kind = "again" if known.again else "try" if able else made.kind
    return table, tried


class DraftRows(NamedTuple):
    """Candidate rows in the order in which they are taken: slot, position in the draft (OFFERED: needs no drafter), chance to be right, and
    milliseconds of the experts that the row brings."""

    slot: NDArray[np.int64]
    place: NDArray[np.int64]
    gain: Floats
    ms: Floats

    @classmethod
    def sorted(cls, may: NDArray[np.bool_], gain: Floats, ms: Floats, rate: float) -> DraftRows:
        """The likeliest first, less what their time is worth at `rate` tokens a millisecond; ties by slot. A row goes behind those before it.

        may, gain, ms  [slot, place]: whether the row may be taken, and as above
        """
        slot, place = may.nonzero()
        worth = gain if not ms.any() else np.minimum.accumulate(gain - rate * ms, axis=1)
        order = (-worth[may]).argsort(kind="stable")
        return cls(slot[order], place[order], gain[may][order], ms[may][order])

    def up_to(self, depth: int) -> DraftRows:
        mask = self.place < depth
        if mask.all():
            return self
        return DraftRows(self.slot[mask], self.place[mask], self.gain[mask], self.ms[mask])

    def best(self, busy: int, ms: Floats, price: float = 0.0) -> Way:
        """Take the number of rows with most tokens per millisecond, or with most left once milliseconds are paid at `price` tokens each.

        ms: by rows, from one on
        """
        tokens, ms = busy + self.gain.cumsum(), ms + self.ms.cumsum()
        worth = tokens - price * ms if price else tokens / ms
        n = int(worth.argmax())
        return Way(float(worth[n]), float(tokens[n]), float(ms[n]), self.slot[: n + 1])


class Way(NamedTuple):
    """A candidate choice: expected tokens per millisecond (or those left of a price), tokens, milliseconds, and each row's slot."""

    worth: float
    tokens: float
    ms: float
    slot: NDArray[np.int64]


NO_WAY = Way(float("-inf"), 0.0, 0.0, np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Table:
    """What rows of drafts promise and cost.

    caps     (slot, most tokens): the drafter's, or those of an offer
    offered  by slot, offers in place of drafts
    beside   rows of prompts in the same forward
    """

    known: Controller
    caps: list[tuple[int, int]]
    offered: Offers = field(default_factory=dict)
    beside: int = 0

    def asks_drafter(self, picked: Sequence[int]) -> list[int]:
        """Lengths of the drafts that need the drafter."""
        return [
            n for (slot, _), n in zip(self.caps, picked, strict=True) if n and slot not in self.offered
        ]

    def round_ms(self, picked: Sequence[int]) -> float:
        """Milliseconds of a round without prompts."""
        verify, asked = self.known.costs.verify(len(picked) + sum(picked)), self.asks_drafter(picked)
        if any(picked) and self.known.rows.is_known:
            own = _own_ms(self.known, [slot for slot, _ in self.caps], max(picked))
            verify += float(own[np.arange(max(picked)) < np.array(picked)[:, None]].sum())
        return verify + float(self.draft_ms(max(asked))[len(asked)] if asked else 0.0)

    def draft_ms(self, depth: int) -> Floats:
        """[1 + slots]: milliseconds of a draft of up to `depth` tokens, by drafting slots."""
        known, busy = self.known, len(self.caps)
        sizes = known.block.forward_rows(busy, depth) if known.block else range(1, busy + 1)
        return np.append(0.0, known.costs.draft.of_all(sizes) * (depth if known.chained else 1))

    def depths(self, busy: int) -> Sequence[int]:
        """Depths at which drafting deeper costs more."""
        known = self.known
        if known.chained:
            return range(1, known.n_own + 1) or (0,)
        return known.block.depths(busy, known.n_own) if known.block and known.n_own else (known.n_own,)

    def news(self, rate: float) -> Floats:
        """The information in each slot's draft, in tokens; zero if too much is owed. rate: of plain decoding."""
        known, busy = self.known, len(self.caps)
        if not known.n_own or not known.may_ask(busy / rate):
            return np.zeros(busy)
        each, verify = rate / busy, known.costs.verify
        row = each * (verify(busy * (1 + known.n_own)) - verify(busy)) / known.n_own
        if known.rows.is_known:
            row += each * float(_own_ms(known, [slot for slot, _ in self.caps], known.n_own).mean())
        ends = self.depths(busy)
        draft = each * np.array([self.draft_ms(d)[busy] for d in (ends[:1] if known.chained else ends)])
        costs = (row + draft[0], 0.0) if known.chained else (row, draft.repeat(np.diff(ends, prepend=0)))
        value = HORIZON * known.texts.value_of_information([slot for slot, _ in self.caps], *costs)
        return np.where([slot in self.offered for slot, _ in self.caps], 0.0, value)

    def rows(self, news: Floats, rate: float) -> DraftRows:
        """Candidate rows. news: the information in each slot's first draft, in tokens. rate: as in `DraftRows.sorted`"""
        known, caps = self.known, self.caps
        survive = known.texts.survive([slot for slot, _ in caps])
        survive[:, :1] += news[:, None]
        if self.offered:  # they may be longer than the drafter's
            survive = np.pad(survive, ((0, 0), (0, known.n_max - known.n_own)))
        is_asked = np.arange(survive.shape[1]) < np.array([cap for _, cap in caps])[:, None]
        needs_drafter = np.array([slot not in self.offered for slot, _ in caps])
        for i in (~needs_drafter).nonzero()[0].tolist():
            offer = self.offered[caps[i][0]]
            survive[i, : len(offer)] = offer
        own_ms = _own_ms(known, [slot for slot, _ in caps], survive.shape[1])
        rows = DraftRows.sorted(is_asked, survive, own_ms, rate)
        return rows._replace(place=np.where(needs_drafter[rows.slot], rows.place, OFFERED))

    def best(self, rows: DraftRows, verify: Floats, price: float = 0.0) -> Way:
        """The best choice over all depths, each of which takes one more pass or a longer block for all slots. price: as in `DraftRows.best`."""
        if not len(rows.slot):
            return NO_WAY
        ways = []
        for depth in self.depths(len(self.caps)):
            if len((some := rows.up_to(depth)).slot):
                draft_ms = self.draft_ms(depth)[(some.place == 0).cumsum()]
                ways.append(some.best(len(self.caps), verify[: len(some.slot)] + draft_ms, price))
        return max(ways, key=lambda way: way.worth, default=NO_WAY)
