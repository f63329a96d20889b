"""`convolve` on NVIDIA GPUs: one launch (convolve.cu), four columns of a row for each thread."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.convolve.ref import Convolve, ConvolveSpec, Given, check_args

THREADS = 128
MAX_TAPS = 16  # weights of a thread's columns stand in its registers
MAX_ROWS = 65_535
OFF = 1e-5  # of a row, relative to its size


def limits(spec: ConvolveSpec) -> str | None:
    if spec.group % 4 or spec.n % spec.group:
        return f"groups of {spec.group} of {spec.n} columns; the kernel takes multiples of 4"
    return None if spec.n_tap <= MAX_TAPS else f"{spec.n_tap} taps; the kernel has up to {MAX_TAPS}"


FILE = KernelFile[ConvolveSpec](
    "convolve",
    "pppppp",
    lambda spec: {"COLUMNS": spec.n, "TAPS": spec.n_tap, "GROUP": spec.group, "THREADS": THREADS},
)


def bind(spec: ConvolveSpec) -> Convolve:
    kernel, n_part = FILE.kernel(spec.device, spec), -(-spec.n // (4 * THREADS))

    def convolve(*args: *Given) -> Tensor:
        check_args(spec, *args)
        x, given, base, row_seq, side, residual = args
        n_row = len(x)
        assert n_row <= MAX_ROWS
        out = torch.empty_like(x)
        if n_row:
            own = given[:, side * spec.n_tap * spec.n_group :]
            read = x, own, base[side], row_seq, residual, out
            kernel.launch((n_part, n_row), THREADS, read, overlap=True)
        return out

    return convolve


def check(launch: Convolve, reference: Convolve, spec: ConvolveSpec) -> str | None:
    """Blocks of several lengths beside each other, on both sides, with a residual and without; other blocks' rows are never read."""
    gen = torch.Generator().manual_seed(0)
    base = torch.randn(2, spec.n_tap, spec.n, generator=gen).to(spec.device)
    for lengths in ((1,), (8,), (3, 1, 8, spec.n_tap + 1)):
        n_row = sum(lengths)
        x, residual = (torch.randn(n_row, spec.n, generator=gen).to(spec.device) for _ in range(2))
        given = torch.randn(n_row, 2 * spec.n_tap * spec.n_group, generator=gen).to(spec.device)
        row_seq = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        row_seq = row_seq.to(spec.device)
        for side, more in ((0, None), (1, residual)):
            got, want = (f(x, given, base, row_seq, side, more) for f in (launch, reference))
            off = float(((got - want).double().norm(dim=-1) / want.double().norm(dim=-1)).amax())
            if not off < OFF:
                return f"{n_row} rows of side {side} differ from the reference by {off:.2g}"
        first = lengths[0]
        alone = launch(x[:first], given[:first], base, row_seq[:first], 0, None)
        x[first:], given[first:] = torch.nan, torch.nan
        if not torch.equal(launch(x, given, base, row_seq, 0, None)[:first], alone):
            return f"{first} rows have other bits alone than with others"
    return None
