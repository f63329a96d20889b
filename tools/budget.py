"""Simulate who shares the rows of a verify over all slots how well. Nothing is loaded and no GPU is needed.

python tools/budget.py [--card 27b-dflash] [--streams 1 8 32 64] [--lens 1.3 5] [--traces FILE] [--rounds 1500] [--seeds 2]

Slots take turns through --lens: with 1.3 and 5 half of them have texts of 1.3 tokens a round, and half of 5, if whole blocks are drafted.
Texts are recorded drafts of the demo pair (`tools/record_drafts.py`): of each token how sure the drafter was of what it drafted there, and how
many drafts were right. A slot's texts are drawn so that its mean is the asked one. Times are those of a card of `tools/regret.py`.

Deciders, all over the same texts:

* apart: each slot takes the length that would be best if all slots were as it is, by its own acceptance and the measured costs.
* one length: of all slots, by their mean acceptance and the costs.
* today: the engine's `Controller`, which does not know how sure the drafter is.
* sure: the same `Controller`, which cuts drafts by that before they are verified.
* vLLM: every slot drafts a whole block; survival by a logistic curve of the drafter's log-odds alone, a bias a position, fitted again every
  100 rounds; rows go to the likeliest of all slots, as many as give most tokens a millisecond.
* rates: knows the costs and the mean chance by position of each text. The bound of a choice that does not see how sure a drafter is.
* sight: knows the costs, each text's mean and how sure the drafter is, by curves fitted to the whole recording. The bound of one that does.
* hindsight: knows which drafts are right.

"rows ahead": the controller as rounds that are launched ahead have it: verdicts a round late, and no drafts on the host.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from regret import CARDS, Card, best_lengths, busy_rows, graph_rows, planned

from pyspec.draft.blocks import BlockLength
from pyspec.engine.load.warmup import N_ROUND, rehearsed
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.engine.policy.estimate import Acceptance, log_odds
from pyspec.slots.arena import bucket_of, most_rows

Floats = NDArray[np.float64]
TRACES = Path(__file__).parents[1] / "tests" / "fixtures" / "demo_drafts.npz"
STEPS, ZERO = 8, 128  # of a stored log-odds, as in record_drafts.py
PER_TEXT = 4  # recorded texts in a request


@dataclass(frozen=True)
class Traces:
    """Recorded texts: of each row the drafter's probabilities [row, n_draft] and how many of its drafts were right."""

    texts: list[tuple[Floats, NDArray[np.int64]]]

    @property
    def n_draft(self) -> int:
        return self.texts[0][0].shape[1]

    @staticmethod
    @cache
    def read(path: Path) -> Traces:
        with np.load(path) as found:
            ends, sure, right = found["ends"], found["sure"], found["right"].astype(np.int64)
        probs = 1 / (1 + np.exp(-(sure.astype(np.float64) - ZERO) / STEPS))
        starts = [0, *ends[:-1].tolist()]
        pairs = zip(starts, ends.tolist(), strict=True)
        return Traces([(probs[a:b], right[a:b]) for a, b in pairs if b > a])

    def shares(self, mean_len: float) -> Floats:
        """How often each text is drawn so that whole blocks give so many tokens a round."""
        walks = np.array([_walk(right) for _, right in self.texts])  # tokens, rounds

        def mean(tilt: float) -> float:
            w = np.exp(tilt * (walks[:, 0] / walks[:, 1] - mean_len))
            return float((w * walks[:, 0]).sum() / (w * walks[:, 1]).sum())

        low, high = -20.0, 20.0
        for _ in range(60):
            tilt = (low + high) / 2
            low, high = (tilt, high) if mean(tilt) < mean_len else (low, tilt)
        w = np.exp(low * (walks[:, 0] / walks[:, 1] - mean_len))
        return w / w.sum()


