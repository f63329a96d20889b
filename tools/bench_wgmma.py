"""Time linear_wgmma on a Hopper GPU beside cuBLAS on f16 copies: graphs of many launches, weights out of the cache.

`python tools/bench_wgmma.py [rows ...] [--types Q8_0,Q4_K]`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from bench_linear import graph_us

from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.pack import Packed
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import WgmmaLaunch, prepare
from pyspec.gguf import GGMLType

FLOOR = 4.3e12  # bytes a second a device-to-device copy moves on an H200
PEAK = 790e12  # f16 operations a second of a large cuBLAS product on an H200
DEVICE = torch.device("cuda", 0)
# weight rows, columns, epilogue, how many Qwen3.6-27B has
MATRICES = (
    (34816, 5120, Epilogue.GATED, 64),
    (5120, 17408, Epilogue.RESIDUAL, 64),
    (16480, 5120, Epilogue.PLAIN, 48),
    (14336, 5120, Epilogue.PLAIN, 16),
    (5120, 6144, Epilogue.RESIDUAL, 64),
    (248320, 5120, Epilogue.PLAIN, 1),
)


def launches(spec: LinearSpec, weights: list[Packed], n_row: int, overlap: bool) -> list[Callable[[], None]]:
    launch = WgmmaLaunch(spec, overlap=overlap)
    rows = prepare(torch.randn(n_row, spec.n_in, device=DEVICE))
    out = torch.zeros(n_row, spec.n_out, device=DEVICE)
    residual = out if spec.epilogue is Epilogue.RESIDUAL else None
    turns = weights * max(1, 24 // len(weights))
    return [lambda w=w: launch.multiply(rows, w, out, residual) for w in turns]


def cublas(n_out: int, n_in: int, n_row: int) -> list[Callable[[], None]]:
    n = min(8, 1 + int(6e8 / (2 * n_out * n_in)))
    weights = [torch.randn(n_out, n_in, device=DEVICE, dtype=torch.float16) for _ in range(n)]
    x = torch.randn(n_row, n_in, device=DEVICE).half()
    return [lambda w=weights[i % n]: torch.mm(x, w.T, out_dtype=torch.float32) for i in range(max(24, n))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--types", default="Q8_0")
    parser.add_argument("--alone", action="store_true", help="no programmatic launches")
    args = parser.parse_args()
    for n_row in args.rows:
        f16 = {(n_out, n_in): graph_us(cublas(n_out, n_in, n_row)) for n_out, n_in, _, _ in MATRICES}
        for type in (GGMLType[name] for name in args.types.split(",")):
            total = total_f16 = 0.0
            for n_out, n_in, epilogue, count in MATRICES:
                spec = LinearSpec(DEVICE, type, n_out // (2 if epilogue is Epilogue.GATED else 1), n_in, epilogue)
                first = random_packed(type, n_out, n_in, DEVICE)
                n_bytes = first.data.numel()
                weights = [
                    first,
                    *(random_packed(type, n_out, n_in, DEVICE) for _ in range(min(7, int(6e8 / n_bytes)))),
                ]
                us = graph_us(launches(spec, weights, n_row, not args.alone))
                floor = max(n_bytes / FLOOR, 2 * n_out * n_in * n_row / PEAK) * 1e6
                line = f"{type.name:5} {n_out:6} x {n_in:5} {n_row:4} rows: floor {floor:6.1f} us, here {us:6.1f} us"
                print(f"{line} ({floor / us:4.0%}), cuBLAS f16 {f16[n_out, n_in]:6.1f} us", flush=True)
                total, total_f16 = total + us * count / 1e3, total_f16 + f16[n_out, n_in] * count / 1e3
            print(f"{type.name:5} {n_row:4} rows, the whole model: {total:.2f} ms, cuBLAS f16 {total_f16:.2f} ms")


if __name__ == "__main__":
    main()
