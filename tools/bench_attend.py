"""Check `attend` on a GPU against the reference, then time it: python tools/bench_attend.py [check] [real] [types] ..."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import CASES, TOLERANCE, Case, Made, make, only, spec_of, worst
from pyspec.cuda.ops.attend.cuda import AttendBuild
from pyspec.slots.kv import KV_DTYPES, KVPool, row_bytes

GPU = torch.device("cuda", 0)
FLOOR = 4.3e12  # bytes a second, a device-to-device copy of an H200
L2 = 60e6


def check() -> None:
    for name, case in CASES.items():
        made = make(case, GPU)
        n = made.plain.n_row
        want = attend_ref.bind(spec_of(case, GPU))(made.q[:n].double(), made.pool, made.plain, case.window, made.sinks)
        attend = attend_cuda.bind(spec_of(case, GPU))
        out = attend(made.q, made.pool, made.batch, case.window, made.sinks)
        same = torch.equal(out, attend(made.q, made.pool, made.batch, case.window, made.sinks))
        alone = []
        for i, (_, width) in enumerate(case.seqs):
            start = made.plain.starts[i]
            for first, m in ((0, width), (width - 1, 1), (0, 1)):
                q, b = only(made, i, first, m)
                alone.append(
                    torch.equal(
                        out[start + first : start + first + m], attend(q, made.pool, b, case.window, made.sinks)
                    )
                )
        error, zeros = worst(out[:n], want), not bool(out[n:].any())
        good = error < TOLERANCE[case.dtype] and same and all(alone) and zeros
        fault = faults.record(GPU).tolist()
        print(f"{'ok ' if good else 'BAD'} {name:20} error {error:.1e} twice {same} alone {alone} pad {zeros} {fault}")


def real_case(np: int, ctx: int, width: int, kind: str = "target") -> Case:
    seqs = [(ctx, width)] * np
    if kind == "target":
        return Case(24, 4, 256, torch.float16, seqs, 64)
    if kind == "nemotron":
        return Case(32, 2, 128, torch.bfloat16, seqs, 64)
    return Case(32, 8, 128, torch.float16, seqs, 64, 2048, True)


def time_us(case: Case, shape: AttendBuild | None = None, pages: int = 0) -> tuple[float, float]:
    """Microseconds a call and bytes of keys and values a call; `pages`: width of the page table."""
    made = make(replace(case, seqs=[(0, w) for _, w in case.seqs]), GPU)
    made = grown(case, made, pages)
    n_byte = row_bytes(case.n_kv, case.dim, case.dtype) * sum(min(p, case.window or p) + w for p, w in case.seqs)
    n_pool = max(2, min(16, int(3 * L2 / n_byte) + 1))
    pools = [made.pool] + [
        KVPool(made.pool.k.shape[0], case.n_kv, case.dim, case.dtype, GPU) for _ in range(n_pool - 1)
    ]
    for pool in pools:
        fill(pool)
    attend = attend_cuda.bind(spec_of(case, GPU), shape=shape)
    for pool in pools:
        attend(made.q, pool, made.batch, case.window)
    graph = torch.cuda.CUDAGraph()
    n_call = n_pool * max(1, 16 // n_pool)
    with torch.cuda.graph(graph):
        for i in range(n_call):
            attend(made.q, pools[i % n_pool], made.batch, case.window)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / n_call)
    return sorted(times)[3], n_byte


def fill(pool: KVPool) -> None:
    for plane in pool.planes:
        if plane.dtype is torch.int8:
            plane.random_(-127, 128)
        else:
            plane.copy_(torch.randn(plane.shape[1:], device=GPU))


def grown(case: Case, made: Made, pages: int) -> Made:
    """The same rows at the case's positions, over a pool that is filled on the device."""
    size, b = case.page_size, made.plain
    counts = [-(-(past + width) // size) for past, width in case.seqs]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(GPU)
    table = torch.zeros(len(counts), max(pages, *counts), dtype=torch.int64, device=GPU)
    for i, own in enumerate(order.split(counts)):
        table[i, : len(own)] = own
    past = torch.tensor([p for p, w in case.seqs for _ in range(w)], device=GPU)
    pool = KVPool(sum(counts) * size, case.n_kv, case.dim, case.dtype, GPU)
    batch = replace(b, page_table=table, positions=b.positions + past, hi=b.hi + past)
    return replace(made, pool=pool, batch=batch)


def show(name: str, case: Case, shape: AttendBuild | None = None, pages: int = 0) -> None:
    us, n_byte = time_us(case, shape, pages)
    floor = n_byte / FLOOR * 1e6
    plan = int(attend_cuda.workspace(GPU).plan[0])
    print(
        f"{name:34} {us:7.1f} us {n_byte / us / 1e3:6.0f} GB/s floor {floor:6.1f} us = {100 * floor / us:3.0f}% per_item {plan}",
        flush=True,
    )


def real() -> None:
    for np in (1, 8):
        for ctx in (300, 2048, 8192, 32768):
            for width in (1, 4, 16):
                show(f"target np {np} ctx {ctx} width {width}", real_case(np, ctx, width))
    for np in (1, 8):
        show(f"nemotron np {np} ctx 8192 width 4", real_case(np, 8192, 4, "nemotron"))
        show(f"drafter np {np} ctx 8192 width 16", real_case(np, 8192, 16, "drafter"))
        show(f"drafter np {np} ctx 300 width 16", real_case(np, 300, 16, "drafter"))


def types() -> None:
    """The same keys in every type."""
    for np, ctx in ((1, 8192), (8, 300), (8, 8192)):
        for width in (1, 4, 16):
            for name, dtype in KV_DTYPES.items():
                show(f"{name} np {np} ctx {ctx} width {width}", replace(real_case(np, ctx, width), dtype=dtype))


WIDE = ((6, 1, 4), (6, 1, 6), (6, 2, 3), (6, 2, 4), (4, 2, 4), (4, 1, 6))
NARROW = ((1, 2, 4), (1, 2, 6), (1, 3, 3), (1, 3, 4))


def tune() -> None:
    """Tiles, blocks a multiprocessor, queue steps, and bytes a miss brings into L2."""
    for np, ctx in ((8, 300), (8, 8192), (1, 8192)):
        for width, builds in ((16, WIDE), (1, NARROW)):
            for n_tile, blocks, depth in builds:
                for fetch in (64, 128, 256) if ctx == 8192 and np == 8 and depth in (4, 6) else (256,):
                    shape = AttendBuild(256, n_tile, torch.float16, jit_arch(), blocks, depth, fetch)
                    name = f"np {np} ctx {ctx} width {width} {n_tile}/{blocks}/{depth}/{fetch}"
                    show(name, real_case(np, ctx, width), shape)


def parts() -> None:
    """Device time of each kernel by itself, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for np, ctx, width in ((1, 300, 1), (1, 300, 16), (8, 300, 16), (1, 8192, 1), (8, 8192, 1), (8, 8192, 16)):
        case = real_case(np, ctx, width)
        made = grown(case, make(replace(case, seqs=[(0, w) for _, w in case.seqs]), GPU), 0)
        attend = attend_cuda.bind(spec_of(case, GPU))
        trash = torch.empty(64 << 20, device=GPU)
        attend(made.q, made.pool, made.batch, 0)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(5):
                trash.zero_()
                attend(made.q, made.pool, made.batch, 0)
            torch.cuda.synchronize()
        each = [(e.key, e.device_time_total / e.count) for e in found.key_averages() if "attend" in e.key]
        print(f"np {np} ctx {ctx} width {width}: " + ", ".join(f"{k} {t:.1f} us" for k, t in each), flush=True)


def counters() -> None:
    """A few calls for a profiler that reads hardware counters."""
    for width in (1, 16):
        case = real_case(8, 8192, width)
        made = grown(case, make(replace(case, seqs=[(0, w) for _, w in case.seqs]), GPU), 0)
        fill(made.pool)
        attend = attend_cuda.bind(spec_of(case, GPU))
        attend(made.q, made.pool, made.batch, 0)
        torch.cuda.synchronize()


def jit_arch() -> str:
    from pyspec.cuda import jit

    return jit.arch_of(torch.cuda.get_device_capability(GPU))


def scale() -> None:
    """What a wide page table costs when contexts are short, and the parts of a call."""
    for pages in (0, 512, 4096):
        show(f"np 8 ctx 300 width 16 pages {pages}", real_case(8, 300, 16), pages=pages)
        show(f"np 1 ctx 300 width 16 pages {pages}", real_case(1, 300, 16), pages=pages)
    show("prompt of 2048", real_case(1, 0, 2048))


if __name__ == "__main__":
    jobs = {
        "check": check,
        "real": real,
        "types": types,
        "tune": tune,
        "scale": scale,
        "parts": parts,
        "counters": counters,
    }
    for name in sys.argv[1:] or ["check", "real", "scale"]:
        jobs[name]()
