"""Simulate the controller against an oracle that knows acceptance and costs. Nothing is loaded and no GPU is needed.

python tools/regret.py [--cards 27b-mtp ...] [--texts code ...] [--streams 1 8 64] [--rounds 1500] [--seeds 2] [--most 0.03] [--bound]

The real `Controller` and `Timer` decide for requests that join and leave, over made-up texts whose acceptance changes in the middle of a
request, on a card with measured round times (docs/log.md, docs/benchmarks.md; linear between the measurements). The oracle decides for the
same requests with the same coins.

* The oracle knows each slot's chance at each drafted position, for the coming tokens, and the mean time of a round by rows and slots and
  of a draft by slots and passes. It picks each round's lengths for the most expected tokens a millisecond of that round: for every depth and
  every number of drafting slots, rows in the order of their chance to survive.
* It does not know how a coin will fall, nor the noise, and does not plan beyond its round.
* The controller knows the engine's reports: verdicts one round late (rounds are launched ahead), times with noise, none of rounds in which a
  request joins. It starts as after a load, with the warm-up's rounds of one and of all slots.

* --bound adds a decider that knows costs and the making of texts, but has to learn each text by reading it (`Seer`): the least cost of
  learning.

Regret: 1 - tokens a millisecond of the controller over the oracle's, with each round's tokens as its drafts' chances promise. "of plain": the
controller's rate over the rate without drafts. Exit code 1 if a cell's regret is above --most, or less than 0.98 of plain.
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyspec.draft.blocks import BlockLength
from pyspec.engine.load.warmup import N_ROUND, rehearsed
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.plan import Offers, Prompt, RoundPlan, RoundState
from pyspec.slots.arena import BUCKETS, WIDE, bucket_of, most_rows

Floats = NDArray[np.float64]
SIZES = (*BUCKETS, *WIDE)


def planned(
    c: Controller,
    caps: list[tuple[int, int]],
    offers: Offers | None = None,
    beside: int = 0,
    *,
    tells: bool = False,
) -> RoundPlan:
    """The plan of a round of these decoding slots beside so many rows of prompts, taken."""
    prompts = [Prompt(beside)] if beside else []
    state = RoundState(c, caps, prompts, lambda: offers or {}, tells=tells)
    made = c.plan(state)
    c.take(state, made)
    return made


@dataclass(frozen=True)
class Card:
    """Times of a model's rounds on one H200, in milliseconds.

    verify   by rows, of a graph's bucket or as they are; between them a straight line
    state    of each busy slot: its recurrent state is read and written
    draft    by slots that draft, of each pass if chained; by rows of the forward if it drafts blocks
    waking   more for a draft behind 16 rounds or more without one: the drafter catches up. One that chains does so slot by slot; one
             that drafts blocks only after a round without drafts, because a verify of drafts hands it all slots' rows
    """

    verify: dict[int, float]
    state: float
    draft: dict[int, float]
    n_max: int
    chained: bool = True
    waking: float = 0.5
    block: BlockLength | None = None

    def verify_ms(self, rows: int | NDArray[np.int64], busy: int) -> Floats:
        return np.interp(rows, list(self.verify), list(self.verify.values())) + self.state * busy

    def draft_ms(self, live: int | NDArray[np.int64], passes: int) -> Floats:
        size = np.asarray(live)
        if self.block:
            size = size * np.array([self.block.rows(int(n), passes) for n in size.flat]).reshape(
                size.shape
            )
        ms = np.interp(size, list(self.draft), list(self.draft.values())) * (
            passes if self.chained else 1
        )
        return np.where(np.asarray(live) > 0, ms, 0.0)


DENSE = {  # 27B; 16 to 256 rows measured by `tools/bench_acceptance.py --costs` on 2026-11-24; 80, 112 and 128 are 64 rows plus
    # the additional time of 64 layers' products (161, 212 and 229 us a layer with 64, 112 and 128 rows; 80 between them)
    1: 8.4, 2: 8.4, 3: 8.45, 4: 8.5, 6: 8.6, 8: 8.7, 12: 9.0, 16: 9.3, 24: 9.9, 32: 10.5, 48: 13.5, 64: 12.2, 80: 13.3, 96: 14.5,
    112: 15.5, 128: 16.6, 192: 26.1, 256: 28.8, 512: 55.0, 1024: 105.0,
}  # fmt: skip
CARDS = {
    "27b-mtp": Card(DENSE, 0.08, {1: 0.39, 8: 0.42, 16: 0.5, 32: 0.61, 64: 0.9}, 3),
    "27b-dflash": Card(  # drafts of whole blocks as a warm-up and requests timed them on 2026-11-24
        DENSE, 0.08, {16: 0.98, 128: 1.94, 256: 1.95, 512: 3.5, 1024: 6.7}, 15, chained=False, waking=2.0, block=BlockLength(16)
    ),
    "122b-mtp": Card(
        {1: 3.2, 2: 3.8, 3: 4.3, 4: 5.0, 6: 6.1, 8: 6.9, 12: 8.9, 16: 10.4, 24: 12.0, 32: 15.8, 48: 18.0, 64: 20.0, 96: 23.0, 128: 26.0,
         192: 36.0}, 0.07, {1: 0.3, 8: 0.48, 16: 0.6, 32: 0.8, 64: 1.2}, 2,
    ),
    "super-mtp": Card(
        {1: 4.75, 2: 5.4, 3: 6.0, 4: 6.5, 6: 7.8, 8: 8.5, 12: 10.4, 16: 11.8, 24: 13.6, 32: 14.9, 48: 17.5, 64: 19.5, 96: 22.0, 128: 25.0,
         256: 45.0}, 0.078, {1: 0.24, 8: 0.39, 16: 0.55, 32: 0.8, 64: 1.2}, 3,
    ),
    "35b-mtp": Card(
        {1: 1.87, 2: 2.1, 3: 2.3, 4: 2.5, 6: 3.2, 8: 3.85, 12: 4.6, 16: 5.3, 24: 6.3, 32: 7.5, 48: 9.0, 64: 10.2, 96: 12.0, 128: 13.5,
         256: 21.0}, 0.03, {1: 0.2, 8: 0.3, 16: 0.4, 32: 0.55, 64: 0.8}, 3, waking=0.3,
    ),
    "flash-mtp": Card(  # DeepSeek-V4-Flash, counted from six layers at 1, 4 and 32 rows; experts that rows take in between
        {1: 6.0, 2: 6.9, 3: 7.7, 4: 8.4, 6: 10.0, 8: 11.5, 12: 14.3, 16: 16.7, 24: 20.7, 32: 23.6, 48: 28.0}, 0.0,
        {1: 0.4, 8: 0.7}, 5,
    ),
}  # fmt: skip

LEVELS = {"code": 0.92, "chat": 0.68, "low": 0.167}  # chance of a first draft; 0.167: 1.2 tokens a round
FADES = {
    "code": 0.98,
    "chat": 0.94,
    "low": 1.0,
}  # of the next position's, given that all before it were right
TEXTS = {  # kinds of segments of a text, and how often
    "code": {"code": 0.85, "chat": 0.15},
    "chat": {"chat": 0.9, "code": 0.1},
    "mixed": {"code": 0.45, "chat": 0.4, "low": 0.15},
    "low": {"low": 1.0},
}


# -- the decoded texts ---------------------------------------------------------------------------------------------


class Text:
    """One request: its length, and for each token how likely a draft of it is right, and the coin that decides."""

    def __init__(self, kind: str, n_max: int, rng: np.random.Generator) -> None:
        self.n = int(rng.integers(64, 400))
        kinds, shares = zip(*TEXTS[kind].items(), strict=True)
        offset = rng.normal(0.0, 0.04)  # of this request: texts differ
        levels, fades = np.empty(self.n + n_max), np.empty(self.n + n_max)
        at = 0
        while at < len(levels):
            now = kinds[rng.choice(len(kinds), p=shares)]
            n = int(rng.integers(30, 150))
            levels[at : at + n] = np.clip(LEVELS[now] + offset, 0.02, 0.98)
            fades[at : at + n] = FADES[now]
            at += n
        self.coins = rng.random(self.n + n_max)
        places = np.arange(n_max)
        windows = np.lib.stride_tricks.sliding_window_view
        self.chances = windows(levels, n_max)[: self.n] * windows(fades, n_max)[: self.n] ** places

    def n_right(self, at: int, n_draft: int) -> int:
        wrong = self.coins[at : at + n_draft] >= self.chances[at, :n_draft]
        return int(wrong.argmax()) if wrong.any() else n_draft

    def expected(self, at: int, n_draft: int) -> float:
        """Drafts that are right in the mean: a rate by these is less a matter of luck than one by coins."""
        return float(self.chances[at, :n_draft].cumprod().sum())

    def would_be_right(self, at: int, n_right: int) -> list[bool]:
        """Of the tokens that a round with so many right drafts gives: whether each is right at its place of a draft."""
        places = range(min(n_right + 1, self.chances.shape[1]))
        return [bool(self.coins[at + i] < self.chances[at, i]) for i in places]


@dataclass
class Seat:
    """A slot and its request."""

    text: Text
    at: int = 0
    n_text: int = 0
    silent: int = 0


# (slot, most drafts) of busy ones and chances to lengths
Picker = Callable[[Sequence[tuple[int, int]], Floats], list[int]]


# -- the deciders --------------------------------------------------------------------------------------------------


def oracle(card: Card) -> Picker:
    """The best expected tokens a millisecond of each round."""

    def pick(caps: Sequence[tuple[int, int]], chances: Floats) -> list[int]:
        return best_lengths(card, caps, np.multiply.accumulate(chances, axis=1))

    return pick


class Seer:
    """Knows costs, the making of texts, and for each past token whether a draft of it would have been right: more than any controller
    receives. Its loss is the least cost of not knowing a text before it is read.

    A state: kind of segment, its tokens so far, how this request differs.
    """

    OFFSETS, WEIGHTS = np.array([-1.5, -0.75, 0.0, 0.75, 1.5]), np.array([0.12, 0.22, 0.32, 0.22, 0.12])

    def __init__(self, card: Card, kind: str) -> None:
        self.card = card
        names, shares = zip(*TEXTS[kind].items(), strict=True)
        level = np.array([LEVELS[name] for name in names])[:, None, None] + 0.04 * self.OFFSETS
        fade = np.array([FADES[name] for name in names])[:, None, None, None]
        level = np.clip(level, 0.02, 0.98)[..., None] * fade ** np.arange(card.n_max)
        self.chance = np.broadcast_to(level, (len(names), 150, len(self.OFFSETS), card.n_max))
        self.shares = np.array(shares)[:, None]
        age = np.arange(150)
        self.ends = np.where(age >= 29, 1 / np.maximum(149 - age, 1), 0.0)[
            :, None
        ]  # behind its token age + 1
        self.survive = np.stack([self._survives(place) for place in range(card.n_max)], -1)
        self.fresh = np.zeros(self.chance.shape[:-1])
        self.fresh[:, 0] = self.shares * self.WEIGHTS
        self.beliefs: dict[int, Floats] = {}

    def _survives(self, place: int) -> Floats:
        """Of each state: that drafts up to this place are right."""
        u = self.chance[..., place]
        for i in reversed(range(place)):
            later = np.concatenate([u[:, 1:], u[:, -1:]], 1)
            u = self.chance[..., i] * (
                (1 - self.ends) * later + self.ends * (self.shares[..., None] * u[:, :1]).sum(0)
            )
        return u

    def saw(self, slot: int, right: Sequence[bool]) -> None:
        """Whether a draft of each token that a round gave is right, at its place."""
        b = self.beliefs.get(slot, self.fresh)
        for place, is_right in enumerate(right):
            if place < self.card.n_max:
                b = b * (self.chance[..., place] if is_right else 1 - self.chance[..., place])
            ending = (b * self.ends).sum((0, 1))
            b = np.concatenate([(self.shares * ending)[:, None], (b * (1 - self.ends))[:, :-1]], 1)
            b = b / b.sum()
        self.beliefs[slot] = b

    def __call__(self, caps: Sequence[tuple[int, int]], chances: Floats) -> list[int]:
        survive = [
            np.einsum("kao,kaoi->i", self.beliefs.get(slot, self.fresh), self.survive)
            for slot, _ in caps
        ]
        return best_lengths(self.card, caps, np.array(survive))


def best_lengths(card: Card, caps: Sequence[tuple[int, int]], survive: Floats) -> list[int]:
    """The best expected tokens a millisecond of a round."""
    busy, most = len(caps), np.array([cap for _, cap in caps])
    best, best_rate = [0] * busy, busy / float(card.verify_ms(busy_rows(busy), busy))
    first = (-survive[:, 0]).argsort(kind="stable")
    lives = sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, busy} & set(range(1, busy + 1)))
    for depth in range(1, card.n_max + 1) if card.chained or card.block else (card.n_max,):
        for live in lives:
            may = np.zeros(busy, bool)
            may[first[:live]] = True
            asked = (np.arange(card.n_max) < np.minimum(most, depth)[:, None]) & may[:, None]
            who = asked.nonzero()[0]
            if not len(who):
                continue
            order = (-survive[asked]).argsort(kind="stable")
            tokens = busy + survive[asked][order].cumsum()
            rows = graph_rows(busy + 1 + np.arange(len(who)))
            rate = tokens / (card.verify_ms(rows, busy) + card.draft_ms(live, depth))
            n = int(rate.argmax())
            if rate[n] > best_rate:
                best, best_rate = (
                    np.bincount(who[order][: n + 1], minlength=busy).tolist(),
                    float(rate[n]),
                )
    return best


def plain(caps: Sequence[tuple[int, int]], chances: Floats) -> list[int]:
    return [0] * len(caps)


def busy_rows(n: int) -> int:
    """Of a graph that holds so many."""
    return SIZES[bisect.bisect_left(SIZES, n)] if n <= SIZES[-1] else n


def graph_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    sizes = np.array(SIZES)
    return np.where(
        rows <= SIZES[-1], sizes[np.searchsorted(sizes, rows).clip(max=len(sizes) - 1)], rows
    )


# -- the machine ---------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """Rounds of one card under one decider."""

    card: Card
    kind: str
    streams: Callable[[int], int]  # by round: how many are busy, at most
    n_slot: int
    seed: int
    pick: Picker | None = None  # None: the controller
    noise: float = 0.02
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.seed, 1))
        most = most_rows(self.n_slot, self.card.n_max + 1)
        timer = Timer(lambda n_row: bucket_of(n_row, most) or bucket(n_row))
        self.controller = Controller(
            self.n_slot,
            self.card.n_max,
            chained=self.card.chained,
            block=self.card.block,
            costs=Costs(timer),
        )
        self.seats: dict[int, Seat] = {}
        self.n_seated = [0] * self.n_slot
        self.late: list[tuple[int, int, int]] = []
        self.ms = self.tokens = 0.0
        self.picks: list[list[int]] = []
        if self.pick is None:
            self.warm_up()

    def warm_up(self) -> None:
        """As `engine/load/warmup.py`."""
        card = self.card
        for busy, drafts in rehearsed(self.n_slot, card.n_max):
            for live, n in drafts:
                self.controller.force = live, n
                for _ in range(N_ROUND):
                    rows = busy + live * n
                    self.controller.timed(rows, *self.told(card, rows, busy, live, n, 0.0))
        self.controller.forget_acceptance()

    def told(
        self, card: Card, rows: int, busy: int, live: int, passes: int, waking: float
    ) -> tuple[float, int, int, float]:
        """A round's time with its noise, as `Controller.timed` wants it."""
        self.took = [
            float(card.verify_ms(busy_rows(rows), busy)),
            float(card.draft_ms(live, passes)) + waking,
        ]
        ms = [t * (1 + self.noise * self.rng.random()) for t in self.took]
        if self.rng.random() < 0.005:  # a hiccup of the machine
            ms[0] *= self.rng.uniform(1.2, 2.0)
        return ms[0], live, passes, ms[1]

    def seat(self, n: int) -> bool:
        """Requests join free slots, up to n; True if any did. The k-th request of a slot is the same for every decider."""
        joined = False
        for slot in range(self.n_slot):
            if len(self.seats) >= n:
                break
            if slot not in self.seats:
                rng = np.random.default_rng((self.seed, slot, self.n_seated[slot]))
                self.seats[slot] = Seat(Text(self.kind, self.card.n_max, rng))
                self.n_seated[slot] += 1
                self.controller.begin(slot)
                joined = True
        return joined

    def round(self, n_round: int) -> None:
        joined = self.seat(self.streams(n_round))
        caps = [
            (slot, max(0, min(self.card.n_max, s.text.n - s.at - 1)))
            for slot, s in sorted(self.seats.items())
        ]
        if self.pick is None:
            picked = [n for _, n in planned(self.controller, caps).drafts]
        else:
            picked = self.pick(
                caps, np.array([self.seats[slot].text.chances[self.seats[slot].at] for slot, _ in caps])
            )
        for verdict in self.late:
            self.controller.record(*verdict)
        self.late = []
        asleep = max(
            (self.seats[slot].silent for (slot, _), n in zip(caps, picked, strict=True) if n), default=0
        )
        for (slot, _), n in zip(caps, picked, strict=True):
            s = self.seats[slot]
            right = s.text.n_right(s.at, n)
            self.late.append((slot, n, right))
            if isinstance(self.pick, Seer):
                self.pick.saw(slot, s.text.would_be_right(s.at, right))
            s.silent = 0 if n or (any(picked) and not self.card.chained) else s.silent + 1
            self.tokens += 1 + s.text.expected(s.at, n)
            s.at += right + 1
            if s.at >= s.text.n:
                del self.seats[slot]
                if isinstance(self.pick, Seer):
                    self.pick.beliefs.pop(slot, None)
        rows, live = len(caps) + sum(picked), sum(n > 0 for n in picked)
        times = self.told(
            self.card, rows, len(caps), live, max(picked), self.card.waking * min(asleep, 16) / 16
        )
        if not joined:
            self.controller.timed(rows, *times)
        self.ms += sum(self.took)
        self.picks.append(picked)

    def run(self, n_round: int) -> float:
        """Tokens a millisecond."""
        for i in range(n_round):
            self.round(i)
        return self.tokens / self.ms


