"""Time `linear` in Triton on this GPU beside the CUDA kernels: microseconds of one launch in a graph, for variants of how it is cut.

    python tools/bench_tiles.py [--types Q8_0,Q4_K] [--rows 1 8] [--check] [--variants]

Weights rotate so that each launch reads from memory. Everything is compiled first, in processes of their own. --check: every type against
the reference, too, with 1 to 100 rows. --variants: other numbers of warps, stages and programs beside those that the launcher takes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import replace

import torch
from bench_linear import FLOOR, graph_us

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import FORMATS, TiledMatrix, drawn
from pyspec.cuda.ops.linear.triton import LinearTriton
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows import triton as rows_triton
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.gguf import GGMLType

MATRICES = (
    (17408, 5120, Epilogue.GATED),
    (5120, 17408, Epilogue.RESIDUAL),
    (16480, 5120, Epilogue.PLAIN),
    (5120, 6144, Epilogue.RESIDUAL),
)
OWN = (0, 0, 0)
VARIANTS = ((1, 3, 12), (1, 3, 16), (2, 3, 12), (1, 4, 10))
"""Warps, stages, programs of a multiprocessor."""


def taken(spec: LinearSpec, variant: tuple[int, int, int]) -> LinearTriton:
    if variant == OWN:
        return linear_triton.bind(spec)
    warps, linear_triton.STAGES, programs = variant
    return LinearTriton(spec, (warps, programs))


def random_tiles(spec: LinearSpec) -> TiledMatrix:
    return drawn(spec.type, spec.n_weight_row, spec.n_in, spec.device)


def given(spec: LinearSpec, n_row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, out = (
        torch.randn(n_row, spec.n_in, device=spec.device).half(),
        torch.empty(n_row, spec.n_out, device=spec.device),
    )
    return x, torch.ones(n_row, device=spec.device), out, out if spec.epilogue is Epilogue.RESIDUAL else None


def built(task: tuple[LinearSpec, tuple[int, int, int], bool]) -> str:
    """Compile, in a process of its own."""
    spec, variant, checks = task
    try:
        if checks:
            run = linear_triton.bind(spec)

            def launch(x: torch.Tensor, *rest: object) -> None:
                run.multiply(*rows_triton.bind(RowsSpec(spec.device, spec.n_in, PrepKind.PLAIN))(x.float()), *rest)

            launch.pack = run.pack
            why = linear_cuda.check(launch, linear_ref.bind(spec), spec)
            return f"{spec.type.name} {spec.epilogue.name}: {why or 'right'}"
        small = replace(spec, device=torch.device("cuda", 0))
        x, powers, out, residual = given(small, 1)
        taken(small, variant).multiply(x, powers, random_tiles(small), out, residual)
        if variant in (OWN, VARIANTS[0]):
            linear_cuda.bind(small)
        torch.cuda.synchronize()
        return ""
    except Exception as e:  # noqa: BLE001 - a variant that does not compile is left out
        return f"{spec.type.name} {variant}: {type(e).__name__}: {str(e)[:200]}"


def cuda_us(spec: LinearSpec, rows: int) -> float:
    launch = linear_cuda.bind(spec)
    weights = [linear_cuda.random_packed(spec.type, spec.n_weight_row, spec.n_in, spec.device) for _ in range(4)]
    x, _, out, residual = given(spec, rows)
    ready = rows_cuda.RowsLaunch(spec.device, spec.n_in, tuple(launch.steps))(x.float())
    return graph_us([lambda w=w: launch.multiply(ready, w, out, residual) for w in weights * 6])


def triton_us(spec: LinearSpec, variant: tuple[int, int, int], weights: list[TiledMatrix], rows: int) -> float:
    run = taken(spec, variant)
    x, powers, out, residual = given(spec, rows)
    return graph_us(
        [lambda w=w: run.multiply(x, powers, w, out, residual) for w in weights * max(2, 24 // len(weights))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q8_0,Q4_K,Q6_K,NVFP4,IQ4_NL")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--matrices", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    gpu, began = torch.device("cuda", 0), time.monotonic()
    types = [GGMLType[name] for name in args.types.split(",")]
    specs = [LinearSpec(gpu, t, n_out, n_in, e) for t in types for n_out, n_in, e in MATRICES[: args.matrices]]
    variants = VARIANTS if args.variants else (OWN,)
    tasks = [(LinearSpec(gpu, t, 136, 1024, e), OWN, True) for t in FORMATS for e in Epilogue if args.check]
    tasks += [(spec, variant, False) for spec in specs for variant in variants]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for said in pool.imap_unordered(built, tasks, chunksize=1):
            if said:
                print(said, flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for spec in specs:
        weights = [random_tiles(spec)]
        weights += [random_tiles(spec) for _ in range(min(7, int(4e8 / weights[0].n_bytes)))]
        floor = weights[0].n_bytes / FLOOR * 1e6
        try:
            cuda = [cuda_us(spec, rows) for rows in args.rows]
        except Exception as e:  # noqa: BLE001
            cuda = [0.0]
            print(f"{type(e).__name__}: {str(e)[:100]}")
        print(
            f"{spec.type.name} {spec.n_weight_row} x {spec.n_in} {spec.epilogue.name}: floor {floor:.1f}, cuda",
            *(f"{us:.1f}" for us in cuda),
        )
        for variant in variants:
            try:
                us = [triton_us(spec, variant, weights, rows) for rows in args.rows]
                print("  ", *(variant if variant != OWN else ("own",)), ":", *(f"{x:.1f}" for x in us), flush=True)
            except Exception as e:  # noqa: BLE001
                print("  ", variant, f"{type(e).__name__}: {str(e)[:100]}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
