"""Replay recorded texts and measured costs through the policies that choose drafts. Nothing is loaded and no GPU is needed.

python tools/replay.py [--only NAME ...] [--off POLICY ...] [--rounds 400] [--json OUT]
python tools/replay.py --compare OLD.json NEW.json

Run it with another tree's package on PYTHONPATH to compare two trees on the same texts: requests, coins and costs are the same whatever
is chosen. --off runs each recording again without one policy.

Recordings: drafts of the demo pair (`tools/record_drafts.py`) drawn so that whole blocks give so many tokens a round; texts of `tools/regret.py`
on the cards measured there; suffix drafts of Gemma 3 270M on real texts (`tools/record_rounds.py`) with the times of its own rounds. Requests
join as others end, with a prompt that the round reads beside. What a cut takes on this host counts as a round's time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from budget import TRACES, Traces, card_for
from numpy.typing import NDArray
from regret import CARDS, Card, busy_rows, planned
from regret import Text as DrawnText

from pyspec.engine.load.warmup import N_ROUND, rehearsed
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.plan import RoundPlan
from pyspec.slots.arena import bucket_of, most_rows

Floats = NDArray[np.float64]
GEMMA = TRACES.with_name("gemma_rounds.npz")
PROMPT_MS = {"27b": 1 / 9.0, "35b": 1 / 30.0, "122b": 1 / 16.0}  # a row of a prompt, of the log


@dataclass
class Text:
    """right: of drafts at each token; expected: the same in the mean of coins; sure: as recorded, by token and draft; offers: survival of
    drafts that need no drafter."""

    right: NDArray[np.int64]
    expected: Floats | None = None  # [token, 1 + drafts]
    sure: Floats | None = None
    offers: Floats | None = None


@dataclass(frozen=True)
class Recording:
    """One run: `streams` requests at a time in `n_slot` slots. text: by a generator of numbers. prompt: rows of each."""

    name: str
    card: Card
    text: Callable[[np.random.Generator], Text]
    streams: int
    prompt: int = 300
    row_ms: float = 0.1  # of a prompt
    lookup_ms: float = 0.0  # of a slot's look-up
    n_own: int = -1
    then: Callable[[np.random.Generator], Text] | None = (
        None  # makes each slot's texts from the third on
    )
    busy: float = 0.0  # share of the warm-up's times, and of the first rounds', that other work makes 3 to 12 times as long


def drawn(kind: str, n_max: int) -> Callable[[np.random.Generator], Text]:
    def make(rng: np.random.Generator) -> Text:
        t = DrawnText(kind, n_max, rng)
        means = np.pad(t.chances.cumprod(axis=1).cumsum(axis=1), ((0, 0), (1, 0)))
        return Text(np.array([t.n_right(i, n_max) for i in range(t.n)]), means)

    return make


def demo(mean: float) -> Callable[[np.random.Generator], Text]:
    traces = Traces.read(TRACES)
    shares = traces.shares(mean)

    def make(rng: np.random.Generator) -> Text:
        found = [traces.texts[i] for i in rng.choice(len(traces.texts), 4, p=shares)]
        return Text(np.concatenate([n for _, n in found]), None, np.concatenate([p for p, _ in found]))

    return make


@cache
def gemma() -> tuple[list[Text], Card, float, float]:
    """Answers, costs by rows, and milliseconds of a prompt's row and of a look-up."""
    with np.load(GEMMA) as f:
        ends, right, offer, rounds, lookups = (
            f[k] for k in ("ends", "right", "offer", "rounds", "lookups")
        )
    parts = np.split(np.arange(len(right)), ends[:-1])
    texts = [Text(right[p].astype(np.int64), None, None, offer[p] / 255) for p in parts]
    rows, _, read, us = rounds.T
    plain = {n: float(np.median(us[(rows == n) & (read == 0)])) / 1e3 for n in set(rows[read == 0].tolist())
             if ((rows == n) & (read == 0)).sum() >= 3}  # fmt: skip
    sizes = sorted(plain)
    ms = np.maximum.accumulate([plain[n] for n in sizes])
    row = float(np.median(us[read > 64] / rows[read > 64])) / 1e3
    card = Card(dict(zip(sizes, ms.tolist(), strict=True)), 0.0, {1: 0.0}, 15, chained=False, waking=0.0)
    return texts, card, row, float((lookups[:, 1] / lookups[:, 0]).mean()) / 1e3


