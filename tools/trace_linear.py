"""Where the time of a layer's products goes on a GPU: every CTA of `linear` writes down the clock at five places.

    python tools/trace_linear.py [rows ...]

Microseconds since the last CTA of the product before ended (mean over layers): CTAs start; the predecessor is over; the first stage
with rows is there; all is summed; the CTA ends. Once with the kernels that prepare rows, and once with the products alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from bench_linear import DEVICE, FLOOR, LAYERS, graph_us
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.pack import Packed
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.gguf import GGMLType

N_LAYER, N_CTA = 8, 1024
LAYER = LAYERS["qwen3.6-27b"]
STAMP = '{u64 now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); if (threadIdx.x == 0) stamps[blockIdx.x * 8 + I] = now;}'
EDITS = (  # of linear_sm90.cu: (text, with stamps)
    ("int n_out, int n_tile16, int n_chunk) {\n  extern", "int n_out, int n_tile16, int n_chunk, u64* stamps) {\n  STAMP(0)\n  extern"),
    ("  wait_for_predecessor();\n\n  const Shape s{", "  wait_for_predecessor();\n  STAMP(1)\n"
     "  if (threadIdx.x == 0) barrier_wait(full, 0);\n  STAMP(2)\n  const Shape s{"),
    ("sum_units(acc, at, next - unit, base, full, empty);", "sum_units(acc, at, next - unit, base, full, empty); STAMP(3)"),
    ("    unit = next;\n  }\n}", "    unit = next;\n  }\n  STAMP(4)\n}"),
)  # fmt: skip


class Stamps:
    """Gives each launch of `linear` a place of its own: [launch, CTA, 8] nanoseconds."""

    def __init__(self, n_launch: int) -> None:
        self.places, self.n = torch.zeros(n_launch, N_CTA * 8, dtype=torch.int64, device=DEVICE), 0
        source, kernel, launch = jit.source, jit.Compiled.kernel, jit.Kernel.launch

        def stamped(stem: str) -> str:
            text = source(stem)
            if stem != "linear_sm90":
                return text
            for old, new in EDITS:
                assert text.count(old) == 1, f"linear_sm90.cu has changed: {old!r}"
                text = text.replace(old, new)
            return f"#define STAMP(I) {STAMP}\n{text}"

        def with_place(compiled: jit.Compiled, symbol: str, signature: str) -> jit.Kernel:
            return kernel(compiled, symbol, signature + "p" * (symbol == "linear"))

        def at_place(
            k: jit.Kernel, grid: Sequence[int], block: int, args: Sequence[jit.Arg], *rest: int, **how: bool
        ) -> None:
            if k.symbol == "linear":
                args, self.n = (*args, self.places[self.n % len(self.places)]), self.n + 1
            launch(k, grid, block, args, *rest, **how)

        jit.source, jit.Compiled.kernel, jit.Kernel.launch = stamped, with_place, at_place  # type: ignore[assignment,method-assign]

    def table(self, n_cta: int) -> Tensor:
        return self.places.view(len(self.places), N_CTA, 8)[:, :n_cta].double().cpu() / 1e3


def launches(weights: Sequence[Packed], rows: int, prepare: bool) -> list[Callable[[], None]]:
    found: list[Callable[[], None]] = []
    for packed in weights:
        launch = linear_cuda.bind(LinearSpec(DEVICE, packed.type, packed.n_out, packed.n_in, Epilogue.PLAIN))
        x, out = (torch.randn(rows, n, device=DEVICE) for n in (packed.n_in, packed.n_out))
        found.append(
            partial(launch, x, packed, out) if prepare else partial(launch.multiply, launch.rows(x), packed, out)
        )
    return found


def main() -> None:
    many, stamps = [int(n) for n in sys.argv[1:]] or [1, 8, 32], Stamps(len(LAYER) * N_LAYER)
    weights = [random_packed(GGMLType.Q8_0, *shape, DEVICE) for shape in LAYER * N_LAYER]
    floors = [packed.data.numel() / FLOOR * 1e6 for packed in weights[: len(LAYER)]]
    for prepare in (True, False):
        for rows in many:
            run, stamps.n = launches(weights, rows, prepare), 0
            us = graph_us(run) * len(LAYER)
            print(
                f"{rows} rows, {'with' if prepare else 'without'} their kernels: {us:.1f} us a layer, floor {sum(floors):.1f}"
            )
            t = stamps.table(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
            for i, shape in enumerate(LAYER):
                at = range(i + 2 * len(LAYER), len(t), len(LAYER))
                since = torch.stack([t[k] - t[k - 1, :, 4].max() for k in at])
                low, mid, high = since.amin(1).mean(0), since.median(1).values.mean(0), since.amax(1).mean(0)
                names = ("start", "predecessor over", "first rows", "summed", "end")
                parts = (f"{name} {low[j]:.1f} {mid[j]:.1f} {high[j]:.1f}" for j, name in enumerate(names))
                print(f"  {shape} (floor {floors[i]:.1f}), first median last: {'; '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
