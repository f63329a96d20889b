"""Time the ops of DeepSeek-V4's attention on a GPU, beside their floors: python tools/bench_deepseek4.py [check] [index] [parts] ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress.op import compress
from pyspec.cuda.ops.compress.ref import SCORES, VALUES, CompressSpec
from pyspec.cuda.ops.index_rows import cuda as index_cuda
from pyspec.cuda.ops.index_rows.cases import Ragged, place
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail import cuda as tail_cuda
from pyspec.cuda.ops.rope_tail.op import rope_tail
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend.cuda import SparseBuild
from pyspec.cuda.ops.sparse_attend.op import sparse_attend
from pyspec.cuda.ops.sparse_attend.ref import ROWS, KeyTail, SparseSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool, rows_per_page
from pyspec.slots.ring import RingRows

GPU = torch.device("cuda", 0)
BYTES, FLOPS = 4.3e12, 800e12  # a second, of an H200: a copy on the device, f16 by mma
L2, PAGE = 60e6, 32
INDEX = IndexSpec(GPU, 64, 128, 512, 4, torch.float16, 64)
CSA, HCA, RAW = (SparseSpec(GPU, 64, 512, 128, ratio, torch.float16, 64, 1e-6) for ratio in (4, 128, 0))
TOP_K = INDEX.top_k
COMPRESSORS = {
    "CSA": CompressSpec(GPU, 4, 512, True, 64, 1e-6, torch.float16),
    "indexer": CompressSpec(GPU, 4, 128, True, 64, 1e-6, torch.float16),
    "HCA": CompressSpec(GPU, 128, 512, False, 64, 1e-6, torch.float16),
}
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
    freq = torch.rand(spec.n_rot // 2, device=GPU, dtype=torch.float64)
    q, w = torch.randn(n_row, spec.n_head, spec.dim, device=GPU), torch.randn(n_row, spec.n_head, device=GPU)

    def one(pool: KVPool) -> Callable[[], Tensor]:
        return lambda: launch(q, w, freq, pool, batch)

    flops = 2 * n_row * n_key * spec.n_head * spec.dim
    scored = n_key > spec.top_k
    pools = pools_for(n_page, spec.ratio, spec.dim, n_byte)
    return Run([one(pool) for pool in pools], n_byte * scored + q.nbytes, flops * scored)


def sparse_run(ctx: int, widths: Sequence[int], spec: SparseSpec, build: SparseBuild | None = None) -> Run:
    """Chosen rows are spread evenly over the context, other ones for each row."""
    n_row, launch = sum(widths), sparse_cuda.bind(spec, build=build)
    batch, n_page = batch_of(ctx, widths)
    n_slot = len(widths) + 2
    q, kv = torch.randn(n_row, spec.n_head, spec.dim, device=GPU), torch.randn(n_row, spec.dim, device=GPU)
    tail = KeyTail(torch.ones(spec.dim, device=GPU), torch.rand(spec.n_rot // 2, device=GPU, dtype=torch.float64))
    sinks, chosen, n_list = torch.randn(spec.n_head, device=GPU), None, ctx // spec.ratio if spec.ratio else 0
    if spec is CSA:
        n_list, every = min(n_list, TOP_K), n_list
        one = torch.full((n_row, TOP_K), -1, dtype=torch.int32, device=GPU)
        steps = torch.arange(n_list, device=GPU) * (every // max(n_list, 1))
        one[:, :n_list] = (
            steps[None] + torch.arange(n_row, device=GPU)[:, None] % max(1, every // max(n_list, 1))
        ).int()
        chosen = one.minimum((batch.positions.int()[:, None] + 1) // spec.ratio - 1)
    each = spec.window + n_list  # keys of a row; rows of one slot share the window and HCA's rows
    n_key = (n_row if spec is CSA else len(widths)) * n_list + len(widths) * spec.window
    n_byte = min(n_key, len(widths) * (ctx // (spec.ratio or ctx) + spec.window)) * spec.dim * 2
    pools = pools_for(n_page, spec.ratio, spec.dim, n_byte) if spec.ratio else [None] * 24

    def one_call(pool: KVPool | None) -> Callable[[], Tensor]:
        ring = RingRows({ROWS: (spec.dim,)}, n_slot, spec.window, 34, torch.float16, GPU)
        ring.rows[ROWS].normal_()
        return lambda: launch(q, kv, tail, ring, pool, chosen, sinks, batch)

    return Run([one_call(pool) for pool in pools], n_byte + 2 * q.nbytes, 4 * n_row * each * spec.n_head * spec.dim)


def compress_run(ctx: int, widths: Sequence[int], spec: CompressSpec) -> Run:
    """The last row of each sequence ends a block, of 4 tokens and of 128."""
    n_row, launch, of = sum(widths), compress_cuda.bind(spec), 1 + spec.overlaps
    width, window = of * spec.dim, of * spec.ratio
    batch, n_page = batch_of(ctx, widths)
    products = torch.randn(n_row, 2 * width, device=GPU)
    values, scores = products.split(width, -1)
    places = torch.randn(spec.ratio, width, device=GPU)
    norm, freq = torch.ones(spec.dim, device=GPU), torch.rand(spec.n_rot // 2, device=GPU, dtype=torch.float64)
    n_made = sum((ctx // spec.ratio) - (ctx - w) // spec.ratio for w in widths)
    n_byte = 8 * (n_made * window * spec.dim + n_row * width * 2) + n_made * spec.dim * 2

    def one_call(pool: KVPool) -> Callable[[], None]:
        ring = RingRows(dict.fromkeys((VALUES, SCORES), (width,)), len(widths) + 2, window, 34, torch.float32, GPU)
        return lambda: launch(values, scores, places, norm, freq, ring, pool, batch)

    return Run([one_call(pool) for pool in pools_for(n_page, spec.ratio, spec.dim, 1e7)], n_byte, 0.0)


def show(name: str, run: Run) -> float:
    us = time_us(run)
    print(f"{name:44} {us:8.1f} us  floor {run.floor:6.1f} us  {us / run.floor:5.1f} x", flush=True)
    return us


def index() -> None:
    for ctx in CONTEXTS:
        found = {name: show(f"index_rows {ctx} {name}", index_run(ctx, widths)) for name, widths in WIDTHS.items()}
        for name in ("8 slots, 32 ragged", "2 slots, 32 ragged"):
            print(f"  {name} over 1 row: {found[name] / found['1 row']:.2f}")


def compressors() -> None:
    for name, spec in COMPRESSORS.items():
        for rows, widths in (WIDTHS | {"prompt": (2048,)}).items():
            show(f"compress {name} {rows}", compress_run(4096, widths, spec))


TAIL = RopeTailSpec(GPU, 512, 64, True, 1e-6)


def tails() -> None:
    """Queries' heads: the norm and the turn."""
    for rows in (1, 4, 32, 2048):
        xs = [torch.randn(rows, 64, TAIL.dim, device=GPU) for _ in range(12)]
        at = torch.arange(rows, device=GPU) + 60_000
        freq, launch = torch.rand(TAIL.n_rot // 2, device=GPU, dtype=torch.float64), tail_cuda.bind(TAIL)
        calls = [partial(launch, x, at, freq) for x in xs]
        show(f"rope_tail {rows} rows of 64 heads", Run(calls, 2 * xs[0].nbytes, 0.0))


LAYERS = {"CSA": CSA, "HCA": HCA, "raw": RAW}


def sparse() -> None:
    for name, spec in LAYERS.items():
        for ctx in CONTEXTS:
            for rows, widths in WIDTHS.items():
                show(f"sparse_attend {name} {ctx} {rows}", sparse_run(ctx, widths, spec))


def builds() -> None:
    """Heads of a CTA, by rows: what `COSTS` should say."""
    for rows in ("1 row", "4 rows", "17 rows", "8 slots, 8 rows", "8 slots, 32 rows"):
        for build in sparse_cuda.bind(CSA).builds:
            show(f"sparse_attend CSA 65536 {rows}, {build.heads} heads", sparse_run(65536, WIDTHS[rows], CSA, build))


def prompts() -> None:
    """2,048 rows of a prompt."""
    for ctx in (2048, 65536):
        show(f"index_rows {ctx} prompt", index_run(ctx, (2048,)))
        for name, spec in LAYERS.items():
            show(f"sparse_attend {name} {ctx} prompt", sparse_run(ctx, (2048,), spec))


def check() -> None:
    """What the child process says of each, and nothing tripped."""
    others = [(sparse_attend, spec) for spec in LAYERS.values()]
    others += [(rope_tail, TAIL)]
    others += [(compress, spec) for spec in COMPRESSORS.values()]
    for op, spec in ((index_rows, INDEX), (index_rows, replace(INDEX, top_k=8)), *others):
        print(
            f"{op.name} {op.chosen(spec).name}: {list(op.choices(spec))} fault {faults.record(GPU).tolist()}",
            flush=True,
        )


def parts() -> None:
    """Device time of each kernel by itself, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    names = ("1 row", "4 rows", "8 slots, 32 ragged", "2 slots, 32 ragged")
    for name, ctx, of in ((name, ctx, of) for name in names for ctx in CONTEXTS for of in ("index", *LAYERS)):
        run = index_run(ctx, WIDTHS[name]) if of == "index" else sparse_run(ctx, WIDTHS[name], LAYERS[of])
        for call in run.calls:
            call()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for call in run.calls:
                call()
            torch.cuda.synchronize()
        each = [
            (e.key, e.device_time_total / e.count)
            for e in found.key_averages()
            if "index_" in e.key or "sparse_" in e.key
        ]
        print(f"{of} {ctx} {name}: " + ", ".join(f"{k} {t:.1f} us" for k, t in sorted(each)), flush=True)


if __name__ == "__main__":
    jobs = {
        "check": check,
        "index": index,
        "sparse": sparse,
        "parts": parts,
        "builds": builds,
        "prompts": prompts,
        "compress": compressors,
    }
    for job in sys.argv[1:] or list(jobs):
        jobs[job]()
