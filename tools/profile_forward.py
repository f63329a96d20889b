"""Where a forward's time goes, launch by launch, as CUDA graphs run it: python tools/profile_forward.py F [--np 8] [--context 4096] [--show 28 90]

For each shape: milliseconds of a replay; kernels by their sums; and for the first of them all launches `--show` from and to in order. A kernel's own time is from when all that
began before it had ended, for programmatic launches begin early and wait (pyspec/bench/parts.py); `idle` is nobody's. What a profiler adds is in them, but not in the milliseconds.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pyspec.bench.parts import Record, own_times
from pyspec.config import EngineSettings
from pyspec.engine.load.load import Loaded, load
from pyspec.slots.batch import Batch, Seq, lay_out

N_REPLAY = 8


def tokens_of(n: int, vocab: int, seed: int) -> list[int]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (n,), generator=gen).tolist()


def layout(loaded: Loaded, widths: Sequence[int], at: int, n_out: int | None = None) -> Batch:
    """Rows behind `at` tokens of each slot."""
    loop, vocab = loaded.loop, loaded.info.n_vocab
    seqs = [
        Seq(slot, at, tokens_of(n, vocab, slot), keep=True, n_out=n if n_out is None else n_out)
        for slot, n in enumerate(widths)
    ]
    return lay_out(loop.table, seqs, loop.target.device)


def millis(run: torch.cuda.CUDAGraph | None, call) -> float:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(N_REPLAY):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        call() if run is None else run.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def watched(call) -> list[Record]:  # type: ignore[no-untyped-def]
    """Of one call, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    own = (e for e in found.events() if e.device_type == DeviceType.CUDA)
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in own)


def show(records: list[Record], first: int, end: int) -> None:
    sums, counts, waits = defaultdict[str, float](float), defaultdict[str, int](int), 0.0
    for name, us, idle in own_times(records):
        sums[name] += us
        counts[name] += 1
        waits += idle
    print(f"  {len(records)} launches, {sum(sums.values()):.0f} us, {waits:.0f} us idle")
    for name, us in sorted(sums.items(), key=lambda i: -i[1])[:24]:
        print(f"  {us:8.1f} us {counts[name]:4} of {us / counts[name]:6.1f}  {name[:60]}")
    for i, (own, record) in enumerate(zip(own_times(records), records, strict=True)):
        if first <= i < end:
            print(
                f"    {i:4} {own[1]:6.1f} us, idle before {own[2]:4.1f}, spans {record[1] - record[0]:6.1f}  {own[0][:50]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--np", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096, help="tokens of every slot before the rows")
    parser.add_argument("--prompt", type=int, default=2048, help="rows of a forward of a prompt; 0: none")
    parser.add_argument("--show", type=int, nargs=2, default=(0, 0), help="launches to print one by one, from and to")
    parser.add_argument("--brief", action="store_true", help="milliseconds alone")
    args = parser.parse_args()
    ctx = args.context + 64
    settings = EngineSettings(np=args.np, ctx=ctx, spec_type="none", warm_up=False, prefix_cache=False)
    loaded = load(args.model, settings)
    loop = loaded.loop
    target, shapes = loop.target, {"1 row": [1], "4 rows": [4], f"{args.np} slots, 4 rows each": [4] * args.np}
    for slot in loop.table.slots:
        loop.table.acquire(slot, ctx)
    with torch.inference_mode(), loop.worker.lock:
        step = args.prompt or 512
        for at in range(0, args.context, step):
            batch = layout(loaded, [min(step, args.context - at)], at, 1)
            target.forward(batch)
            if args.prompt and min(step, args.context - at) == step:
                ms = millis(None, lambda batch=batch: target.forward(batch))
                print(f"prompt, {step} rows behind {at}: {ms:.2f} ms, {step / ms * 1e3:.0f} rows/s", flush=True)
                if not args.brief:
                    show(watched(lambda batch=batch: target.forward(batch)), 0, 0)
        for slot in range(1, args.np):
            for at in range(0, args.context, step):
                tokens = tokens_of(min(step, args.context - at), loaded.info.n_vocab, slot)
                seq = Seq(slot, at, tokens, keep=True, n_out=1)
                target.forward(lay_out(loop.table, [seq], target.device))
        for name, widths in shapes.items():
            batch = layout(loaded, widths, args.context)
            batch = replace(batch, bucket=sum(widths), seqs=())
            target.forward(batch)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                target.forward(batch)
            print(f"{name} behind {args.context}: {millis(graph, None):.3f} ms", flush=True)
            if not args.brief:
                show(watched(graph.replay), *args.show)


if __name__ == "__main__":
    main()
