"""Compare builds of the CPU's kernels for several instruction sets, which have the same bits, by time.

    python tools/cpu_builds.py products --builds avx512 avxvnni --types Q8_0 Q4_K Q6_K --rows 1 4 8 512 --threads 1 8
    ... --define NAME=1                                            a constant of the sources, in the first build
    python tools/cpu_builds.py run avx512 bench MODEL.gguf ...   a command of pyspec with this build and none that is better

`products` times matrices that together pass the caches (`--mib`), the builds in turns, and prints the best of them: microseconds of one
product, and its GB of weights and billion products a second. The first call of each compiles it, in half a minute;
`--rows` without numbers does no more.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pyspec.cache import cache_root
from pyspec.cpu import build, kernels
from pyspec.cuda.ops.linear.cpu import CpuRows, prepared, sample, table_of
from pyspec.gguf import GGMLType

SHORTEST_S = 0.02  # of one turn
PRODUCT = struct.Struct("<15qd")  # linear.h's ProductArgs


def force(isa: str) -> None:
    """This process takes that build. Call it before its kernels are loaded."""
    better = list(build.sets())[: list(build.sets()).index(isa)]
    left = tuple(name for name in build.isas() if name not in better)
    if isa not in left:
        raise SystemExit(f"this process cannot run {isa}: the CPU does not have it")
    build.isas = lambda: left  # type: ignore[assignment]


def call_of(
    lib: ctypes.CDLL, rows: CpuRows, type: GGMLType, raws: Sequence[Tensor]
) -> Callable[[], Tensor]:
    """One product with each of the matrices, in order; the result of the last one."""
    n, n_in, n_out = *rows.x.shape, raws[0].shape[0]
    out, table = torch.full((n, n_out), torch.nan), table_of(type)
    address = ctypes.cast(lib.pyspec_product, ctypes.c_void_p)
    where = [x.data_ptr() for x in (rows.x, rows.q, rows.scales, rows.sums, out) if x is not None]
    last = (0, 0, 0 if table is None else table.data_ptr(), int(type), n, n_in, n_out, n_out, 0, 1.0)
    packed = [PRODUCT.pack(raw.data_ptr(), *where, *last) for raw in raws]

    def call() -> Tensor:
        for one in packed:
            lib.pyspec_run(address, one, kernels.n_thread())
        return out

    return call


def seconds(call: Callable[[], Tensor]) -> float:
    n, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < SHORTEST_S or n == 0:
        call()
        n += 1
    return spent / n


def products(options: argparse.Namespace) -> None:
    libs = {
        isa: kernels._opened(str(built(isa, options.define if i == 0 else [])))
        for i, isa in enumerate(options.builds)
    }
    if not options.rows:
        return
    n_out, n_in = options.size
    print(f"{'type':8}{'threads':>8}{'rows':>6}", *(f"{isa:>30}" for isa in libs), "   last over first")
    for type in map(GGMLType.__getitem__, options.types):
        made = sample(type, n_out, n_in, torch.Generator().manual_seed(1))
        n_copy = max(1, (options.mib << 20) // made.numel())
        raws = [made, *(made.clone() for _ in range(n_copy - 1))]
        for n_thread in options.threads:
            torch.set_num_threads(n_thread)
            for n_row in options.rows:
                print_line(libs, type, raws, n_thread, n_row, options.turns)


def built(isa: str, define: Sequence[str]) -> Path:
    """The library, compiled where it is missing."""
    if not define:
        return build.find(isa) or build.build(isa)
    folder = cache_root() / "cpu" / "-".join(define)
    path = folder / build.file_name(isa)
    return path if path.is_file() else build.build(isa, folder, tuple(f"-D{x}" for x in define))


def print_line(
    libs: dict[str, ctypes.CDLL],
    type: GGMLType,
    raws: list[Tensor],
    n_thread: int,
    n_row: int,
    n_turn: int,
) -> None:
    n_out, n_in = raws[0].shape[0], raws[0].shape[1] // type.type_size * type.block_size
    x = torch.randn(n_row, n_in, generator=torch.Generator().manual_seed(n_row))
    rows = prepared(x, None, whole=True)
    few = raws[: max(1, len(raws) * 4 // max(4, n_row))]  # many rows read weights from caches anyway
    calls = {isa: call_of(lib, rows, type, few) for isa, lib in libs.items()}
    results = [call().clone() for call in calls.values()]
    same = all(torch.equal(results[0], y) for y in results)
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(n_turn):
        for isa, call in calls.items():
            best[isa] = min(best[isa], seconds(call) / len(few))
    cells = [
        f"{s * 1e6:10,.1f} us{raws[0].numel() / s / 1e9:7.1f}{n_row * n_out * n_in / s / 1e9:8,.0f}  "
        for s in best.values()
    ]
    times = list(best.values())
    beside = f"{times[-1] / times[0]:8.2f}" if len(times) > 1 else ""
    print(
        f"{type.name:8}{n_thread:8}{n_row:6}", *cells, beside, "" if same else "OTHER BITS", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True)
    timed, run = ways.add_parser("products"), ways.add_parser("run")
    timed.add_argument("--builds", nargs="+", default=list(build.isas()[:2]))
    timed.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K", "Q6_K"])
    timed.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 512])
    timed.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    timed.add_argument("--size", type=int, nargs=2, default=[2048, 4096], metavar=("OUT", "IN"))
    timed.add_argument("--mib", type=int, default=160, help="of weights")
    timed.add_argument("--turns", type=int, default=3)
    timed.add_argument("--define", nargs="+", default=[], metavar="NAME=NUMBER")
    run.add_argument("isa")
    run.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.way == "products":
        products(options)
        return
    force(options.isa)
    from pyspec.cli import main as pyspec

    sys.argv = ["pyspec", *options.command]
    pyspec()


if __name__ == "__main__":
    main()
