"""Measure slots of different acceptance side by side: the controller's joint choice beside a choice for each slot alone, and plain.

`python tools/bench_mixed.py MODEL [--draft auto] [--lens 1.3 5] [--streams 1 8 32 64] [-n 640] [-r 3]`

Streams take turns through --lens, as in `tools/budget.py`: with 1.3 and 5 half of the streams keep 1.3 tokens a round where all that may be
drafted is, the other half 5. Coins decide, so the drafts' probabilities mean nothing here. A rate counts from the last stream's first
token to the first stream's end. "alone": each slot takes the length that would be best if all were as it is (lengths by the same
beliefs and measured times).
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from pyspec import Engine
from pyspec.bench.prompts import make_prompts
from pyspec.cli.logs import set_up
from pyspec.engine.policy.controller import Controller
from pyspec.request import Delta, Done, Event, Failed, Request, SamplingParams
from pyspec.sample.synth import SynthAcceptance

MODES = ("plain", "alone", "joint")


class MixedAcceptance(SynthAcceptance):
    """Requests take turns through several synthetic acceptances, in the order in which they are seen first."""

    def __init__(self, lens: Sequence[float], n_max: int) -> None:
        self.kinds = [SynthAcceptance.of_length(min(mean, n_max + 1), n_max) for mean in lens]
        self.order: dict[int, int] = {}
        super().__init__(self.kinds[0].chances)

    def n_accepted(self, request: int, position: int, n_draft: int) -> int:
        i = self.order.setdefault(request, len(self.order))
        return self.kinds[i % len(self.kinds)].n_accepted(request, position, n_draft)


def alone(c: Controller, caps: Sequence[tuple[int, int]]) -> list[int]:
    """Each slot's best length if all slots were as it is."""
    busy = len(caps)
    survive = c.texts.survive([slot for slot, _ in caps])
    rates = [np.full(busy, busy / c._verify_ms(busy, busy))]
    for n in range(1, c.n_own + 1):
        ms = c._verify_ms(busy * (1 + n), busy) + float(c._draft_ms(busy, n)[busy])
        rates.append(busy * (1 + survive[:, :n].sum(axis=1)) / ms)
    best = np.array(rates).argmax(axis=0)
    if not best.any() and c.n_round % 64 == 0:
        best[:] = 2
    return [min(int(n), cap) for n, (_, cap) in zip(best, caps, strict=True)]


class Meter:
    """Counts tokens of requests that run side by side."""

    def __init__(self, n: int) -> None:
        self.n, self.over = n, threading.Event()
        self.begun: set[str] = set()
        self.tokens, self.start, self.end = 0, 0.0, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Done | Failed):
            self.end = self.end or time.perf_counter()
            self.over.set()
        elif isinstance(event, Delta) and not self.end:
            self.tokens += len(event.tokens) if self.start else 0
            self.begun.add(event.request)
            if len(self.begun) == self.n and not self.start:
                self.start = time.perf_counter()

    @property
    def rate(self) -> float:
        return self.tokens / (self.end - self.start)


def measure(engine: Engine, prompts: Sequence[Sequence[int]], mode: str, n_predict: int) -> float:
    meter = Meter(len(prompts))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    most = 0 if mode == "plain" else None
    ids = [
        engine.submit(
            Request(prompt=tuple(p), max_tokens=n_predict, params=params, n_draft_max=most), meter
        )
        for p in prompts
    ]
    meter.over.wait()
    for request in ids:
        engine.cancel(request)
    while engine.metrics().requests_processing:
        time.sleep(0.01)
    return meter.rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto", help="as Engine.load's")
    parser.add_argument("--lens", type=float, nargs="+", default=[1.3, 5.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("-p", "--n-prompt", type=int, default=64)
    parser.add_argument("-n", "--n-gen", type=int, default=640)
    parser.add_argument("-r", "--turns", type=int, default=3)
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument("--n-draft", type=int, default=0)
    parser.add_argument("--device", default="auto")
    a = parser.parse_args()
    set_up(2)
    n_slot = max(a.streams)
    with Engine.load(
        a.model, a.draft, np=n_slot, ctx=a.ctx, n_draft_max=a.n_draft, device=a.device, synth_len=1.0
    ) as engine:
        c = engine.loop.controller
        joint = c.choose
        print(f"{engine.info.model_name}, {engine.info.device}: {engine.info.draft_note}")
        print("| streams | plain, tok/s | each alone | joint | joint over alone | over plain |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for n in a.streams:
            prompts = make_prompts(engine, n, a.n_prompt, True)
            rates: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _ in range(a.turns):
                for mode in MODES:
                    engine.loop.lookahead.synth = MixedAcceptance(a.lens, engine.info.n_draft_max)
                    c.forget_acceptance()
                    if mode == "alone":

                        def each(caps, _offers=None, _beside=0):  # type: ignore[no-untyped-def]
                            c.n_round += 1
                            picked = alone(c, caps)
                            for (slot, _), k in zip(caps, picked, strict=True):
                                c.lanes[slot].n_draft = k
                            return picked

                        c.choose = each  # type: ignore[method-assign]
                    rates[mode].append(measure(engine, prompts, mode, a.n_gen))
                    c.choose = joint  # type: ignore[method-assign]
            plain, own, all_of_them = (median(rates[mode]) for mode in MODES)
            print(
                f"| {n} | {plain:.0f} | {own:.0f} | {all_of_them:.0f} | {all_of_them / own:.3f} | {all_of_them / plain:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