def _walk(right: NDArray[np.int64]) -> tuple[int, int]:
    at = n = 0
    while at < len(right):
        at, n = at + int(right[at]) + 1, n + 1
    return at, n


@dataclass
class Seat:
    """A slot's request, and where it is."""

    kind: int
    texts: list[tuple[Floats, NDArray[np.int64]]]
    at: int = 0

    def __post_init__(self) -> None:
        self.probs = np.concatenate([p for p, _ in self.texts])
        self.right = np.concatenate([n for _, n in self.texts])
        place = np.arange(self.probs.shape[1])
        each = [np.tile((n[:, None] > place).mean(axis=0), (len(n), 1)) for _, n in self.texts]
        self.rates = np.concatenate(each)

    @property
    def survive(self) -> Floats:
        """How often drafts up to each position are right in the part of the text that it is in."""
        rates: Floats = self.rates[self.at]
        return rates


class Decider(ABC):
    """Lengths to draft, and lengths to verify once the drafts are known."""

    late = False  # verdicts come a round late, and drafts are never seen

    def __init__(self, sim: Machine) -> None:
        self.sim, self.card = sim, sim.card

    def begin(self, slot: int) -> None:  # noqa: B027 - not every policy learns
        pass

    @abstractmethod
    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        """Tokens to draft in each slot."""

    def cut(self, caps: list[tuple[int, int]], asked: list[int], probs: list[Floats]) -> list[int]:
        return asked

    def record(self, slot: int, n_draft: int, n_right: int) -> None:  # noqa: B027 - not every policy learns
        pass

    def timed(self, rows: int, verify: float, live: int, passes: int, draft: float) -> None:  # noqa: B027 - not every policy learns
        pass


class Plain(Decider):
    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        return [0] * len(caps)


class Engine(Decider):
    """The controller. sees: how sure a drafter is."""

    sees = False

    def __init__(self, sim: Machine) -> None:
        super().__init__(sim)
        n_slot, n_max = sim.n_slot, sim.card.n_max
        most = most_rows(n_slot, n_max + 1)
        timer = Timer(lambda n_row: bucket_of(n_row, most) or bucket(n_row))
        card = sim.card
        self.controller = Controller(
            n_slot, n_max, chained=card.chained, block=card.block, costs=Costs(timer)
        )
        for busy, drafts in rehearsed(n_slot, n_max):
            for live, n in drafts:
                self.controller.force = live, n
                for _ in range(N_ROUND):
                    rows = busy + live * n
                    verify, draft = sim.noisy(rows, busy, live, n)
                    self.controller.timed(rows, verify, live, n, draft)
        self.controller.forget_acceptance()

    def begin(self, slot: int) -> None:
        self.controller.begin(slot)

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        return [n for _, n in planned(self.controller, caps, tells=self.sees).asked]

    def cut(self, caps: list[tuple[int, int]], asked: list[int], probs: list[Floats]) -> list[int]:
        if not self.sees:
            return asked
        chosen = [(slot, n) for (slot, _), n in zip(caps, asked, strict=True)]
        sure = {slot: p.tolist() for (slot, _), p in zip(caps, probs, strict=True)}
        return [n for _, n in self.controller.cut(chosen, sure)]

    def record(self, slot: int, n_draft: int, n_right: int) -> None:
        self.controller.record(slot, n_draft, n_right)

    def timed(self, *took: float) -> None:
        self.controller.timed(*took)


class Ahead(Engine):
    late = True


class Sure(Engine):
    sees = True


class Apart(Engine):
    """Beliefs of the controller's kind, costs as they are, each slot for itself."""

    def believed(self, caps: list[tuple[int, int]]) -> Floats:
        return self.controller.texts.survive([slot for slot, _ in caps])

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        survive, busy = self.believed(caps), len(caps)
        n = np.arange(self.card.n_max + 1)
        ms = np.array([self.sim.ms_of(busy * (1 + k), busy, busy if k else 0, k) for k in n.tolist()])
        rates = (1 + np.pad(survive.cumsum(axis=1), ((0, 0), (1, 0)))) / ms
        best = rates.argmax(axis=1)
        self.controller.n_round += 1
        if not best.any() and self.controller.n_round % 64 == 0:
            best[:] = 2  # asks again
        return [min(int(k), cap) for k, (_, cap) in zip(best, caps, strict=True)]


