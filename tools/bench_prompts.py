"""Time products of a prompt's rows: matrices of 27B, ways to multiply, numbers of rows. Milliseconds of all matrices of the model.

python tools/bench_prompts.py --types Q8_0 Q4_K --rows 300 2048
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pyspec.cuda.jit import GpuKind, compiled
from pyspec.cuda.ops.linear import unpacked, wgmma, wgmma_many
from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.dequant import half_floats
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.moe import builds as moe_builds
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.ref import MoeSpec, Stack, Stacks
from pyspec.cuda.ops.rows.cuda import WideRows
from pyspec.cuda.ops.rows.ref import Glu, Norm, Prep, of_rows
from pyspec.gguf import GGMLType

CUDA = torch.device("cuda", 0)
PLAIN, RESIDUAL, GATED = Epilogue.PLAIN, Epilogue.RESIDUAL, Epilogue.GATED
# n_out (features where gated), n_in, epilogue, how many of the model
MATRICES = (
    (17408, 5120, GATED, 64),
    (5120, 17408, RESIDUAL, 64),
    (16480, 5120, PLAIN, 48),
    (14336, 5120, PLAIN, 16),
    (5120, 6144, RESIDUAL, 64),
)
COPIES, REPEATS = 2, 5
EXPERTS = (GGMLType.Q8_0, GGMLType.Q4_K)


def compile_all(types: list[GGMLType]) -> None:
    programs = []
    for type in types:
        for n_out, n_in, epilogue, _ in MATRICES:
            spec = LinearSpec(CUDA, type, n_out, n_in, epilogue)
            kind = GpuKind((9, 0))
            programs += [*wgmma.programs(spec, kind), *wgmma_many.programs(spec, kind)]
            programs += unpacked.programs(spec, kind)
        moe = MoeSpec(CUDA, 8, 2048, 512, "swiglu", type, type, pieces=1)
        programs += moe_builds.programs(moe, GpuKind((9, 0), 132)) if type in EXPERTS else []
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, dict.fromkeys(programs)))


def ms(run: Callable[[int], object]) -> float:
    """Of one call, in a graph of two for each copy of the weights."""
    run(0)
    torch.cuda.synchronize()
    graph, n = torch.cuda.CUDAGraph(), 2 * COPIES
    with torch.cuda.graph(graph):
        for i in range(n):
            run(i % COPIES)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / n)
    return statistics.median(times)


class Case:
    """One matrix, and rows for it."""

    def __init__(self, type: GGMLType, n_out: int, n_in: int, epilogue: Epilogue) -> None:
        self.spec = LinearSpec(CUDA, type, n_out, n_in, epilogue)
        self.n_weight, self.gated = self.spec.n_weight_row, epilogue is GATED
        self.packed = [random_packed(type, self.n_weight, n_in, CUDA) for _ in range(COPIES)]
        self.tall, self.many = wgmma.WgmmaLaunch(self.spec, least=32), wgmma_many.bind(self.spec)
        self.unpack, self.wide = unpacked.UnpackLaunch(CUDA, type, self.gated), WideRows(CUDA, n_in)
        self.copies = [
            torch.empty(self.n_weight, n_in, dtype=torch.float16, device=CUDA) for _ in range(COPIES)
        ]
        for packed, copy in zip(self.packed, self.copies, strict=True):
            self.unpack(packed, 0, self.n_weight, copy)
        self.scratch, self.product = torch.empty_like(self.copies[0]), unpacked.bind(self.spec)
        self.norm = Norm(torch.ones(n_in, device=CUDA), 1e-6)

    def rows(self, n_row: int) -> None:
        spec = self.spec
        self.x = torch.randn(n_row, spec.n_in, device=CUDA)
        self.both = torch.randn(n_row, 2 * spec.n_in, device=CUDA) if spec.n_in == 17408 else self.x
        adds = spec.epilogue is RESIDUAL
        self.residual = torch.randn(n_row, spec.n_out, device=CUDA) if adds else None
        self.prep: Prep | None = None if adds else self.norm
        self.wide_prep: Prep | None = Glu() if spec.n_in == 17408 else self.prep

    def in_passes(self, i: int) -> Tensor:
        x, out = self.x, torch.empty(len(self.x), self.spec.n_out, device=CUDA)
        for first in range(0, len(x), 128):
            part = slice(first, first + 128)
            add = None if self.residual is None else self.residual[part]
            rows = self.tall.rows(x[part], of_rows(self.prep, part))
            self.tall.multiply(rows, self.packed[i], out[part], add)
        return out

    def in_one(self, i: int) -> Tensor:
        out = torch.empty(len(self.x), self.spec.n_out, device=CUDA)
        self.many(self.x, self.packed[i], out, self.residual, self.prep)
        return out

    def by_parts(self, i: int, size: int) -> Tensor:
        pads, wgmma_many.PADS = wgmma_many.PADS, (size,)
        try:
            return self.in_one(i)
        finally:
            wgmma_many.PADS = pads

    def product_alone(self, i: int) -> Tensor:
        out = torch.empty(len(self.x), self.spec.n_out, device=CUDA)
        self.many.multiply(self.ready, self.packed[i], out, self.residual)
        return out

    def by_copy(self, i: int) -> Tensor:
        half, powers = self.wide(self.both, self.wide_prep)
        y = torch.mm(half, self.copies[i].T, out_dtype=torch.float32)
        return self.wide.finish(y, powers, self.residual)

    def mm_alone(self, i: int) -> Tensor:
        return torch.mm(self.half, self.copies[i].T, out_dtype=torch.float32)

    def unpack_alone(self, i: int) -> None:
        self.unpack(self.packed[i], 0, self.n_weight, self.scratch)

    def by_library(self, i: int) -> Tensor:
        out = torch.empty(len(self.x), self.spec.n_out, device=CUDA)
        self.product(self.x, self.packed[i], out, self.residual, self.prep)
        return out

    def compared(self, name: str, run: Callable[[int], Tensor]) -> str:
        """Of what reads other rows, with others that read the same: "" or how far off."""
        has_gates = self.both is not self.x and name != "copy"
        like = self.in_passes if has_gates else self.by_copy
        want, got = like(0), run(0)
        if self.gated:
            got = got if len(got.T) != self.n_weight else _activated(got)
            want = _activated(want)
        off = float((got - want).norm() / want.norm())
        return "" if off < 1e-3 else f" WRONG by {off:.2g}"


def experts(type: GGMLType, n_row: int = 2048) -> None:
    """Of a layer of 35B-A3B: rows in launches of so many."""
    spec = MoeSpec(CUDA, 8, 2048, 512, "swiglu", type, type, pieces=1)

    def stack(n: int, n_out: int, n_in: int) -> Stack:
        blocks = torch.randint(
            0, 256, (n, n_out * n_in // type.block_size, type.type_size), dtype=torch.uint8, device=CUDA
        )
        for at in half_floats(type):
            blocks[..., at : at + 2] = torch.tensor([0.001], dtype=torch.float16, device=CUDA).view(
                torch.uint8
            )
        return Stack(blocks.view(n, -1), type, n_out, n_in)

    def stacks(n: int) -> Stacks:
        return Stacks(stack(n, 512, 2048), stack(n, 512, 2048), stack(n, 2048, 512))

    every = stacks(256)
    every = Stacks(every.gate, every.up, every.down, stacks(1))
    x = torch.randn(n_row, 2048, device=CUDA)
    ids = torch.rand(n_row, 256, device=CUDA).topk(8).indices.int()
    weights, found = torch.rand(n_row, 8, device=CUDA), []
    for most in (512, 1024, 2048):
        moe_cuda.rows_at_once = lambda n_used, n_expert, most=most: most
        launch = moe_cuda.ExpertsLaunch(spec, every)
        found.append(f"{most} at once {ms(lambda i, run=launch: run(x, ids, weights)):.3f} ms")
    print(f"experts {type.name} of a layer of 35B, {n_row} rows: {'; '.join(found)}", flush=True)


def _activated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K", "Q6_K"])
    parser.add_argument("--rows", nargs="+", type=int, default=[150, 300, 512, 2048])
    args = parser.parse_args()
    types = [GGMLType[name] for name in args.types]
    wgmma.PADS = (48, 128)
    wgmma_many.PADS = (*wgmma_many.PADS, 256)
    compile_all(types)
    print(torch.cuda.get_device_name(0), torch.__version__, flush=True)
    totals: dict[tuple[str, int, str], float] = {}
    for type in types:
        for n_out, n_in, epilogue, n in MATRICES:
            case, gated = Case(type, n_out, n_in, epilogue), epilogue is GATED
            for n_row in args.rows:
                case.rows(n_row)
                case.ready, case.half = case.many.rows(case.x, case.prep), case.x.half()
                ways: dict[str, Callable[[int], object]] = {
                    "passes": case.in_passes,
                    "many": case.in_one,
                    "many, parts of 128": lambda i, c=case: c.by_parts(i, 128),
                    "many, parts of 256": lambda i, c=case: c.by_parts(i, 256),
                    "(many, product)": case.product_alone,
                    "copy": case.by_copy,
                    "(copy, mm)": case.mm_alone,
                    "(unpack)": case.unpack_alone,
                    "unpacked": case.by_library,
                }
                line = []
                for name, run in ways.items():
                    try:
                        took = ms(run)
                        wrong = "" if name[0] == "(" else case.compared(name, run)
                    except Exception as e:  # noqa: BLE001 - the others go on
                        torch.cuda.synchronize()
                        took, wrong = float("nan"), f" {str(e)[:80]!r}"
                    totals[type.name, n_row, name] = totals.get((type.name, n_row, name), 0.0) + n * took
                    line.append(f"{name} {took:.3f}{wrong}")
                shape = f"{case.n_weight}x{n_in}{' gated' if gated else ''}"
                print(f"{type.name} {shape} {n_row} rows: {'; '.join(line)}", flush=True)
            del case
            torch.cuda.empty_cache()
    for type in [t for t in types if t in EXPERTS]:
        try:
            experts(type)
        except Exception as e:  # noqa: BLE001 - the table is to be printed
            print(f"experts {type.name}: {e!r}"[:300])
    names = list(dict.fromkeys(name for *_, name in totals))
    print("\nmilliseconds of all matrices of the model\n" + "type rows " + " | ".join(names))
    for type in types:
        for n_row in args.rows:
            found = " | ".join(f"{totals[type.name, n_row, name]:.1f}" for name in names)
            print(f"{type.name} {n_row}: {found}")


if __name__ == "__main__":
    main()
