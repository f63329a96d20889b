"""Several residual streams that are read and written by gates of low rank. Reference in plain torch.

    x        [row, n_stream * n]  f32  the streams, side by side
    normed   [row, n_stream * n]  f32  each stream behind RMSNorm by itself, times weights of all columns
    low      [row, n_low]         f32  a product of the normed streams; it may be a part of wider rows
    gates    [row, n_stream * n]  f32  a product of the bent low rows
    inject   [row, n_stream]      f32  another product of the normed streams; it may be a part of wider rows
    y        [row, n]             f32  what a part of the block makes of the row that it read

Tensors are those of llama.cpp's `qwen4exp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.exact import by_row


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """`n_stream` streams of `n` columns. eps: of their norms."""

    device: torch.device
    n_stream: int
    n: int
    eps: float


class GatedStreams:
    """The launch that the op binds: the reference, of which other implementations are kinds."""

    def __init__(self, spec: GatedStreamsSpec) -> None:
        self.spec = spec

    def _each(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.spec.n_stream, self.spec.n))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The normed streams; weight [n_stream * n] f32."""

        def normed(x: Tensor) -> tuple[Tensor]:
            return (
                (F.rms_norm(self._each(x), (self.spec.n,), None, self.spec.eps)).flatten(1) * weight,
            )

        return by_row(normed, x)[0]

    def bend(self, low: Tensor) -> Tensor:
        """silu(low / n_stream), [row, n_low]"""
        return by_row(lambda low: (F.silu(low / self.spec.n_stream),), low.contiguous())[0]

    def read(self, normed: Tensor, gates: Tensor) -> Tensor:
        """The mean over the streams of normed * sigmoid(gates), [row, n]."""
        return by_row(lambda x, g: (self._each(x * g.sigmoid()).mean(1),), normed, gates)[0]

    def merge(self, x: Tensor, y: Tensor, inject: Tensor) -> Tensor:
        """Each stream of x plus 2 sigmoid(inject / n_stream) of y, [row, n_stream * n]."""

        def merged(x: Tensor, y: Tensor, inject: Tensor) -> tuple[Tensor]:
            by = 2 * (inject / self.spec.n_stream).sigmoid()
            return ((self._each(x) + by[..., None] * y[:, None]).flatten(1),)

        return by_row(merged, x, y, inject)[0]


bind = GatedStreams


def check(launch: GatedStreams, reference: GatedStreams, spec: GatedStreamsSpec) -> str | None:
    """Each of the four, from one row on, of sizes down to where eps counts, low rows and injections side by side; a row alone."""
    gen, n, wide, n_low = torch.Generator().manual_seed(0), spec.n_stream, spec.n_stream * spec.n, 13
    weight = (1 + 0.3 * torch.randn(wide, generator=gen)).to(spec.device)
    for n_row in (1, 9):
        sizes = torch.logspace(2, -4, n_row)[:, None]
        x, gates, y = (
            torch.randn(n_row, w, generator=gen).to(spec.device) for w in (wide, wide, spec.n)
        )
        low, inject = (
            (4 * torch.randn(n_row, n_low + n, generator=gen)).to(spec.device).split([n_low, n], 1)
        )
        x = x * sizes.to(spec.device)
        calls = {"norm": (x, weight), "bend": (low,), "read": (x, gates), "merge": (x, y, inject)}
        for name, given in calls.items():
            got, want = (getattr(each, name)(*given) for each in (launch, reference))
            off = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-20)
            if not float(off.nan_to_num(torch.inf).amax()) < 1e-5:
                return f"{name} of {n_row} rows differs from the reference by {float(off.amax()):.2g} of a row"
            one = [t if t is weight else t[n_row // 2 : n_row // 2 + 1] for t in given]
            if not torch.equal(getattr(launch, name)(*one)[0], got[n_row // 2]):
                return f"{name} gives a row other bits alone than among {n_row}"
    return None
