"""`mamba2`: fold the last verify into the state, then run this forward's rows (Mamba-2)."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.mamba2 import cpu, cuda, ref, triton
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape


def shapes(device: torch.device) -> list[ref.Mamba2Spec]:
    """Nemotron 3 Super."""
    shape = Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4)
    return [ref.Mamba2Spec(device, shape)]


mamba2: Op[ref.Mamba2Spec, ref.Mamba2] = declared(
    ref, cuda, triton, cpu, shapes=shapes, in_prompts=False
)
