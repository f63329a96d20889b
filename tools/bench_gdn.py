"""Time gdn's CUDA kernels at the size of Qwen3.6-27B against the bytes they must move. `python -m tools.bench_gdn`.

Every figure is the median over replays of a graph of one forward through all layers' own memory, which is far more than the
cache holds. The floor counts state in and out, records and windows written, raw rows read.
`--into` times outputs that are prepared for the next product on the way against the same by a kernel of its own, in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.rows.cuda import Into, RowsLaunch
from pyspec.cuda.ops.rows.ref import HeadNorm
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

SHAPE = GdnShape(16, 48, 128, 4, 10240)
GPU = torch.device("cuda", 0)
BANDWIDTH = 4.3e12  # bytes a second of a device copy, measured


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replayed(works: list[Callable[[], None]], repeats: int) -> list[float]:
    """Median milliseconds of one replay of each, taken in turns."""
    graphs = [captured(work) for work in works]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats * len(works))]
    for graph in graphs:
        graph.replay()
    for i, (start, end) in enumerate(marks):
        start.record()
        graphs[i % len(works)].replay()
        end.record()
    torch.cuda.synchronize()
    took = [start.elapsed_time(end) for start, end in marks]
    return [median(took[i :: len(works)]) for i in range(len(works))]


def floor_bytes(seqs: list[Seq]) -> int:
    """Least traffic of one layer: the state once in, and once out if it changes."""
    state, row = SHAPE.n_v_head * 128 * 128 * 4, SHAPE.n_channel * 4
    kv = (SHAPE.n_k_head + SHAPE.n_v_head) * 128 * 4
    total = 0
    for s in seqs:
        total += (
            state * (2 if s.keep or (s.n_fold and not s.late) else 1)
            + s.width * (row + SHAPE.n_v_head * 128 * 4)
            + s.n_fold * kv
        )
        total += 0 if s.keep else s.width * (row + kv)
    return total


def drawn(n: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """((m, z, alpha, beta) as the fused projection gives them, (a, dt_bias, conv_w))."""
    n_v = SHAPE.n_v_head
    sizes = [SHAPE.n_channel, n_v * SHAPE.dim, n_v, n_v]
    weights = -torch.rand(n_v, device=GPU), torch.randn(n_v, device=GPU), torch.randn(SHAPE.n_channel, 4, device=GPU)
    return torch.randn(n, sum(sizes), device=GPU).split(sizes, 1), weights


def time_into(n_seq: int, width: int, fold: int, columns: int, layers: list[StateLayer]) -> None:
    """gdn alone, gdn and rows.cu, and gdn that prepares its rows: us a layer, in one run."""
    run = gdn_cuda.bind(gdn_ref.GdnSpec(GPU, SHAPE, 1e-6), columns=columns or None)
    seqs = [Seq(i, 0, [0] * width, False, 0, fold) for i in range(n_seq)]
    batch = lay_out(SlotTable(n_seq, 64 * n_seq, 64), seqs, GPU)
    (m, z, alpha, beta), weights = drawn(n_seq * width)
    into = Into(
        RowsLaunch(GPU, SHAPE.n_v_head * SHAPE.dim, (8, 16, 24, 32, 48)),
        HeadNorm(torch.ones(SHAPE.dim, device=GPU), 1e-6, z),
    )

    def alone() -> None:
        for layer in layers:
            run(m, alpha, beta, *weights, layer, batch)

    def separate() -> None:
        for layer in layers:
            into.rows(run(m, alpha, beta, *weights, layer, batch).flatten(1), into.prep)

    def fused() -> None:
        for layer in layers:
            run.prepared(m, alpha, beta, *weights, layer, batch, into=into)

    took = [ms / len(layers) * 1e3 for ms in replayed([alone, separate, fused], 31)]
    print(
        f"np {n_seq} T {width:4} fold {fold:2} columns {columns or 'auto'}: alone {took[0]:6.2f}, "
        f"with rows.cu {took[1]:6.2f}, prepared {took[2]:6.2f} us a layer",
        flush=True,
    )


def time_shape(n_seq: int, width: int, fold: int, keep: bool, how: dict[str, int], layers: list[StateLayer]) -> None:
    run = gdn_cuda.bind(gdn_ref.GdnSpec(GPU, SHAPE, 1e-6), **how)
    seqs = [Seq(i, 0, [0] * width, keep, 0, fold) for i in range(n_seq)]
    batch = lay_out(SlotTable(n_seq, 64 * n_seq, 64), seqs, GPU)
    (m, _, alpha, beta), weights = drawn(n_seq * width)

    def forward() -> None:
        for layer in layers:
            run(m, alpha, beta, *weights, layer, batch)

    took = replayed([forward], 3 if width > 64 else 15)[0] / len(layers) * 1e3
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
    parser.add_argument(
        "--into", action="store_true", help="only: rows prepared on the way against a kernel of its own"
    )
    args = parser.parse_args()
    layers = [StateLayer(SHAPE, 8, 16, GPU) for _ in range(48)]
    for layer in layers:
        for t in layer.tensors():
            t.normal_(0, 0.1)
        layer.g.abs_().neg_()
    if args.into:
        for columns in args.columns:
            for n_seq, width, fold in (
                (1, 1, 1),
                (1, 4, 3),
                (1, 8, 5),
                (1, 16, 6),
                (2, 1, 1),
                (4, 1, 1),
                (4, 4, 3),
                (8, 6, 4),
            ):
                time_into(n_seq, width, fold, columns, layers)
        return
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
