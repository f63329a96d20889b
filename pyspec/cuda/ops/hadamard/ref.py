"""Reference of `hadamard` in plain torch: sums of values that were turned before they were rounded are turned back.

x        [row, head, dim]  f32, contiguous
returns  the same shape: every n dims of a head times a Hadamard matrix over sqrt(n), which is its own inverse (slots/kv_codes.py)

All implementations add in one order, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyspec.cuda.ops.hadamard.spec import HadamardSpec as HadamardSpec
from pyspec.slots.kv_codes import turned

Hadamard = Callable[[Tensor], Tensor]


def bind(spec: HadamardSpec) -> Hadamard:
    def hadamard(x: Tensor) -> Tensor:
        return turned(x, spec.n)

    return hadamard


def check(launch: Hadamard, reference: Hadamard, spec: HadamardSpec) -> str | None:
    """Heads of very different sizes, to the bit."""
    gen = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (5, 3)):
        x = torch.randn(*shape, spec.dim, generator=gen).to(spec.device)
        x = x * torch.logspace(-6, 6, spec.dim, device=spec.device)
        if not torch.equal(launch(x), reference(x)):
            return f"{shape[0]} rows of {shape[1]} heads have other bits than the reference's"
    return None
