"""Does speculation ever lose? One load, then plain and speculative decoding in turns at several made-up acceptances.

`python tools/bench_acceptance.py MODEL [--draft mtp] [--lens 1 1.2 1.6 2.2] [--streams 1 8] [-n 192] [--least 0.98]`

The controller chooses, as in service. What it learned of acceptance is forgotten before each, so every line begins as after
a load; measured times stay. Exit code 1 if a line falls below `--least` of plain decoding.
"""

from __future__ import annotations

import argparse
import sys

from pyspec import Engine
from pyspec.bench.session import Plan, bench
from pyspec.cli.logs import set_up
from pyspec.sample.synth import SynthAcceptance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="mtp", help="as Engine.load's")
    parser.add_argument("--lens", type=float, nargs="+", default=[1.0, 1.2, 1.6, 2.2], help="mean tokens a round")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("-p", "--n-prompt", type=int, default=300)
    parser.add_argument("-n", "--n-gen", type=int, default=192)
    parser.add_argument("-r", "--turns", type=int, default=2)
    parser.add_argument("-c", "--ctx", type=int, default=2560)
    parser.add_argument("--n-draft", type=int, default=0, help="most drafted tokens; 0: the drafter's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--least", type=float, default=0.98)
    a = parser.parse_args()
    set_up(2)
    n_slot, lost = max(a.streams), 0
    with Engine.load(
        a.model, a.draft, np=n_slot, ctx=a.ctx, n_draft_max=a.n_draft, device=a.device, synth_len=1.0
    ) as engine:
        print(f"{engine.info.model_name}, {engine.info.device}: {engine.info.draft_note}")
        print("| tokens a round | streams | plain, tok/s | speculative | of plain | rounds with 0, 1, 2 ... drafts |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for mean_len in a.lens:
            engine.loop.lookahead.synth = SynthAcceptance.of_length(mean_len, engine.info.n_draft_max)
            for n in a.streams:
                engine.loop.controller.forget_acceptance()
                plan = Plan(
                    streams=(n,),
                    turns=a.turns,
                    n_prompt=a.n_prompt,
                    n_predict=a.n_gen,
                    random_prompts=True,
                    ignore_eos=True,
                )
                row = bench(engine, plan).rows[0]
                lost += row.ratio < a.least
                of_plain = f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
                rounds = " ".join(f"{share:.0%}" for share in row.n_draft)
                print(f"| {mean_len:g} | {n} | {row.plain:.1f} | {row.spec:.1f} | {of_plain} | {rounds} |", flush=True)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
