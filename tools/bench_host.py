"""Measure Python's share of a round: the real loop, drafters and layouts over forwards that return prepared results at once.

    python tools/bench_host.py --slots 1 8 [--cold 64] [--kinds plain mtp]

Microseconds a round, the best of several runs, one thread: "sample" and "host" as the engine counts them, and everything before the
launch. "ahead": plain rounds, each launched before the previous one is read. "suffix": the same with suffix drafts, over a text that
repeats pairs of tokens and nothing more; "lookups": and they never rest. "quiet": DFlash, in rounds in which the controller
chooses not to draft. `--cold`: megabytes of other memory touched while a device would work, as other processes do.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests" / "engine"))
from engine_rig import Rig, rig
from regret import planned

from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.policy.controller import Controller
from pyspec.engine.policy.costs import Costs, Timer, bucket
from pyspec.models.target import Out
from pyspec.request import Event, SamplingParams
from pyspec.slots.arena import BUCKETS, Arena, bucket_of
from pyspec.slots.batch import Batch
from pyspec.synth import write

CTX, GOOD, BAD = 16384, 7, 9
KINDS = ("plain", "ahead", "suffix", "lookups", "quiet", "mtp", "dflash")
AHEAD = ("ahead", "suffix", "lookups")
ACCEPTED = {4: 2, 16: 5}  # drafts a round accepts, by its width


def make(kind: str, n_slot: int, folder: Path) -> Rig:
    settings: dict[str, object] = {
        "np": n_slot,
        "ctx": CTX,
        "n_draft_fixed": True,
        "kv_type": "f16",
        "spec_type": "none",
        "rope_scaling": "linear",
        "rope_scale": 16.0,
    }
    if kind in ("suffix", "lookups"):
        settings |= {"spec_type": "suffix", "n_draft_fixed": False}
    if kind == "mtp":
        settings |= {"spec_type": "mtp", "n_draft_max": 3}
    if kind in ("dflash", "quiet"):
        drafter = write("qwen35", folder / f"d{n_slot}.gguf", quant="f32", tiny=True, drafter=True)
        settings |= {"spec_type": "dflash", "draft_path": drafter, "n_draft_fixed": kind == "dflash"}
    found = rig(write("qwen35", folder / f"{kind}{n_slot}.gguf", quant="f32", tiny=True), **settings)
    loop = found.loop
    pages = -(-(CTX + 64) // loop.table.page_size)
    loop.worker.arena = Arena(n_slot, pages, torch.device("cpu"))
    if loop.drafter is not None:
        loop.drafter.use_graphs(lambda: Arena(n_slot, pages, torch.device("cpu")))
    return found


def answer_at_once(r: Rig, kind: str) -> None:
    """From here on the device's work is prepared tensors."""
    loop, drafter, ready = r.loop, r.loop.drafter, dict[tuple[int | None, int, int], Out]()
    hidden, logits = (
        torch.zeros(BUCKETS[-1], loop.target.n_embd),
        torch.zeros(BUCKETS[-1], loop.target.n_vocab),
    )
    taps = torch.zeros(BUCKETS[-1], max(len(loop.worker.plan.taps), 1) * loop.target.n_embd)

    text = torch.randint(
        10, 50, (4099, BUCKETS[-1]), generator=torch.Generator().manual_seed(1)
    ).double()
    n_forward = 0

    def forward(batch: Batch) -> Out:
        nonlocal n_forward
        key = (batch.bucket, batch.n_row, len(batch.seqs))
        if key not in ready:
            assert batch.bucket is not None
            best = torch.full((2, batch.bucket), float(GOOD), dtype=torch.float64)
            for start, seq in zip(batch.starts, batch.seqs, strict=False):
                if seq.width > 1:
                    best[0, start + ACCEPTED.get(seq.width, seq.width // 2)] = BAD
            ready[key] = Out(logits[: batch.bucket], hidden[: batch.bucket], taps[: batch.bucket], best)
        if kind in AHEAD:
            n_forward += 1
            ready[key].best[0] = text[n_forward % len(text), : batch.bucket]
        return ready[key]

    loop.worker.forward = forward  # type: ignore[method-assign]
    tokens = torch.full((BUCKETS[-1],), GOOD)
    if kind == "mtp":
        drafter.tokens.fill_(GOOD)
        drafter._first = lambda batch: None
        drafter._steps = (drafter._first,)
    if kind in ("dflash", "quiet"):
        drafter.block = lambda batch: (tokens[: batch.bucket], None)
        drafter.inject = lambda batch: None
    if kind == "lookups":
        loop.controller.looked_up = lambda ms, busy: None  # type: ignore[method-assign]
    if kind == "quiet":  # drafts are far too expensive, and the controller does not try again
        for busy in range(1, len(loop.table.slots) + 1):
            for _ in range(2):
                loop.controller.costs.draft.add(busy, 50.0)
        loop.controller.may_ask = lambda plain_ms: False


def run(kind: str, n_slot: int, folder: Path, cold: int, n_round: int = 200, repeats: int = 5) -> str:
    r = make(kind, n_slot, folder)
    loop, due, junk = r.loop, deque[Event](), torch.zeros(max(cold, 1) << 17, dtype=torch.int64)
    for i in range(n_slot):
        r.submit(
            [5 + i] * 40, 15000, SamplingParams(temperature=0.0, ignore_eos=True), cache_prompt=False
        ).job.sink = due.append
    waited = [0.0, 0.0]  # all of the wait; of it, touching other memory

    def on_wait() -> None:
        due.clear()
        if cold:
            began = time.perf_counter()
            junk.add_(1)
            waited[1] += time.perf_counter() - began

    inner = loop.wait

    def wait(flight: PendingRound) -> object:
        began = time.perf_counter()
        fault = inner(flight)
        waited[0] += time.perf_counter() - began
        return fault

    loop.on_wait, loop.committer.defers, loop.wait = on_wait, True, wait  # type: ignore[method-assign,assignment]
    for _ in range(3):
        loop.step()
    answer_at_once(r, kind)
    loop.lookahead.on = kind in AHEAD
    for _ in range(50):
        loop.step()
    found = []
    for _ in range(repeats):
        gc.collect()
        before, began, waited[:] = (
            (loop.stats.sample_ms, loop.stats.host_ms),
            time.perf_counter(),
            [0.0, 0.0],
        )
        for _ in range(n_round):
            loop.step()
        step = time.perf_counter() - began - waited[0]
        parts = (loop.stats.sample_ms - before[0], loop.stats.host_ms - before[1])
        found.append((1e6 * step / n_round, *(1e3 * ms / n_round for ms in parts)))
    step, sample, host = min(found)
    assert len(loop.jobs) == n_slot, "a request ended early"
    return f"{kind:7} {n_slot} slots: sample {sample:5.1f}, host {host:5.1f}, all before the launch {step:6.1f} us"


def choosing(n_slot: int, n_max: int = 15, repeats: int = 1000) -> str:
    """Time the controller in a round in which it may draft."""
    c = Controller(n_slot, n_max, costs=Costs(Timer(lambda n_row: bucket_of(n_row) or bucket(n_row))))
    for rows in (n_slot, 16, 32, 64, 96, 128) * 2:
        c.costs.verify.add(rows, 10 + 0.05 * rows)
    for i in range(50):
        c.costs.draft.add(1 + i % n_slot, 2.0)
        c.record(i % n_slot, n_max, 5)
    began = time.perf_counter()
    for _ in range(repeats):
        planned(c, [(slot, n_max) for slot in range(n_slot)])
    took = time.perf_counter() - began
    return f"controller, {n_slot} slots of up to {n_max} drafts: {1e6 * took / repeats:.1f} us"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--cold", type=int, default=0, metavar="MB")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            for n_slot in args.slots:
                print(run(kind, n_slot, Path(folder), args.cold), flush=True)
    for n_slot in args.slots:
        print(choosing(n_slot))


if __name__ == "__main__":
    main()
