"""Time mamba2's CUDA kernels at the size of Nemotron-3 against the bytes they must move. `python -m tools.bench_mamba2`.

Every figure is the median over replays of a graph of one forward through all layers' own memory, which is far more than the
cache holds. The floor counts state in and out, records and windows written, raw rows read, outputs written.
"""

from __future__ import annotations

import argparse

import torch

from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable
from tools.bench_gdn import BANDWIDTH, GPU, replayed

SHAPES = {"super": Mamba2Shape(128, 64, 8, 128, 4), "nano": Mamba2Shape(64, 64, 8, 128, 4)}


def floor_bytes(shape: Mamba2Shape, seqs: list[Seq]) -> int:
    """Least traffic of one layer: the state once in, and once out if it changes."""
    inner = shape.n_head * shape.head_dim
    state, raw, record = inner * shape.n_state * 4, shape.n_channel * 4, (inner + shape.n_group * shape.n_state) * 4
    total = 0
    for s in seqs:
        total += state * (2 if s.keep or s.n_fold else 1) + s.width * (raw + inner * 4) + s.n_fold * record
        total += 0 if s.keep else s.width * (raw + record)
    return total


def time_shape(shape: Mamba2Shape, seqs: list[Seq], how: dict[str, int], layers: list[StateLayer]) -> None:
    run = mamba2_cuda.bind(mamba2_ref.Mamba2Spec(GPU, shape), **how)
    n = sum(s.width for s in seqs)
    batch = lay_out(SlotTable(len(seqs), 64 * len(seqs), 64), seqs, GPU)
    inner = shape.n_head * shape.head_dim
    _, m, dt = torch.randn(n, inner + shape.n_channel + shape.n_head, device=GPU).split(
        [inner, shape.n_channel, shape.n_head], 1
    )  # as the fused projection gives them
    p = mamba2_ref.make_params(shape, torch.Generator().manual_seed(0), GPU)

    def forward() -> None:
        for layer in layers:
            run(m, dt, p, layer, batch)

    took = replayed(forward, 3 if n > 512 else 15) / len(layers) * 1e3
    least = floor_bytes(shape, seqs) / BANDWIDTH * 1e6
    kind = "keep" if seqs[0].keep else "verify"
    print(
        f"{shape.n_head:3} heads np {len(seqs)} T {seqs[0].width:4} fold {seqs[0].n_fold:2} {kind:6} {how or ''}: "
        f"{took:7.2f} us a layer, floor {least:5.2f} ({least / took:4.0%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, nargs="*", default=list(SHAPES))
    parser.add_argument("--columns", type=int, nargs="*", default=[0, 2, 4], help="columns of a lane; 0 is automatic")
    parser.add_argument(
        "--prefill", nargs="*", default=["1x129", "1x512", "1x2048", "4x256"], help="kept: slots x rows"
    )
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    for name in args.shape:
        shape = SHAPES[name]
        layers = [StateLayer(shape, 8, 16, GPU) for _ in range(args.layers)]
        for t in (t for layer in layers for t in layer.tensors()):
            t.normal_(0, 0.1)
        for columns in args.columns:
            for n_seq in (1, 2, 4, 8):
                for width, fold in ((1, 1), (4, 3), (16, 6)):
                    seqs = [Seq(i, 0, [0] * width, False, 0, fold) for i in range(n_seq)]
                    time_shape(shape, seqs, {"columns": columns} if columns else {}, layers)
        for text in args.prefill:
            n_seq, rows = map(int, text.split("x"))
            seqs = [Seq(i, 0, [0] * rows, True) for i in range(n_seq)]
            for chunked in (mamba2_cuda.CHUNKED, mamba2_cuda.NEVER):
                time_shape(shape, seqs, {"chunked": chunked}, layers)


if __name__ == "__main__":
    main()
