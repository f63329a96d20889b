"""Compare a load's use of GPU memory with its plan, item by item.

    python tools/memory_use.py T.gguf -np 64 -c 1024 --draft mtp
    python tools/memory_use.py T.gguf -np 64 -c 1024 --draft D.gguf --streams 64

Tables, in MiB: the plan by purpose; the use at the end of each stage (tensors; memory that torch's allocator keeps for them; others: the
context, libraries, graphs); the allocator's pools, one for each kind of graphs; tensors by the place in pyspec that made them, largest
first. --streams N: the additional use of N requests at once, which should be nothing. `pyspec synth` makes T and D.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyspec import progress
from pyspec.bench.prompts import make_prompts
from pyspec.cuda.graph import Graphed
from pyspec.engine.api import Engine
from pyspec.engine.load import load as loading
from pyspec.engine.plan.memory_plan import MemoryPlan, memory_snapshot
from pyspec.request import SamplingParams

MIB = 1 << 20
N_LINE = 40
SETTLED_S = 240.0  # children that check kernels have memory, too: they are waited for
Segment = Mapping[str, Any]
"""`torch.cuda.memory_snapshot`'s entry for one piece of the driver's memory."""


def site_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost function of pyspec that asked for a block, and the one that called it from another file."""
    found: list[tuple[str, str]] = []
    for frame in frames:
        path = str(frame["filename"])
        if "/pyspec/" in path and (not found or path != found[-1][0]):
            found.append((path, f"{path.rpartition('/pyspec/')[2]}:{frame['line']} {frame['name']}"))
    return " < ".join(text for _, text in found[:3]) or "elsewhere"


def by_site(segments: Iterable[Segment]) -> dict[str, tuple[int, int]]:
    """Bytes and number of the blocks in use, by their maker."""
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sums = total[site_of(block.get("frames", ()))]
                sums[0], sums[1] = sums[0] + block["size"], sums[1] + 1
    return {site: (n_byte, n) for site, (n_byte, n) in total.items()}


def by_pool(segments: Iterable[Segment]) -> dict[tuple[int, int], tuple[int, int]]:
    """Bytes that the allocator has, and those in use, by pool; (0, 0) is the pool without graphs."""
    total: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for segment in segments:
        sums = total[tuple(segment.get("segment_pool_id", (0, 0)))]
        sums[0], sums[1] = sums[0] + segment["total_size"], sums[1] + segment["allocated_size"]
    return {pool: (kept, used) for pool, (kept, used) in total.items()}


def pools_of(engine: Engine) -> dict[tuple[int, int], str]:
    """The pools of all kinds of graphs, by their names."""
    worker = engine.core.loop.worker  # type: ignore[attr-defined]
    graphs = {"verify": worker.forward}
    if worker.drafter is not None:
        graphs |= {
            f"draft {name}": x for name, x in vars(worker.drafter).items() if isinstance(x, Graphed)
        }
    named: dict[tuple[int, int], str] = {}
    for name, graphed in graphs.items():
        if graphed.pool.handle is not None:
            pool, n = tuple(graphed.pool.handle), len(graphed._graphs)
            named[pool] = ", ".join([*([named[pool]] if pool in named else []), f"{name} ({n} graphs)"])
    return named


class Stages:
    """The use at the end of each stage of a load, and after its last work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.settled = device, threading.Event()
        self.lines: list[tuple[str, tuple[int, int, int]]] = []
        self.plan: MemoryPlan | None = None
        self.before = (0, 0, 0)

    def hear(self, stage: str, fraction: float) -> None:
        if fraction == 1.0 or (stage == "graphs" and fraction == 0.0):
            self.lines.append(
                (f"{stage} {'done' if fraction else 'begin'}", memory_snapshot(self.device))
            )

    def log_use(
        self, device: torch.device, plan: MemoryPlan, before: tuple[int, int, int] | None
    ) -> None:
        """In place of the line that a load logs at its end."""
        self.plan, self.before = plan, before or (0, 0, 0)
        self.lines.append(("loaded", memory_snapshot(device)))
        self.settled.set()

    def show(self) -> None:
        print(f"\n{'stage':28}{'all':>10}{'tensors':>10}{'kept':>10}{'others':>10}")
        for name, now in self.lines:
            used, kept, held = (a - b for a, b in zip(now, self.before, strict=True))
            print(
                f"{name:28}"
                + "".join(f"{n / MIB:10.0f}" for n in (used, held, kept - held, used - kept))
            )


def show(engine: Engine, stages: Stages, n_line: int) -> None:
    """All tables."""
    plan = stages.plan
    assert plan is not None
    segments: Sequence[Segment] = torch.cuda.memory_snapshot()
    used = stages.lines[-1][1][0] - stages.before[0]
    print(f"\nplan: {plan}")
    for name, n in plan.by_purpose:
        print(f"    {name:20}{n / MIB:10.0f}")
    print(
        f"in use {used / MIB:.0f} of {plan.total / MIB:.0f} MiB planned: {100 * (used / plan.total - 1):+.2f} %"
    )
    stages.show()
    names = pools_of(engine)
    print(f"\n{'pool':60}{'kept':>10}{'in use':>10}")
    for pool, (kept, live) in sorted(by_pool(segments).items(), key=lambda x: -x[1][0]):
        print(
            f"{names.get(pool, 'no graph' if pool == (0, 0) else str(pool)):60}{kept / MIB:10.1f}{live / MIB:10.1f}"
        )
    print(f"\n{'MiB':>10}{'blocks':>8}  made by")
    for site, (n_byte, n) in sorted(by_site(segments).items(), key=lambda x: -x[1][0])[:n_line]:
        print(f"{n_byte / MIB:10.1f}{n:8}  {site}")
    sys.stdout.flush()


def run(engine: Engine, n: int, device: torch.device) -> None:
    """Print the additional use of rounds of `n` requests."""
    before = memory_snapshot(device)
    prompts = make_prompts(engine, n, 64, True)
    engine.generate_many(prompts, params=SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=96)
    more = [(a - b) / MIB for a, b in zip(memory_snapshot(device), before, strict=True)]
    print(
        f"\n{n} requests add: all {more[0]:.0f}, kept for tensors {more[1]:.0f}, tensors {more[2]:.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", default="none", help="none, mtp, or a drafter's file")
    parser.add_argument("-np", type=int, default=64)
    parser.add_argument("-c", "--ctx", type=int, default=1024)
    parser.add_argument("--n-draft", type=int, default=3)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--lines", type=int, default=N_LINE)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    settings: dict[str, object] = {"np": args.np, "ctx": args.ctx, "device": "cuda:0"}
    draft = None if args.draft == "none" else args.draft
    if draft is not None:
        settings |= {"synth_len": 2.5, "n_draft_max": args.n_draft, "n_draft_fixed": True}
    torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
    stages = Stages(device)
    loading._log_use = stages.log_use
    with progress.listening(stages.hear), Engine.open(str(args.model), draft, settings) as engine:
        if not stages.settled.wait(SETTLED_S):
            print("kernels are still being checked: what these children have is counted as others")
            stages.lines.append(("not settled", memory_snapshot(device)))
        show(engine, stages, args.lines)
        if args.streams:
            run(engine, args.streams, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