class OneLength(Apart):
    def believed(self, caps: list[tuple[int, int]]) -> Floats:
        own = super().believed(caps)
        return np.broadcast_to(own.mean(axis=0), own.shape)


class Vllm(Decider):
    EVERY, SLOPE, BIAS, DAMPING, RIDGE = 100, 0.5, -0.2, 50.0, 1e-3

    def __init__(self, sim: Machine) -> None:
        super().__init__(sim)
        self.slope, self.bias = self.SLOPE, np.full(sim.card.n_max, self.BIAS)
        self.seen: list[tuple[int, float, bool]] = []
        self.probs: dict[int, Floats] = {}
        self.n_round = 0

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        self.n_round += 1
        if self.n_round % self.EVERY == 0:
            self.fit()
        return [cap for _, cap in caps]

    def cut(self, caps: list[tuple[int, int]], asked: list[int], probs: list[Floats]) -> list[int]:
        self.probs = {slot: p for (slot, _), p in zip(caps, probs, strict=True)}
        survive = [
            (1 / (1 + np.exp(-(self.slope * log_odds(p) + self.bias[: len(p)])))).cumprod()
            for p in probs
        ]
        return take_best(self.sim, survive, sum(n > 0 for n in asked), max(asked))

    def record(self, slot: int, n_draft: int, n_right: int) -> None:
        for i in range(min(n_draft, n_right + 1)):
            self.seen.append((i, float(log_odds(self.probs[slot][i])), i < n_right))

    def fit(self) -> None:
        if not self.seen:
            return
        place, x, y = (np.array(v) for v in zip(*self.seen[-4000:], strict=True))
        design = np.zeros((len(x), 1 + len(self.bias)))
        design[:, 0] = x
        design[np.arange(len(x)), 1 + place] = 1
        w = np.array([self.slope, *self.bias])
        for _ in range(3):
            a = 1 / (1 + np.exp(-design @ w))
            h = design.T @ (design * (a * (1 - a))[:, None]) + (self.RIDGE + self.DAMPING) * np.eye(
                len(w)
            )
            w = w + np.linalg.solve(h, design.T @ (y - a))
        self.slope, self.bias = float(w[0]), w[1:]
        self.seen = self.seen[-4000:]


def take_best(
    sim: Machine, survive: list[Floats], live: int, depth: int, theta: float = 0.0
) -> list[int]:
    """Rows of all slots, likeliest first, as many as give most tokens a millisecond. The drafts have been paid for."""
    busy = len(survive)
    who = np.repeat(np.arange(busy), [len(s) for s in survive])
    gain = np.concatenate(survive) if busy else np.zeros(0)
    order = (-gain).argsort(kind="stable")
    rows = graph_rows(busy + np.arange(len(who) + 1))
    ms = sim.card.verify_ms(rows, busy) + sim.card.draft_ms(live, max(depth, 1))
    tokens = busy + np.concatenate([[0.0], gain[order].cumsum()])
    n = int((tokens - theta * ms if theta else tokens / ms).argmax())
    return np.bincount(who[order][:n], minlength=busy).tolist()


class Rates(Decider):
    """Knows the mean chance by position of the text that each slot is in."""

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        survive = np.array([self.sim.seats[slot].survive for slot, _ in caps])
        return best_lengths(self.card, caps, survive)


