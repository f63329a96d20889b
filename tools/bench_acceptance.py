"""Compare speculative with plain decoding at several made-up acceptances, after one load.

`python tools/bench_acceptance.py MODEL [--draft mtp] [--lens 1 1.2 1.6 2.2] [--streams 1 8] [-n 192] [--least 0.98]`

The controller chooses, as in service. Its knowledge of acceptance is reset before each line, so every line begins as after a load.
Measured times stay. Exit code 1 if a line falls below `--least` of plain decoding.

Sixteen to sixty-four streams in about a minute: `--streams 64 32 16 --slots 64 -c 1024 -p 64 -n 256 --lens 1.2`. With short prompts
few rounds pass before all streams decode, and a rate counts only from there on.

`--mixed` is one line in place of one for each length: streams take turns through the lengths, as slots do in `tools/budget.py`. With
`--mixed --lens 1.3 5` half of them keep 1.3 tokens a round where all that may be drafted is, the other half 5.

`--costs` adds the time of rounds and drafts of every length, at each number of streams: the tables of `tools/regret.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from pyspec import Engine
from pyspec.bench.measure import Turn, measure
from pyspec.bench.prompts import make_prompts
from pyspec.bench.session import Plan, bench
from pyspec.cli.logs import set_up
from pyspec.sample.synth import SynthAcceptance

N_TIMED = 40  # rounds of each kind
# Arguments of `Controller.timed`: rows, ms, slots that drafted, passes, ms of drafting
Took = tuple[int, float, int, int, float]


class MixedAcceptance(SynthAcceptance):
    """Requests take turns through several synthetic acceptances, in the order in which they are seen first."""

    def __init__(self, lens: Sequence[float], n_max: int) -> None:
        self.kinds = [SynthAcceptance.of_length(mean, n_max) for mean in lens]
        self.order: dict[int, int] = {}
        super().__init__(self.kinds[0].chances)

    def n_accepted(self, request: int, position: int, n_draft: int) -> int:
        i = self.order.setdefault(request, len(self.order))
        return self.kinds[i % len(self.kinds)].n_accepted(request, position, n_draft)


@contextmanager
def told(engine: Engine) -> Iterator[list[Took]]:
    """Record the timings that the controller receives meanwhile."""
    controller, found = engine.loop.controller, []
    inner = controller.timed

    def timed(*took: float) -> None:
        found.append(took)
        inner(*took)

    controller.timed = timed
    try:
        yield found
    finally:
        del controller.timed


def print_trace(engine: Engine, found: list[Took], n: int) -> None:
    """Rounds of n streams in order, as runs of the same number of rows, and the controller's times of sizes."""
    runs: list[tuple[int, list[float]]] = []
    for rows, ms, _, _, draft in found:
        if not runs or runs[-1][0] != rows:
            runs.append((rows, []))
        runs[-1][1].append(ms + draft)
    print(
        "rows x rounds (ms):",
        " ".join(f"{rows}x{len(ms)}({median(ms):.1f})" for rows, ms in runs[-300:]),
    )
    print_known(engine)


def print_known(engine: Engine) -> None:
    """Print the controller's times of sizes."""
    c = engine.loop.controller
    known = {
        size: f"{min(c.costs.verify.samples[size]):.2f} ({c.costs.verify.n(size)})"
        for size in sorted(c.costs.verify.samples)
    }
    drafts = {size: f"{min(c.costs.draft.samples[size]):.2f}" for size in sorted(c.costs.draft.samples)}
    print(
        "verify",
        known,
        "draft, by rows of blocks" if c.block else "draft, by slots",
        drafts,
        f"owed for asking {c.asks.debt:.1f} of {c.ms:.0f} ms;",
        c.lanes[0].reason,
        flush=True,
    )


