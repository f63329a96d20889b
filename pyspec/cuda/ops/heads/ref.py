"""Products of heads with matrices of their own (deepseek2: what stands between queries and latent keys, and behind their sums). In plain torch.

x        [row, head, n_in]   f32  a view or not; values of a head lie together
data     [head, n_out, n_in] as in the file: uint8, the bytes of `type`, in order
returns  [row, head, n_out]  f32  head h of a row times matrix h, contiguous
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.exact import in_passes
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.linear.cpu import sample
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGMLType

OFF = 3e-5  # of the norms of both factors, multiplied: rows of 16-bit whole numbers on CPUs are the farthest


@dataclass(frozen=True, slots=True)
class HeadsSpec:
    """Matrices [n_out, n_in] of `n_head` heads, of the file's type."""

    device: torch.device
    type: GGMLType
    n_head: int
    n_out: int
    n_in: int

    @property
    def row_bytes(self) -> int:
        """Of an output's weights."""
        return self.n_in // self.type.block_size * self.type.type_size

    @property
    def shape_limit(self) -> str | None:
        if self.n_in % self.type.block_size:
            return f"{self.n_in} columns are no whole blocks of {self.type.name}"
        return None


HeadsRun = Callable[[Tensor], Tensor]
Heads = Callable[[Tensor], HeadsRun]
"""heads(data) -> run(x): weights are loaded once"""


def bind(spec: HeadsSpec) -> Heads:
    """Matrices are unpacked at each use."""

    def load(data: Tensor) -> HeadsRun:
        def heads(x: Tensor) -> Tensor:
            shape = spec.n_head, spec.n_out, spec.n_in
            weight = dequantize(data.view(torch.uint8).reshape(-1), spec.type, shape).float()

            def run(part: Tensor) -> Tensor:
                part = part.unflatten(1, (spec.n_head, spec.n_in))
                return torch.einsum("nhi,hoi->nho", part, weight).flatten(1)

            flat = x.flatten(1)
            y = in_passes(flat, run) if current().is_exact else run(flat)
            return y.view(len(x), spec.n_head, spec.n_out)

        return heads

    return load


def check(launch: Heads, reference: Heads, spec: HeadsSpec) -> str | None:
    """Rows among others and alone, few and many, strided; heads of very different sizes."""
    gen = torch.Generator().manual_seed(0)
    data = sample(spec.type, spec.n_head * spec.n_out, spec.n_in, gen).to(spec.device)
    own, other = launch(data), reference(data)
    weight = dequantize(data.reshape(-1), spec.type, (spec.n_head, spec.n_out, spec.n_in)).float()
    for n_row in (1, 3, 8, 17, 70):
        x = torch.randn(n_row, spec.n_head, spec.n_in + 4, generator=gen)
        x = (x * torch.logspace(-3, 3, spec.n_head)[:, None]).to(spec.device)[..., : spec.n_in]
        got, want = own(x), other(x)
        if got.shape != want.shape:
            return f"{n_row} rows come out as {list(got.shape)}"
        size = x.norm(dim=-1)[..., None] * weight.norm(dim=-1)
        off = float(((got - want).abs() / size).max())
        if not off < OFF:
            return f"a head of {n_row} rows differs by {off:.1e} of its factors from the reference"
        if not torch.equal(own(x[-1:]), got[-1:]):
            return f"the last of {n_row} rows has other bits alone"
    return None
