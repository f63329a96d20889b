"""From how many rows on a row of a product has other bits than alone, on this GPU: by type, for a small matrix and a large one.

    python tools/bits_by_rows.py [--types Q8_0,Q4_K,...] [--rows 300] [--exact]

A line for each: the numbers of rows at which the first row's bits change, and how far they move. With --exact there are none.
"""

from __future__ import annotations

import argparse

import torch

from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.streamed import Streamed
from pyspec.gguf import GGMLType

DEVICE = torch.device("cuda", 0)
MATRICES = ((5120, 2048), (16480, 5120))


def changes(product: Streamed, x: torch.Tensor) -> list[tuple[int, float]]:
    """(rows, relative change of the first row against one row fewer), where there is any."""
    found, before = [], product(x[:1])[0].clone()
    for n in range(2, len(x) + 1):
        now = product(x[:n])[0]
        if not torch.equal(now, before):
            found.append((n, float((now - before).norm() / before.norm())))
        before = now.clone()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(type.name for type in CHUNKS))
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    use(KernelContext(is_exact=args.exact))
    for type in (GGMLType[name] for name in args.types.split(",")):
        for n_out, n_in in MATRICES:
            gen = torch.Generator().manual_seed(0)
            packed = random_matrix(type, n_out, n_in, gen, DEVICE)
            product = Streamed(packed, DEVICE, False, unpack(packed).half())
            found = changes(product, torch.randn(args.rows, n_in, generator=gen).to(DEVICE))
            text = ", ".join(f"{n} ({off:.1e})" for n, off in found) or "nowhere"
            print(f"{type.name:8} {n_out} x {n_in}: bits change at {text} rows", flush=True)


if __name__ == "__main__":
    main()