def recordings() -> list[Recording]:
    block = card_for("27b-dflash", Traces.read(TRACES))
    found = [
        Recording(f"27b-dflash {mean} tokens, {n}", block, demo(mean), n, row_ms=PROMPT_MS["27b"])
        for mean in (1.05, 1.2, 2.2, 3.0, 6.0)
        for n in (8, 64)
    ]
    found += [
        Recording(
            f"{name} {kind}, {n}",
            CARDS[name],
            drawn(kind, CARDS[name].n_max),
            n,
            row_ms=PROMPT_MS[name.split("-")[0]],
        )
        for name, kinds in (
            ("27b-mtp", ("mixed", "low", "code")),
            ("35b-mtp", ("mixed", "low")),
            ("122b-mtp", ("chat", "low")),
        )
        for kind in kinds
        for n in (1, 16, 64)
    ]
    found += [
        Recording(f"27b-mtp mixed after a busy start, {n}", CARDS["27b-mtp"], drawn("mixed", 3), n, busy=0.5)
        for n in (1, 8)
    ] + [
        Recording(f"27b-mtp low, then code, {n}", CARDS["27b-mtp"], drawn("low", 3), n, then=drawn("code", 3))
        for n in (1, 8, 32)
    ]  # fmt: skip
    if GEMMA.exists():
        texts, card, row, look = gemma()
        pick = lambda rng: texts[rng.integers(len(texts))]  # noqa: E731
        found += [
            Recording(f"Gemma 270M suffix, {n}", card, pick, n, 400, row, look, n_own=0)
            for n in (1, 8, 16)
        ]
        fast = Card(CARDS["35b-mtp"].verify, 0.03, {1: 0.0}, 15, chained=False, waking=0.0)
        found += [
            Recording(f"35b suffix, {n}", fast, pick, n, 400, PROMPT_MS["35b"], 0.02, n_own=0) for n in (1, 16)
        ]  # fmt: skip
    return found


@dataclass
class Seat:
    text: Text
    at: int = 0
    unread: int = 0  # rows of the prompt


