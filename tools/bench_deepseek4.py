"""Time the ops of DeepSeek-V4's attention on a GPU, beside their floors: python tools/bench_deepseek4.py [check] [index] [parts] ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows.cases import Ragged, place
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool, rows_per_page

GPU = torch.device("cuda", 0)
BYTES, FLOPS = 4.3e12, 800e12  # a second, of an H200: a copy on the device, f16 by mma
L2, PAGE = 60e6, 32
INDEX = IndexSpec(GPU, 64, 128, 512, 4, torch.float16)
CONTEXTS = (4096, 65536)
WIDTHS: dict[str, Sequence[int]] = {
    "1 row": (1,),
    "4 rows": (4,),
    "17 rows": (17,),
    "8 slots, 8 rows": (1,) * 8,
    "8 slots, 32 rows": (4,) * 8,
    "8 slots, 32 ragged": (1, 2, 3, 4, 5, 6, 7, 4),
    "2 slots, 32 ragged": (15, 17),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Calls that read different memory each, and what one of them must read and multiply."""

    calls: Sequence[Callable[[], object]]
    n_byte: float
    n_flop: float

    @property
    def floor(self) -> float:
        return 1e6 * max(self.n_byte / BYTES, self.n_flop / FLOPS)


def batch_of(ctx: int, widths: Sequence[int]) -> tuple[Batch, int]:
    """As a graph has it: nothing of it is known to the host but its size. And its pages."""
    placed = place(Ragged([(ctx - w, w) for w in widths], PAGE), GPU)
    return replace(placed.batch, bucket=placed.plain.n_row), placed.n_page


def pools_for(n_page: int, ratio: int, dim: int, n_byte: float) -> list[KVPool]:
    """As many as do not fit into the second-level cache."""
    n = max(2, min(24, int(3 * L2 / max(n_byte, 1)) + 1))
    pools = []
    for _ in range(n):
        n_row = n_page * rows_per_page(PAGE, ratio)
        pools.append(KVPool(n_row, 1, dim, torch.float16, GPU, tokens_per_row=ratio, keys_only=True))
        pools[-1].k.copy_(torch.randn(n_row, 1, dim, device=GPU))
    return pools


def time_us(run: Run) -> float:
    """Of one call within a graph of all: the median of several replays."""
    for call in run.calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in run.calls:
            call()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(run.calls))
    return sorted(times)[len(times) // 2]


def index_run(ctx: int, widths: Sequence[int]) -> Run:
    spec, n_row, n_key = INDEX, sum(widths), ctx // INDEX.ratio
    batch, n_page = batch_of(ctx, widths)
    n_byte = len(widths) * n_key * spec.dim * 2
    launch = index_cuda.bind(spec)
    q, w = torch.randn(n_row, spec.n_head, spec.dim, device=GPU), torch.randn(n_row, spec.n_head, device=GPU)

    def one(pool: KVPool) -> Callable[[], Tensor]:
        return lambda: launch(q, w, pool, batch)

    flops = 2 * n_row * n_key * spec.n_head * spec.dim
    scored = n_key > spec.top_k
    pools = pools_for(n_page, spec.ratio, spec.dim, n_byte)
    return Run([one(pool) for pool in pools], n_byte * scored + q.nbytes, flops * scored)


def show(name: str, run: Run) -> float:
    us = time_us(run)
    print(f"{name:44} {us:8.1f} us  floor {run.floor:6.1f} us  {us / run.floor:5.1f} x", flush=True)
    return us


def index() -> None:
    for ctx in CONTEXTS:
        found = {name: show(f"index_rows {ctx} {name}", index_run(ctx, widths)) for name, widths in WIDTHS.items()}
        for name in ("8 slots, 32 ragged", "2 slots, 32 ragged"):
            print(f"  {name} over 1 row: {found[name] / found['1 row']:.2f}")


def check() -> None:
    """What the child process says of each, and nothing tripped."""
    for op, spec in ((index_rows, INDEX), (index_rows, replace(INDEX, top_k=8))):
        print(
            f"{op.name} {op.chosen(spec).name}: {list(op.choices(spec))} fault {faults.record(GPU).tolist()}",
            flush=True,
        )


def parts() -> None:
    """Device time of each kernel by itself, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for name in ("1 row", "4 rows", "8 slots, 32 ragged", "2 slots, 32 ragged"):
        for ctx in CONTEXTS:
            run = index_run(ctx, WIDTHS[name])
            for call in run.calls:
                call()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                for call in run.calls:
                    call()
                torch.cuda.synchronize()
            each = [(e.key, e.device_time_total / e.count) for e in found.key_averages() if "index_" in e.key]
            print(f"{ctx} {name}: " + ", ".join(f"{k} {t:.1f} us" for k, t in sorted(each)), flush=True)


if __name__ == "__main__":
    jobs = {"check": check, "index": index, "parts": parts}
    for job in sys.argv[1:] or list(jobs):
        jobs[job]()
