"""Time `linear` on this GPU: milliseconds, GB/s and share of the floor for a model's matrices, graphs of many launches.

Weights rotate so that each launch reads from memory. `python tools/bench_linear.py [rows ...]`; `--chain` times a layer's four
products in a row, each behind the preparation of its rows, as a forward runs them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear.cuda import LinearLaunch, Tiling, random_packed
from pyspec.cuda.ops.linear.pack import Packed, packed_bytes
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.gguf import GGMLType

FLOOR = 4.3e12  # bytes a second a device-to-device copy moves on an H200
MATRICES = ((34816, 5120), (5120, 17408), (16480, 5120), (5120, 6144), (14336, 5120), (248320, 5120))
LAYERS = {
    "qwen3.6-27b": ((16480, 5120), (5120, 6144), (34816, 5120), (5120, 17408)),  # with Gated DeltaNet
    "qwen3.6-35b-a3b": ((12352, 2048), (2048, 4096), (1024, 2048), (2048, 512)),  # and the shared expert
    "nemotron-3-nano": ((10304, 2688), (2688, 4096), (7424, 2688), (2688, 3712)),
    "qwen3.5-122b-a10b": ((20608, 3072), (3072, 8192)),  # with Gated DeltaNet, experts apart
    "heads": ((248320, 3072), (131072, 4096)),
}
EXTRA = tuple(Tiling(m, n, 16 // m, t // n) for t in (1, 2, 4, 6, 8) for m, n in ((16, 1), (4, 2)) if t % n == 0)
DEVICE = torch.device("cuda", 0)


def graph_us(launches: list[Callable[[], None]], repeats: int = 7) -> float:
    """Median microseconds of one launch in a captured row of all of them."""
    for launch in launches:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def time_matrix(
    spec: LinearSpec, weights: list[Packed], rows: int, overlap: bool, shape: Tiling | None = None
) -> tuple[float, float]:
    """(product, product with its rows prepared) in microseconds."""
    launch = linear_cuda.bind(spec)
    launch.rows.overlap = overlap
    if shape is not None:
        launch = LinearLaunch(spec, (linear_cuda.step(DEVICE, spec.type, spec.epilogue, shape),))
    x, out = torch.randn(rows, spec.n_in, device=DEVICE), torch.empty(rows, spec.n_out, device=DEVICE)
    ready = rows_cuda.RowsLaunch(DEVICE, spec.n_in, tuple(launch.steps))(x)
    turns = weights * max(2, 24 // len(weights))
    alone = graph_us([lambda w=w: launch.multiply(ready, w, out) for w in turns])
    return alone, graph_us([lambda w=w: launch(x, w, out) for w in turns]) if shape is None else 0.0


def time_layer(type: GGMLType, layer: tuple[tuple[int, int], ...], rows: int) -> tuple[float, float]:
    """(microseconds, floor) of one layer's products with their rows, out of six different layers."""
    launches: list[Callable[[], None]] = []
    weights = [random_packed(type, *shape, DEVICE) for shape in layer * 6]
    for packed in weights:
        launch = linear_cuda.bind(LinearSpec(DEVICE, type, packed.n_out, packed.n_in, Epilogue.PLAIN))
        x, out = (torch.randn(rows, n, device=DEVICE) for n in (packed.n_in, packed.n_out))
        launches.append(partial(launch, x, packed, out))
    floor = sum(packed.data.numel() for packed in weights) / FLOOR * 1e6
    return graph_us(launches) * len(layer), floor / 6


def time_bf16(n_out: int, n_in: int, rows: int) -> float:
    weights = [torch.randn(n_out, n_in, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    x = torch.randn(rows, n_in, device=DEVICE, dtype=torch.bfloat16)
    return graph_us([lambda w=weights[i % 4]: x @ w.T for i in range(24)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[1, 8, 16, 24, 32, 48, 64, 96, 128])
    parser.add_argument("--types", default="Q8_0")
    parser.add_argument("--matrices", type=int, default=len(MATRICES))
    parser.add_argument("--alone", action="store_true", help="no programmatic launches")
    parser.add_argument("--shapes", action="store_true", help="time other shapes and cuBLAS bf16 as well")
    parser.add_argument("--chain", action="store_true", help="a layer's products in a row, nothing else")
    parser.add_argument("--model", choices=LAYERS, help="whose matrices; with --chain by default qwen3.6-27b's")
    parser.add_argument("--window", type=int, nargs=2, metavar=("EARLY", "AFTER"), help="instead of linear_cuda.window")
    parser.add_argument("--stages", type=int, help="at most, instead of linear_cuda.n_stages")
    parser.add_argument("--pairs-below", type=float, help="bytes of a matrix, instead of linear_pair.MOST_BYTES")
    args = parser.parse_args()
    if args.pairs_below is not None:
        linear_pair.MOST_BYTES = int(args.pairs_below)
    if args.window:
        linear_cuda.window = lambda rows: tuple(args.window)
    if args.stages:
        linear_cuda.n_stages = lambda type, shape, capability: min(
            args.stages, linear_cuda.n_shared(capability) // linear_cuda.stage_bytes(type, shape)
        )
    for type in (GGMLType[name] for name in args.types.split(",")):
        for rows in args.rows if args.chain else ():
            us, floor = time_layer(type, LAYERS[args.model or "qwen3.6-27b"], rows)
            print(f"{type.name} layer, {rows:3} rows: {us:.1f} us, floor {floor:.1f}", flush=True)
        if args.chain:
            continue
        for n_out, n_in in LAYERS[args.model] if args.model else MATRICES[: args.matrices]:
            spec = LinearSpec(DEVICE, type, n_out, n_in, Epilogue.PLAIN)
            n_bytes = packed_bytes(type, n_out, n_in)
            weights = [random_packed(type, n_out, n_in, DEVICE) for _ in range(min(8, 1 + int(6e8 / n_bytes)))]
            print(f"{type.name} {n_out} x {n_in}: floor {n_bytes / FLOOR * 1e6:.1f} us")
            for rows in args.rows:
                us, both = time_matrix(spec, weights, rows, not args.alone)
                share = n_bytes / us / 1e-6 / FLOOR
                line = f"  {rows:4} rows {us:8.1f} us {n_bytes / us / 1e3:7.0f} GB/s {share:5.0%} with rows {both:8.1f}"
                if args.shapes and n_out < 100_000:
                    line += f" cublas bf16 {time_bf16(n_out, n_in, rows):8.1f}"
                print(line, flush=True)
            for shape in EXTRA if args.shapes else ():
                us, _ = time_matrix(spec, weights, shape.rows, not args.alone, shape)
                print(f"  {shape} {shape.rows} rows: {us:.1f} us", flush=True)


if __name__ == "__main__":
    main()