class Sight(Decider):
    """Drafts whole blocks for all slots; cuts by the best curves."""

    def __init__(self, sim: Machine) -> None:
        super().__init__(sim)
        self.fits = sim.fits()

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        return [cap for _, cap in caps]

    def chances(self, slot: int, p: Floats) -> Floats:
        survive = self.sim.seats[slot].survive[None, : len(p)]
        return self.fits.chances(self.fits.features(p[None], survive))[0].cumprod()

    def cut(self, caps: list[tuple[int, int]], asked: list[int], probs: list[Floats]) -> list[int]:
        survive = [self.chances(slot, p) for (slot, _), p in zip(caps, probs, strict=True)]
        if all(not len(s) for s in survive):
            return [0] * len(caps)
        theta = self.sim.tokens / self.sim.ms if self.sim.n_round > 50 else 0.0
        return take_best(self.sim, survive, sum(n > 0 for n in asked), max(asked), theta)


class SightOrNone(Sight):
    """Drafts for the slots that `Rates` drafts for."""

    def ask(self, caps: list[tuple[int, int]]) -> list[int]:
        survive = np.array([self.sim.seats[slot].survive for slot, _ in caps])
        picked = best_lengths(self.card, caps, survive)
        return [cap if n else 0 for n, (_, cap) in zip(picked, caps, strict=True)]


class Hindsight(Sight):
    def chances(self, slot: int, p: Floats) -> Floats:
        seat = self.sim.seats[slot]
        return (np.arange(len(p)) < seat.right[seat.at]).astype(float)


DECIDERS: dict[str, type[Decider]] = {
    "plain": Plain, "apart": Apart, "one length": OneLength, "rows ahead": Ahead, "today": Engine, "sure": Sure, "vLLM": Vllm,
    "rates": Rates, "sight": Sight, "sight of the best": SightOrNone, "hindsight": Hindsight,
}  # fmt: skip


@dataclass
class Machine:
    """Rounds of one card with `streams` slots, which take turns through `lens`."""

    card: Card
    traces: Traces
    lens: Sequence[float]
    streams: int
    seed: int
    n_slot: int = 64
    noise: float = 0.02
    waits: float = 0.0  # ms of a round in which the host reads a verify before it launches the next
    seats: dict[int, Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.seed, 1))
        self.n_seated = [0] * self.n_slot
        self.ms = self.tokens = 0.0
        self.n_round = self.n_row = 0
        self.drafts = np.zeros((len(self.lens), 2))
        self.shares = [self.traces.shares(mean) for mean in self.lens]

    def fits(self) -> Acceptance:
        """Curves of the whole recording, as these slots have it."""
        found = Acceptance(1, self.traces.n_draft)
        for _ in range(2):
            for shares in self.shares:
                for i in np.random.default_rng(0).choice(len(shares), 300, p=shares):
                    probs, right = self.traces.texts[i]
                    survive = np.tile(
                        (right[:, None] > np.arange(probs.shape[1])).mean(axis=0), (len(probs), 1)
                    )
                    x = found.features(probs, survive)
                    found.fit(x, [probs.shape[1]] * len(x), right.tolist())
        return found

    def ms_parts(self, rows: int, busy: int, live: int, passes: int) -> tuple[float, float]:
        return float(self.card.verify_ms(busy_rows(rows), busy)), float(self.card.draft_ms(live, passes))

    def ms_of(self, rows: int, busy: int, live: int, passes: int) -> float:
        return sum(self.ms_parts(rows, busy, live, passes))

    def noisy(self, rows: int, busy: int, live: int, passes: int) -> tuple[float, float]:
        verify, draft = self.ms_parts(rows, busy, live, passes)
        return verify * (1 + self.noise * self.rng.random()), draft * (
            1 + self.noise * self.rng.random()
        )

    def seat(self, decider: Decider) -> bool:
        free = [slot for slot in range(self.streams) if slot not in self.seats]
        for slot in free:
            rng = np.random.default_rng((self.seed, slot, self.n_seated[slot]))
            kind = (slot + (self.seed if self.streams == 1 else 0)) % len(self.lens)
            texts = [
                self.traces.texts[i]
                for i in rng.choice(len(self.traces.texts), PER_TEXT, p=self.shares[kind])
            ]
            self.seats[slot] = Seat(kind, texts)
            self.n_seated[slot] += 1
            decider.begin(slot)
        return bool(free)

    def run(self, kind: type[Decider], n_round: int) -> float:
        """Tokens a millisecond."""
        decider, late = kind(self), list[tuple[int, int, int]]()
        for _ in range(n_round):
            joined = self.seat(decider)
            seats = sorted(self.seats.items())
            caps = [(slot, min(self.card.n_max, len(s.right) - s.at - 1)) for slot, s in seats]
            asked = decider.ask(caps)
            if decider.late:
                for verdict in late:
                    decider.record(*verdict)
            probs = [s.probs[s.at, :n] for (_, s), n in zip(seats, asked, strict=True)]
            picked = decider.cut(caps, asked, probs)
            late = []
            for (slot, s), n in zip(seats, picked, strict=True):
                right = min(n, int(s.right[s.at]))
                late.append((slot, n, right))
                s.at += right + 1
                self.tokens += right + 1
                self.drafts[s.kind] += n, 1
                if s.at >= len(s.right):
                    del self.seats[slot]
            if not decider.late:
                for verdict in late:
                    decider.record(*verdict)
            rows, live, passes = len(caps) + sum(picked), sum(n > 0 for n in asked), max(asked)
            self.ms += self.ms_of(rows, len(caps), live, passes) + (0.0 if decider.late else self.waits)
            verify, draft = self.noisy(rows, len(caps), live, passes)
            if not joined:
                decider.timed(rows, verify, live, passes, draft)
            self.n_round += 1
        return self.tokens / self.ms