@dataclass
class Machine:
    """Rounds of one recording under the package's policies."""

    r: Recording
    seed: int = 0
    n_slot: int = 64
    ms: float = 0.0
    tokens: float = 0.0
    drafted: int = 0
    host_ms: float = 0.0
    n_told: int = 0
    seats: dict[int, Seat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        r = self.r
        self.rng, self.n_seated = np.random.default_rng((self.seed, 1)), [0] * self.n_slot
        self.c = controller_of(r.card, self.n_slot, r.n_own)
        self.looks = r.lookup_ms > 0
        if r.n_own:
            for busy, drafts in rehearsed(self.n_slot, r.card.n_max):
                for live, n in drafts:
                    self.c.force = live, n
                    for _ in range(N_ROUND):
                        self.c.timed(busy + live * n, *self.told(busy + live * n, busy, live, n))
            self.c.forget_acceptance()

    def told(self, rows: int, busy: int, live: int, n: int) -> tuple[float, int, int, float]:
        verify, draft = (
            float(self.r.card.verify_ms(busy_rows(rows), busy)),
            float(self.r.card.draft_ms(live, n)),
        )
        self.took = verify, draft
        noise = 1 + 0.02 * self.rng.random(2)
        if self.n_told < 200 and self.rng.random() < self.r.busy:
            noise *= self.rng.uniform(3, 12)
        self.n_told += 1
        if self.rng.random() < 0.005:  # a hiccup of the machine
            noise[0] *= self.rng.uniform(1.2, 2.0)
        return verify * noise[0], live, n, draft * noise[1]

    def seat(self) -> None:
        for slot in range(self.r.streams):
            if slot not in self.seats:
                rng = np.random.default_rng((self.seed, slot, self.n_seated[slot]))
                make = (
                    self.r.then if self.r.then is not None and self.n_seated[slot] > 1 else self.r.text
                )
                self.seats[slot] = Seat(make(rng), 0, self.r.prompt)
                self.seats[slot].at = (
                    int(rng.integers(len(self.seats[slot].text.right) // 2))
                    if not self.n_seated[slot]
                    else 0
                )
                self.n_seated[slot] += 1
                self.c.begin(slot)

    def round(self) -> None:
        self.seat()
        r, c, card = self.r, self.c, self.r.card
        reading = [slot for slot, s in self.seats.items() if s.unread]
        decoding = sorted(slot for slot in self.seats if slot not in reading)
        beside = min(sum(self.seats[slot].unread for slot in reading), 2048)
        n_own = card.n_max if r.n_own < 0 else r.n_own
        left = {slot: len(self.seats[slot].text.right) - self.seats[slot].at - 1 for slot in decoding}
        caps = [(slot, max(0, min(n_own, left[slot]))) for slot in decoding]
        offers, asked = self.look_up(left)
        began = time.thread_time()
        sees = SEES and any(self.seats[slot].text.sure is not None for slot in decoding)
        if not decoding or (beside and not BESIDE):
            whole, c.offered = [0] * len(decoding), {}
        else:
            whole = [n for _, n in planned(c, caps, offers, beside, tells=sees).asked]
        kept, cut_ms = whole, 0.0
        if sees and any(whole):
            sure = {
                slot: self.seats[slot].text.sure[self.seats[slot].at, :n].tolist()
                for slot, n in zip(decoding, whole, strict=True)
            }  # type: ignore[index]
            before = time.thread_time()
            kept = [n for _, n in c.cut(list(zip(decoding, whole, strict=True)), sure)]
            cut_ms = 1e3 * (time.thread_time() - before)
            c.cut_took(cut_ms)
        self.host_ms += 1e3 * (time.thread_time() - began)
        if asked:
            c.looked_up(r.lookup_ms * len(asked), len(decoding))
        self.commit(decoding, kept, offers)
        own = [n for slot, n in zip(decoding, whole, strict=True) if n and slot not in c.offered]
        rows = len(decoding) + sum(kept)
        n_row = rows + beside
        for slot in reading:
            self.seats[slot].unread = max(0, self.seats[slot].unread - 2048)
        verify, live, n, draft = self.told(rows, len(decoding), len(own), max(own, default=0))
        if beside:
            fixed = 1.2 * float(card.verify_ms(1, 0))
            took = max(float(card.verify_ms(rows, len(decoding))), fixed + r.row_ms * n_row)
            c.costs.prompts.add(n_row, took)
            c.timed_beside(took + draft)
            self.ms += took + self.took[1]
        else:
            c.timed(rows, verify, live, n, draft)
            self.ms += sum(self.took)
        self.ms += cut_ms + (r.lookup_ms * len(asked))
        self.drafted += sum(kept)

    def look_up(self, left: dict[int, int]) -> tuple[dict[int, Any], list[int]]:
        if not self.looks or not self.c.looks_up:
            return {}, []
        found = {}
        for slot in left:
            s = self.seats[slot]
            offer = s.text.offers[s.at, : max(left[slot], 0)]  # type: ignore[index]
            if len(offer) and offer[0]:
                found[slot] = offer[offer > 0].tolist()
        return found, list(left)

    def commit(self, decoding: list[int], kept: list[int], offers: dict[int, Any]) -> None:
        for slot, n in zip(decoding, kept, strict=True):
            s = self.seats[slot]
            right = min(n, int(s.text.right[s.at]))
            self.tokens += 1 + (right if s.text.expected is None else float(s.text.expected[s.at, n]))
            if slot in self.c.offered:
                self.c.record_offer(slot, n, right)
            else:
                self.c.record(slot, n, right)
            s.at += right + 1
            if s.at >= len(s.text.right) - 1:
                del self.seats[slot]

    def run(self, n_round: int) -> float:
        """Tokens a millisecond."""
        for _ in range(n_round):
            self.round()
        return self.tokens / self.ms


def controller_of(card: Card, n_slot: int, n_own: int) -> Controller:
    from pyspec.engine.policy.costs import Costs, Timer, bucket

    most = most_rows(n_slot, card.n_max + 1)
    timer = Timer(lambda n: bucket_of(n, most) or bucket(n)) if n_own else Timer()
    return Controller(
        n_slot, card.n_max, n_own=n_own, chained=card.chained, block=card.block, costs=Costs(timer)
    )


SEES = BESIDE = True
M = "pyspec.engine.policy."


def _common(self: Any, slots: Any, sure: Any = None) -> Any:
    self.learn()
    return np.array([self.texts[s].common @ self.texts[s].survive[:, 1:] for s in slots])


def _no_places(self: Any) -> None:
    self.right[:], self.meant[:], self.seen[:] = 0, 0, 0
    _tabulate(self)


def _none(self: Any, state: Any) -> RoundPlan:
    none = [(slot, 0) for slot, _ in state.decoding]
    return RoundPlan(none, none, reasons=dict.fromkeys([slot for slot, _ in none], ""))


def offs() -> dict[str, AbstractContextManager[Any]]:
    from pyspec.engine.policy.estimate import AcceptancePrior

    global _tabulate
    _tabulate = AcceptancePrior.tabulate
    c = M + "controller."
    return {
        "no drafts": patch(c + "Controller.plan", _none),
        "levels of slots": patch(M + "estimate.Acceptance.survive", _common),
        "positions": patch(M + "estimate.AcceptancePrior.tabulate", _no_places),
        "certainty and cuts": patch(f"{__name__}.SEES", False),
        "account of cuts": patch(c + "Controller.cuts", True),
        "credit for information": patch(M + "plan.HORIZON", 0.0),
        "tries after silence": patch(c + "TRY_FIRST", 10**9),
        "plain rounds again": patch(c + "Controller.is_plain_stale", lambda *_: False),
        "choice stands": patch(M + "plan.RETHINK", 0),
        "drafts beside prompts": patch(f"{__name__}.BESIDE", False),
        "margin": patch(M + "plan.MARGIN", 1.0),
        "host's account": patch(c + "Controller.looks_up", True),
    }  # fmt: skip


def play(found: list[Recording], n_round: int) -> dict[str, list[float]]:
    """By recording: tokens a millisecond, drafts a round, host's ms of a choice."""
    out = {}
    for r in found:
        m = Machine(r)
        rate = m.run(n_round if r.streams < 64 else n_round * 2 // 3)
        out[r.name] = [rate, m.drafted / n_round, m.host_ms / n_round]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--off", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    a = parser.parse_args()
    if a.compare:
        old, new = (json.loads(path.read_text())["now"] for path in a.compare)
        for name in old:
            if name in new:
                print(
                    f"| {name} | {old[name][0]:.3f} | {new[name][0]:.3f} | {new[name][0] / old[name][0]:.3f} |"
                )
        return 0
    found = [r for r in recordings() if any(only in r.name for only in a.only)]
    switches = offs()
    names = list(switches) if a.off == ["all"] else a.off
    results = {}
    for name in ["now", *names]:
        with switches[name] if name != "now" else nullcontext():
            results[name] = play(found, a.rounds)
        for r in found:
            rate, n, host = results[name][r.name]
            ratio = rate / results["now"][r.name][0]
            if name == "now" or abs(ratio - 1) > 0.003:
                print(
                    f"| {name} | {r.name} | {rate:.3f} | {ratio:.3f} | {n:.2f} | {host:.3f} |",
                    flush=True,
                )
        print(
            f"# {name}: least {min(results[name][r.name][0] / results['now'][r.name][0] for r in found):.3f}",
            flush=True,
        )
        if a.json:
            a.json.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
