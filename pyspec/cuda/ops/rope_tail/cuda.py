"""`rope_tail` on NVIDIA GPUs: one launch (rope_tail.cu), a warp for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda.jit import KernelFile
from pyspec.cuda.ops.rope_tail.ref import RopeTail, RopeTailSpec

WARPS, MAX_DIM = 8, 1024
OFF = 1e-5  # of a head's size


def limits(spec: RopeTailSpec) -> str | None:
    if spec.dim % 4 or not 0 < spec.dim <= MAX_DIM:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 4 up to {MAX_DIM}"
    if spec.n_rot % 2 or not 0 < spec.n_rot <= spec.dim:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


FILE = KernelFile[RopeTailSpec](
    "rope_tail",
    "ppppp" + "l" + "i" + "ff",
    lambda spec: {"DIM": spec.dim, "N_ROT": spec.n_rot, "NORMED": int(spec.normed)},
)


def bind(spec: RopeTailSpec) -> RopeTail:
    kernel = FILE.kernel(spec.device, spec)

    def run(
        x: Tensor, positions: Tensor, freq: Tensor, weight: Tensor | None = None, sign: float = 1.0
    ) -> Tensor:
        n_row, n_head, dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != dim or x.stride(0) % 4 or x.data_ptr() % 16:
            x = x.contiguous()
        assert x.dtype == torch.float32 and dim == spec.dim and positions.dtype == torch.int64
        assert len(positions) == n_row and positions.is_contiguous() and freq.is_contiguous()
        assert freq.dtype == torch.float64 and freq.shape == (spec.n_rot // 2,)
        assert weight is None or (
            spec.normed and weight.shape == (dim,) and weight.dtype == torch.float32
        )
        out = torch.empty(n_row, n_head, dim, dtype=torch.float32, device=x.device)
        if out.numel():
            args = x, weight, positions, freq, out, x.stride(0), n_head, spec.eps, sign
            kernel.launch((n_row, -(-n_head // WARPS)), 32 * WARPS, args, overlap=True)
        return out

    return run


def check(launch: RopeTail, reference: RopeTail, spec: RopeTailSpec) -> str | None:
    """Heads of sizes down to where eps counts, rows that lie apart, late positions, there and back."""
    gen = torch.Generator().manual_seed(0)
    freq = 160000.0 ** (-torch.arange(0, spec.n_rot, 2, dtype=torch.float64) / spec.n_rot)
    weight = 1 + 0.3 * torch.randn(spec.dim, generator=gen)
    for n_row, n_head in ((1, 1), (3, 64), (70, 9)):
        wide = (
            torch.randn(n_row, n_head * spec.dim + 4, generator=gen)
            * torch.logspace(2, -4, n_row)[:, None]
        )
        x = wide.to(spec.device)[:, : n_head * spec.dim].view(n_row, n_head, spec.dim)
        at = torch.randint(0, 1 << 20, (n_row,), generator=gen).to(spec.device)
        for scale in (None, weight.to(spec.device)) if spec.normed else (None,):
            for sign in (1.0, -1.0):
                got, want = (f(x, at, freq.to(spec.device), scale, sign) for f in (launch, reference))
                size = want.norm(dim=-1) / spec.dim**0.5 + 1e-6
                off = float(((got - want).abs().amax(-1) / size).nan_to_num(torch.inf).amax())
                if not off < OFF:
                    return f"{n_row} rows of {n_head} heads differ from the reference by {off:.2g} of their size"
    return None
