"""Time gdn's CUDA kernels at the size of Qwen3.6-27B against the bytes they must move. `python -m tools.bench_gdn`.

Every figure is the median over replays of a graph of one forward through all layers' own memory, which is far more than the
cache holds. The floor counts state in and out, records and windows written, raw rows read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from pyspec.cuda.kernels import gdn_cuda, gdn_ref
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.memory import StateLayer, StateShape
from pyspec.slots.table import SlotTable

SHAPE = StateShape(16, 48, 128, 4, 10240)
GPU = torch.device("cuda", 0)
BANDWIDTH = 4.3e12  # bytes a second of a device copy, measured


def replayed(work: Callable[[], None], repeats: int) -> float:
    """Median milliseconds of one replay of `work`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def floor_bytes(seqs: list[Seq]) -> int:
    """Least traffic of one layer: the state once in, and once out if it changes."""
    state, row = SHAPE.n_v_head * 128 * 128 * 4, SHAPE.n_channel * 4
    kv = (SHAPE.n_k_head + SHAPE.n_v_head) * 128 * 4
    total = 0
    for s in seqs:
        total += state * (2 if s.keep or s.n_fold else 1) + s.width * (row + SHAPE.n_v_head * 128 * 4) + s.n_fold * kv
        total += 0 if s.keep else s.width * (row + kv)
    return total


def time_shape(n_seq: int, width: int, fold: int, keep: bool, how: dict[str, int], layers: list[StateLayer]) -> None:
    run = gdn_cuda.bind(gdn_ref.GdnSpec(GPU, SHAPE, 1e-6), **how)
    seqs = [Seq(i, 0, [0] * width, keep, 0, fold) for i in range(n_seq)]
    batch = lay_out(SlotTable(n_seq, 64 * n_seq, 64), seqs, GPU)
    n = n_seq * width
    n_v = SHAPE.n_v_head
    sizes = [SHAPE.n_channel, n_v * SHAPE.dim, n_v, n_v]  # as the fused projection gives them
    m, _, alpha, beta = torch.randn(n, sum(sizes), device=GPU).split(sizes, 1)
    a, dt_bias, conv_w = (
        -torch.rand(n_v, device=GPU),
        torch.randn(n_v, device=GPU),
        torch.randn(SHAPE.n_channel, 4, device=GPU),
    )

    def forward() -> None:
        for layer in layers:
            run(m, alpha, beta, a, dt_bias, conv_w, layer, batch)

    took = replayed(forward, 3 if width > 64 else 15) / len(layers) * 1e3
    least = floor_bytes(seqs) / BANDWIDTH * 1e6
    print(
        f"np {n_seq} T {width:4} fold {fold:2} {'keep' if keep else 'verify':6} {how or ''}: "
        f"{took:7.2f} us a layer, floor {least:5.2f} ({least / took:4.0%}), {floor_bytes(seqs) / took / 1e3:5.0f} GB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", type=int, nargs="*", default=[0, 2, 4], help="columns of a lane; 0 is automatic")
    parser.add_argument("--prefill", nargs="*", default=["1x64", "1x512", "1x2048", "4x128"], help="kept: slots x rows")
    args = parser.parse_args()
    layers = [StateLayer(SHAPE, 8, 16, GPU) for _ in range(48)]
    for layer in layers:
        for t in layer.tensors():
            t.normal_(0, 0.1)
        layer.g.abs_().neg_()
    for columns in args.columns:
        for n_seq in (1, 2, 4, 8):
            for width, fold in ((1, 1), (4, 3), (16, 6)):
                time_shape(n_seq, width, fold, False, {"columns": columns} if columns else {}, layers)
    for shape in args.prefill:
        n_seq, rows = map(int, shape.split("x"))
        for chunked in (gdn_cuda.CHUNKED, gdn_cuda.NEVER):
            time_shape(n_seq, rows, 0, True, {"chunked": chunked}, layers)


if __name__ == "__main__":
    main()
