"""Requests that join and leave, with and without an MTP drafter: the real loop on this machine, over a device on paper.

    python tools/simulate_churn.py --streams 8 32 64 [--len 1.2] [--then 3] [--each 3] [--set MODULE:NAME=N]

The host's work is real and takes its time by the clock. Forwards and drafts return prepared results, and the clock jumps as if a device ran
them one after the other, at the costs of `COST` (27B Q8_0 on one H100, from the log). Prints tokens a second, their ratio, and for an answered
token and a round what the engine with a drafter did beyond the other one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine"))
from engine_rig import Rig, rig

from pyspec.device import worker as worker_module
from pyspec.engine.loop.round import RowLimits
from pyspec.engine.policy.plan import PromptRules
from pyspec.models.target import Out
from pyspec.request import SamplingParams
from pyspec.sample.synth import SynthAcceptance
from pyspec.slots.arena import Arena, bucket_of
from pyspec.slots.batch import Batch
from pyspec.synth import write

PROMPT, ANSWER = 300, 192
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
# Milliseconds: a verify has a fixed part and one for each row (64 rows take 20); rows of prompts come at 9,000 a second; an MTP block is 1/58 of the
# model, with a head in each pass of a draft; a copy of torch takes 3 us
COST = {
    "round": 12.0,
    "row": 0.125,
    "prompt": 1 / 9.0,
    "pass": 0.5,
    "pass_slot": 0.012,
    "late": 0.35,
    "late_row": 1 / 522.0,
    "copy": 0.003,
}


class Device:
    """Runs what it is given in order. free: the clock's seconds at which it has done all."""

    def __init__(self) -> None:
        self.skew = self.free = 0.0
        self.count: Counter[str] = Counter()

    def clock(self) -> float:
        return time.perf_counter() + self.skew

    def run(self, ms: float, kind: str, n: int = 1) -> None:
        """Queue work of some milliseconds."""
        self.free = max(self.free, self.clock()) + 1e-3 * ms
        self.count[kind] += n
        self.count[f"{kind} ms"] += ms

    def wait(self, until: float) -> None:
        self.skew += max(0.0, until - self.clock())


