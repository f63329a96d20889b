"""`angles` on NVIDIA GPUs: one launch (angles.cu)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.angles.ref import Angles, AnglesSpec

THREADS = 128
MAX_ROWS = 1 << 30
OFF = 2.0**-22  # difference that two libraries may have at full precision


FILE: KernelFile[AnglesSpec] = KernelFile("angles", "pppp" + "iif")


def inverse_of(factor: float) -> np.float32:
    """The factor of positions: torch divides a GPU tensor by a number by multiplying with it."""
    return np.float32(1.0) / np.float32(factor)


def bind(spec: AnglesSpec) -> Angles:
    kernel = FILE.kernel(spec.device, spec)

    def angles(positions: Tensor, freq: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        n_row, n = positions.shape[0], freq.shape[0]
        assert positions.dtype == torch.int64 and positions.is_contiguous() and n_row <= MAX_ROWS
        assert freq.dtype == torch.float32 and freq.is_contiguous()
        cos, sin = (freq.new_empty(n_row, 1, n) for _ in "cs")
        if n_row and n:
            args = positions, freq, cos, sin, n_row, n, inverse_of(factor)
            kernel.launch((-(-n_row * n // THREADS),), THREADS, args)
        return cos, sin

    return angles


def frequencies(n: int, device: torch.device) -> Tensor:
    """Of a rope of 2 n dimensions and a usual base."""
    return 1e6 ** (-torch.arange(n, dtype=torch.float32, device=device) / max(n, 1))


def hostile(n_row: int, gen: torch.Generator) -> Tensor:
    """[n_row] int64: small positions, long contexts, and values with another reduction to one period."""
    ends = torch.tensor([0, 1, 2, 7, 105_614, 105_616, 131_071, 262_143, (1 << 24) + 1, (1 << 31) + 7])
    return torch.cat([ends, torch.randint(0, 1 << 18, (n_row,), generator=gen)])[:n_row]


def check(launch: Angles, reference: Angles, spec: AnglesSpec) -> str | None:
    """Positions up to beyond 32 bits; a factor that halves keep exact, for a CPU divides where a GPU multiplies."""
    gen = torch.Generator().manual_seed(0)
    for n_row, n, factor in ((1, 32, 1.0), (70, 48, 4.0), (300, 3, 1.0), (5, 0, 1.0)):
        positions, freq = hostile(n_row, gen).to(spec.device), frequencies(n, spec.device)
        for name, got, want in zip(
            ("cos", "sin"),
            launch(positions, freq, factor),
            reference(positions, freq, factor),
            strict=True,
        ):
            if got.shape != want.shape or not torch.allclose(got, want, rtol=0.0, atol=OFF):
                return f"{name} of {n_row} rows of {n} angles differs from the reference"
    return None