def steady(n: int) -> Callable[[int], int]:
    return lambda n_round: n


def swinging(most: int) -> Callable[[int], int]:
    """One stream to `most` and back, by twos, 60 rounds each."""
    steps = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    steps += steps[-2:0:-1]
    return lambda n_round: steps[n_round // 60 % len(steps)]


@dataclass(frozen=True)
class Cell:
    """One line of the table: means over seeds."""

    card: str
    text: str
    streams: str
    rate: float  # of the controller, tokens a millisecond
    oracle: float
    plain: float
    n_draft: float  # mean of a slot's round
    oracle_draft: float
    seer: float = 0.0

    @property
    def regret(self) -> float:
        return 1 - self.rate / self.oracle

    @property
    def of_plain(self) -> float:
        return self.rate / self.plain


def cell(
    card: str,
    text: str,
    streams: int,
    n_round: int,
    seeds: Sequence[int],
    n_slot: int = 64,
    bound: bool = False,
) -> Cell:
    """streams: 0 swings between 1 and n_slot."""
    busy = steady(streams) if streams else swinging(n_slot)
    c = CARDS[card]
    sums = np.zeros(6)
    for seed in seeds:
        runs = [Served(c, text, busy, n_slot, seed, pick) for pick in (None, oracle(c), plain)]
        rates = [run.run(n_round) for run in runs]
        drafts = [sum(map(sum, run.picks)) / sum(map(len, run.picks)) for run in runs[:2]]
        seer = Served(c, text, busy, n_slot, seed, Seer(c, text)).run(n_round) if bound else 0.0
        sums += [*rates, *drafts, seer]
    return Cell(card, text, str(streams) if streams else f"1 to {n_slot}", *(sums / len(seeds)).tolist())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=CARDS)
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 4, 8, 16, 32, 64, 0],
        help="0: between 1 and --slots",
    )
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--most", type=float, default=0.03)
    parser.add_argument(
        "--bound", action="store_true", help="also what learning costs at the least, behind the regret"
    )
    a = parser.parse_args()
    print("| card | text | streams | regret | of plain | drafts a slot's round, the oracle's |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    failed = []
    for card in a.cards:
        for text in a.texts:
            for streams in a.streams:
                c = cell(card, text, streams, a.rounds, range(a.seeds), a.slots, a.bound)
                if c.regret > a.most or c.of_plain < 0.98:
                    failed.append(c)
                mark = (f" ({1 - c.seer / c.oracle:.2%})" if a.bound else "") + (
                    " **" if c in failed else ""
                )
                print(
                    f"| {card} | {text} | {c.streams} | {c.regret:.2%}{mark} | {c.of_plain:.3f} | {c.n_draft:.2f}, {c.oracle_draft:.2f} |",
                    flush=True,
                )
    print(f"{len(failed)} cells above {a.most:.0%} or below 0.98 of plain")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
