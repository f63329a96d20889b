"""`banked` on NVIDIA GPUs: one launch (banked.cu), a block for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.banked.ref import Banked, BankedSpec

MOST, THREADS = 16, 256  # as in banked.cu and banked.cpp


def limits(spec: BankedSpec) -> str | None:
    if spec.n_kept > MOST:
        return f"{spec.n_kept} kept rows; the kernel takes {MOST}"
    return f"rows of {spec.n}; the kernel takes multiples of 4" if spec.n % 4 else None


FILE = KernelFile[BankedSpec](
    "banked",
    "p" * (MOST + 1) + "pp" + "f",
    lambda spec: {"N_STREAM": spec.n_kept + 1, "COLUMNS": spec.n},
)


def bind(spec: BankedSpec) -> Banked:
    kernel = FILE.kernel(spec.device, spec)

    def run(kept: Sequence[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        rows = (*kept, x)
        assert len(rows) == spec.n_kept + 1 and weight.shape == (spec.n,)
        assert all(t.dtype == torch.float32 and t.is_contiguous() and t.shape == x.shape for t in rows)
        out = torch.empty_like(x)
        if len(x):
            args = *rows, *(None,) * (MOST - len(kept)), weight, out, spec.eps
            kernel.launch((len(x),), THREADS, args, overlap=True)
        return out

    return run


def check(launch: Banked, reference: Banked, spec: BankedSpec) -> str | None:
    """Rows of sizes down to where eps counts, of scores near each other and far apart."""
    gen = torch.Generator().manual_seed(0)
    for n_row, size in ((1, 1.0), (5, 30.0), (70, 1e-3)):
        rows = [
            size * torch.randn(n_row, spec.n, generator=gen).to(spec.device)
            for _ in range(spec.n_kept + 1)
        ]
        weight = (3 * torch.randn(spec.n, generator=gen) / spec.n**0.5).to(spec.device)
        got, want = (run(rows[:-1], rows[-1], weight) for run in (launch, reference))
        off = float(((got - want).abs().amax(-1) / want.abs().amax(-1)).nan_to_num(torch.inf).amax())
        if not off < 2e-5:
            return f"{n_row} rows differ from the reference by {off:.2g} of their size"
    return None