def card_for(name: str, traces: Traces) -> Card:
    """A card whose drafter drafts what the recorded one does."""
    card, n = CARDS[name], traces.n_draft
    return replace(
        card, n_max=min(n, card.n_max) if card.chained else n, block=card.block and BlockLength(n + 1)
    )


def rates(
    card: Card,
    traces: Traces,
    lens: Sequence[float],
    streams: int,
    n_round: int,
    seeds: Sequence[int],
    names: Sequence[str],
    waits: float = 0.0,
) -> dict[str, float]:
    """Tokens a millisecond of each decider, over all seeds."""
    return {
        name: float(np.mean([Machine(card, traces, lens, streams, seed, waits=waits).run(DECIDERS[name], n_round) for seed in seeds]))
        for name in names
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--card", default="27b-dflash", choices=[name for name, card in CARDS.items() if card.block]
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--lens", type=float, nargs="+", default=[1.3, 5.0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--waits", type=float, default=0.0, help="ms a round of the host's reading, but ahead"
    )
    parser.add_argument("--deciders", nargs="+", default=list(DECIDERS), choices=DECIDERS)
    a = parser.parse_args()
    traces = Traces.read(a.traces)
    card = card_for(a.card, traces)
    print(
        "| streams | "
        + " | ".join(a.deciders)
        + " | sure over apart | over today | regret to rates, to sight |"
    )
    print("| --- " * (len(a.deciders) + 4) + "|", flush=True)
    for streams in a.streams:
        r = rates(card, traces, a.lens, streams, a.rounds, range(a.seeds), a.deciders, a.waits)
        cells = [f"{1e3 * r[name]:.0f}" for name in a.deciders]
        if {"sure", "apart", "today", "rates", "sight"} <= r.keys():
            cells += [f"{r['sure'] / r['apart']:.3f}", f"{r['sure'] / r['today']:.3f}"]
            cells.append(
                f"{1 - r['today'] / r['rates']:.2%}, {1 - r['sure'] / max(r['sight'], r.get('sight of the best', 0)):.2%}"
            )
        print(f"| {streams} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