def print_costs(engine: Engine, streams: list[int], n_prompt: int) -> None:
    """Rounds of each length of drafts for all slots."""
    controller, most = engine.loop.controller, engine.info.n_draft_max
    engine.loop.lookahead.synth = SynthAcceptance.of_length(1.0, most)
    lengths = [n for n in range(most + 1) if controller.chained or n in (0, 1, 2, 4, 7, most)]
    prompts = make_prompts(engine, max(streams), n_prompt, True)
    how = Turn(mode="spec", turn=0, n_predict=N_TIMED, ignore_eos=True)
    print("| streams | drafts of each | rows | round, ms: middle, least | of it drafting | rounds |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for n in streams:
        for n_draft in lengths:
            controller.force = n, n_draft
            with told(engine) as found:
                measure(engine.submit, engine.cancel, engine.metrics, prompts[:n], how)
            by_rows = defaultdict[int, list[Took]](list)
            for took in found:
                by_rows[took[0]].append(took)
            took = by_rows.get(n * (n_draft + 1), [])[
                2:
            ]  # the first ones may have come behind something else
            if not took:
                continue
            both = [ms + draft for _, _, ms, _, _, draft in took]
            drafting = median(draft for *_, draft in took)
            print(
                f"| {n} | {n_draft} | {n * (n_draft + 1)} | {median(both):.2f}, {min(both):.2f} | {drafting:.2f} | {len(took)} |",
                flush=True,
            )
    controller.force = None
    controller.forget_acceptance()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="mtp", help="as Engine.load's")
    parser.add_argument(
        "--lens", type=float, nargs="+", default=[1.0, 1.2, 1.6, 2.2], help="mean tokens a round"
    )
    parser.add_argument("--mixed", action="store_true", help="streams take turns through --lens")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("-p", "--n-prompt", type=int, default=300)
    parser.add_argument("-n", "--n-gen", type=int, default=192)
    parser.add_argument("-r", "--turns", type=int, default=2)
    parser.add_argument("-c", "--ctx", type=int, default=2560)
    parser.add_argument("--n-draft", type=int, default=0, help="most drafted tokens; 0: the drafter's")
    parser.add_argument(
        "--slots", type=int, default=0, help="slots of the engine; 0: as many as streams"
    )
    parser.add_argument(
        "--costs", action="store_true", help="also what rounds take by drafts and streams"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also the rounds that drafted, in order, and what is thought of costs",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--least", type=float, default=0.98)
    a = parser.parse_args()
    set_up(2)
    n_slot, lost, began = max(a.slots, *a.streams), 0, time.monotonic()
    with Engine.load(
        a.model, a.draft, np=n_slot, ctx=a.ctx, n_draft_max=a.n_draft, device=a.device, synth_len=1.0
    ) as engine:
        loaded = time.monotonic() - began
        print(
            f"{engine.info.model_name}, {engine.info.device}, {n_slot} slots, loaded in {loaded:.0f} s: {engine.info.draft_note}"
        )
        plan = Plan(
            turns=a.turns, n_prompt=a.n_prompt, n_predict=a.n_gen, random_prompts=True, ignore_eos=True
        )
        if a.trace:
            print_known(engine)
        print(
            "| tokens a round | streams | plain, tok/s | speculative | of plain | rounds with 0, 1, 2 ... drafts |"
        )
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for lens in [a.lens] if a.mixed else [[mean] for mean in a.lens]:
            named = ", ".join(f"{mean:g}" for mean in lens)
            for n in a.streams:
                engine.loop.lookahead.synth = MixedAcceptance(lens, engine.info.n_draft_max)
                engine.loop.controller.forget_acceptance()
                with told(engine) as found:
                    row = bench(engine, replace(plan, streams=(n,))).rows[0]
                lost += row.ratio < a.least
                of_plain = f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
                rounds = " ".join(f"{share:.0%}" for share in row.n_draft)
                print(
                    f"| {named} | {n} | {row.plain:.1f} | {row.spec:.1f} | {of_plain} | {rounds} |",
                    flush=True,
                )
                if a.trace:
                    print_trace(engine, found, n)
        if a.costs:
            print_costs(engine, a.streams, a.n_prompt)
        print(f"{time.monotonic() - began:.0f} s in all")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
