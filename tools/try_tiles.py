# ruff: noqa
"""Which of the ways to launch `linear` in Triton is fastest: one launch among its like, and a layer's four behind their rows. Temporary."""

import multiprocessing
import sys
import time

import torch
from bench_linear import FLOOR, graph_us

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import tile_launch
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import drawn
from pyspec.cuda.ops.linear.triton import LinearTriton
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.gguf import GGMLType

GPU = torch.device("cuda", 0)
LAYER = (
    (16480, 5120, Epilogue.PLAIN),
    (5120, 6144, Epilogue.RESIDUAL),
    (17408, 5120, Epilogue.GATED),
    (5120, 17408, Epilogue.RESIDUAL),
)
SHAPES = (2, 3, 0, 1)
# name: warps, programs, stages, at_once
VARIANTS = {
    "1 16": (1, 16, 3, 8),
    "1 16 n": (1, 16, 3, 4),
    "1 12": (1, 12, 3, 8),
    "1 12 n 4": (1, 12, 4, 4),
    "2 12": (2, 12, 3, 8),
    "2 16": (2, 16, 3, 8),
    "2 10": (2, 10, 3, 8),
    "2 8 4": (2, 8, 4, 8),
}
ROWS = [int(n) for n in sys.argv[2].split(",")]
NAMES = sys.argv[3].split("+") if len(sys.argv) > 3 else list(VARIANTS)


def taken(spec, name):
    warps, programs, linear_triton.STAGES, tile_launch.AT_ONCE = VARIANTS[name]
    return LinearTriton(spec, (warps, programs))


def given(spec, n_row):
    torch.manual_seed(n_row)
    residual = torch.randn(n_row, spec.n_out, device=GPU) if spec.epilogue is Epilogue.RESIDUAL else None
    return torch.randn(n_row, spec.n_in, device=GPU).half(), torch.empty(n_row, spec.n_out, device=GPU), residual


def built(task):
    i, name, type = task
    try:
        spec = LinearSpec(GPU, GGMLType[type], *LAYER[i])
        weights = drawn(spec.type, spec.n_weight_row, spec.n_in, GPU)
        for n in ROWS[1:]:
            x, out, residual = given(spec, n)
            taken(spec, name).multiply(x, None, weights, out, residual)
        torch.cuda.synchronize()
    except Exception as e:
        return f"{name} {i}: {type(e).__name__}: {str(e)[:200]}"


def chain(specs, prepare, launches, weights, n_row):
    """(us of a layer, what its last product was) where each product's rows are those of the one before."""
    x0 = torch.linspace(-1, 1, n_row * 5120, device=GPU).view(n_row, 5120)
    outs = [[torch.empty(n_row, s.n_out, device=GPU) for s in specs] for _ in range(6)]
    residual = [torch.ones(n_row, s.n_out, device=GPU) if s.epilogue is Epilogue.RESIDUAL else None for s in specs]

    def run(layer):
        x = x0 if layer == 0 else outs[layer - 1][3]
        for i, spec in enumerate(specs):
            launches[i](prepare[i](x[:, : spec.n_in]), weights[i][layer % len(weights[i])], outs[layer][i], residual[i])
            x = outs[layer][i]

    us = graph_us([lambda layer=layer: run(layer) for layer in range(6)])
    return us, outs[-1][3].clone()


def main():
    type, rows, names = sys.argv[1], ROWS, NAMES
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for said in pool.imap_unordered(built, [(i, n, type) for n in names for i in SHAPES], chunksize=1):
            if said:
                print(said, flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    specs = [LinearSpec(GPU, GGMLType[type], *s) for s in LAYER]
    weights = [[drawn(s.type, s.n_weight_row, s.n_in, GPU) for _ in range(6)] for s in specs]
    packed = [[linear_cuda.random_packed(s.type, s.n_weight_row, s.n_in, GPU) for _ in range(4)] for s in specs]
    cuda = [linear_cuda.bind(s) for s in specs]
    ready = [rows_cuda.RowsLaunch(GPU, s.n_in, tuple(c.steps)) for s, c in zip(specs, cuda)]
    wide = [rows_cuda.WideRows(GPU, s.n_in) for s in specs]
    floors = [w[0].n_bytes / FLOOR * 1e6 for w in weights]
    print(
        f"layer: floor {sum(floors):.1f}; CUDA",
        *(f"{chain(specs, ready, [c.multiply for c in cuda], packed, n)[0]:.1f}" for n in rows),
    )
    want = {}
    for name in names:
        try:
            runs, us = [taken(s, name) for s in specs], []
            launches = [lambda x, w, o, r, run=run: run.multiply(x[0], None, w, o, r) for run in runs]
            for n in rows:
                took, y = chain(specs, wide, launches, weights, n)
                key = n, VARIANTS[name][1]
                want.setdefault(key, y)
                us.append(
                    f"{took:.1f}"
                    + ("" if torch.equal(y, want[key]) else " other bits")
                    + ("" if y.isfinite().all() else " nan")
                )
            print(f"  {name:14}", "  ".join(us), flush=True)
        except Exception as e:
            print(" ", name, f"{e.__class__.__name__}: {str(e)[:150]}", flush=True)
    for i in SHAPES:
        spec = specs[i]
        x = {n: given(spec, n) for n in rows}
        us = [
            graph_us([lambda w=w, n=n: cuda[i].multiply(p, w, *x[n][1:]) for w in packed[i] * 6])
            for n in rows
            for p in [ready[i](x[n][0].float())]
        ]
        print(
            f"{spec.n_weight_row} x {spec.n_in} {spec.epilogue.name}: floor {floors[i]:.1f}; CUDA",
            *(f"{u:.1f}" for u in us),
        )
        for name in names:
            try:
                run = taken(spec, name)
                us = [
                    graph_us([lambda w=w, n=n: run.multiply(x[n][0], None, w, *x[n][1:]) for w in weights[i] * 4])
                    for n in rows
                ]
                print(f"  {name:14}", "  ".join(f"{u:.1f}" for u in us), flush=True)
            except Exception as e:
                print(" ", name, f"{e.__class__.__name__}: {str(e)[:150]}", flush=True)


if __name__ == "__main__":
    main()