def make(kind: str, n_slot: int, length: float, folder: Path) -> tuple[Rig, Device]:
    """A loop over a device on paper. kind: of the drafter."""
    settings: dict[str, Any] = {"np": n_slot, "ctx": 1024, "kv_type": "f16", "spec_type": kind}
    settings |= {"n_draft_max": 3} if kind == "mtp" else {}
    r = rig(write("qwen35", folder / f"{kind}{n_slot}.gguf", quant="f32", tiny=True), **settings)
    loop, device, drafter = r.loop, Device(), r.loop.drafter
    loop.clock = loop.speculator.clock = device.clock
    pages = -(-(1024 + 64) // loop.table.page_size)
    width = 4 if drafter is not None else 1
    loop.worker.arena = Arena(n_slot, pages, torch.device("cpu"), width)
    loop.lookahead.max_rows = loop.worker.arena.n_row
    loop.limits = RowLimits(2048, 2048)
    loop.controller.rules = PromptRules(512, 2048, n_free=2048)
    logits = torch.zeros(4096, loop.target.n_vocab)
    hidden = torch.zeros(4096, loop.target.n_embd)
    best = torch.full((2, 4096), 7.0, dtype=torch.float64)

    def forward(batch: Batch) -> Out:
        n_read = sum(seq.width for seq in batch.seqs if seq.keep and seq.width > 1)
        rows = batch.bucket or batch.n_row
        if n_read:
            device.run(max(COST["round"], 3 + COST["prompt"] * batch.n_row), "mixed forwards")
            device.count["prompt rows"] += n_read
        else:
            device.run(COST["round"] + COST["row"] * rows, "rounds")
        device.count["verify rows"] += batch.n_row - n_read
        decoding = sum(not (seq.keep and seq.width > 1) for seq in batch.seqs)
        device.count["drafted tokens"] += batch.n_row - n_read - decoding
        n = len(batch.out_rows)
        return Out(logits[: max(n, rows)], hidden[: batch.n_row], None, best[:, : max(n, rows)])

    loop.worker.forward = forward  # type: ignore[method-assign]
    if drafter is not None:
        _on_paper(drafter, device)
    loop.lookahead.on, loop.committer.defers = True, True
    if length:
        synth = SynthAcceptance.of_length(length, 3)
        loop.lookahead.synth, loop.admission.synthetic = synth, drafter is not None
    _watch(loop, device)
    return r, device


def _on_paper(drafter: Any, device: Device) -> None:
    """The drafter's block takes time and computes nothing."""
    drafter.use_graphs(lambda: Arena(len(drafter.table.slots), 68, torch.device("cpu"), 4))
    drafter.tokens.fill_(7)

    def first(batch: Batch) -> None:
        device.run(COST["pass"] + COST["pass_slot"] * len(batch.seqs), "draft passes")

    def late(batch: Batch, hidden: Any = None) -> None:
        ms = COST["late"] + COST["late_row"] * batch.n_row
        device.run(ms, "late forwards")
        device.count["late rows"] += batch.n_row

    drafter._first, drafter._steps = first, (first,)
    drafter._late = late
    drafter.block.forward = late
    observe = drafter.observe

    def observed(*given: Any) -> None:
        before = torch.cat
        n_copy = [0]

        def cat(*args: Any, **more: Any) -> Any:
            n_copy[0] += 1
            return before(*args, **more)

        torch.cat = cat  # type: ignore[assignment]
        try:
            observe(*given)
        finally:
            torch.cat = before
        if n_copy[0]:
            device.run(2 * COST["copy"] * n_copy[0], "copies of hidden states", 2 * n_copy[0])

    drafter.observe = observed


def _watch(loop: Any, device: Device) -> None:
    """Count, and time what the host does."""

    def timed(owner: Any, name: str, kind: str) -> None:
        inner = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            found = inner(*given, **more)
            device.count[f"{kind} host ms"] += 1e3 * (time.perf_counter() - began)
            device.count[kind] += 1
            return found

        setattr(owner, name, call)

    timed(loop, "draft", "drafting (synced rounds)")
    timed(loop, "launch_next", "launch_next")
    timed(loop, "commit", "commit")
    timed(loop.speculator, "observe", "observe")
    timed(loop.controller, "plan", "planning")


class Moment:
    """An event of the device on paper."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, max(device.free, device.clock())

    def query(self) -> bool:
        return self.device.clock() >= self.at

    def synchronize(self) -> None:
        self.device.wait(self.at)

    def elapsed_time(self, other: Moment) -> float:
        return 1e3 * (other.at - self.at)


def warm(loop: Any, n_slot: int) -> None:
    """The times that a warm-up measures."""
    c = loop.controller
    for busy in sorted({1, min(4, n_slot), min(16, n_slot), n_slot}):
        for n in range(4 if c.n_own else 1):
            for _ in range(4):
                rows = busy * (1 + n)
                ms = COST["round"] + COST["row"] * (bucket_of(rows, 256) or rows)
                draft = n * (COST["pass"] + COST["pass_slot"] * busy) if n else 0.0
                c.timed(rows, ms, busy if n else 0, n, draft)


def play(kind: str, n_stream: int, args: argparse.Namespace, folder: Path) -> tuple[float, Counter[str]]:
    """Tokens a second, and counts of what was done."""
    r, device = make(kind, args.np, args.len, folder)
    loop = r.loop
    loop.raises_bugs = loop.speculator.raises_bugs = True
    worker_module.stamp = lambda _: Moment(device)  # type: ignore[assignment]
    warm(loop, args.np)
    gen = torch.Generator().manual_seed(3)

    def serve(n_each: int, n_prompt: int, n_answer: int) -> float:
        left, heard = [n_each] * n_stream, dict[int, Any]()

        def ask(i: int) -> None:
            left[i] -= 1
            prompt = torch.randint(5, 200, (n_prompt,), generator=gen).tolist()
            heard[i] = r.submit(prompt, n_answer, PARAMS, cache_prompt=False)

        began = device.clock()
        for i in range(n_stream):
            ask(i)
        while heard:
            loop.step()
            if n_each > 1 and args.then and sum(left) < n_stream * n_each // 2:
                synth = SynthAcceptance.of_length(args.then, 3)
                if loop.lookahead.synth.chances != synth.chances:
                    loop.lookahead.synth = synth
                device.count["rounds until all requests are read"] += bool(loop.controller.unread)
            for i in [i for i, h in heard.items() if h.over]:
                assert len(heard.pop(i).tokens) == n_answer, "a request failed"
                if left[i]:
                    ask(i)
        return device.clock() - began

    serve(1, 20, args.lockstep)
    device.count.clear()
    took = serve(args.each, PROMPT, ANSWER)
    device.count["seconds"] = took  # type: ignore[assignment]
    return n_stream * args.each * ANSWER / took, device.count


def main() -> None:
    """Tables for each number of streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--np", type=int, default=64)
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--lockstep", type=int, default=256)
    parser.add_argument("--len", type=float, default=1.2)
    parser.add_argument("--then", type=float, default=0.0, help="--len of the second half")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE:NAME=N")
    args = parser.parse_args()
    for each in args.set:
        where, value = each.split("=")
        module, name = where.split(":")
        setattr(
            importlib.import_module(module),
            name,
            type(getattr(importlib.import_module(module), name))(float(value)),
        )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for n_stream in args.streams:
            for _ in range(args.turns):
                plain, base = play("none", n_stream, args, Path(folder))
                mtp, found = play("mtp", n_stream, args, Path(folder))
                n = n_stream * args.each * ANSWER
                print(
                    f"{n_stream} streams: plain {plain:.0f}, MTP {mtp:.0f} tokens/s, {mtp / plain:.3f}"
                )
                for what in sorted({*base, *found}):
                    print(
                        f"    {what:40} {base[what]:10.1f} {found[what]:10.1f} {(found[what] - base[what]) / n:10.4f}/token",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
