"""`gdn`: fold the last verify into the state, then run this forward's rows (Gated DeltaNet)."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.gdn import cpu, cuda, ref, triton
from pyspec.cuda.ops.gdn.shape import GdnShape


def shapes(device: torch.device) -> list[ref.GdnSpec]:
    """27B."""
    shape = GdnShape(n_k_head=16, n_v_head=48, dim=128, n_conv=4, n_channel=(2 * 16 + 48) * 128)
    return [ref.GdnSpec(device, shape, 1e-6)]


def holds_prompts(spec: ref.GdnSpec) -> bool:
    """Its own kernels take a padded prompt, whose rows a graph has room for."""
    return gdn.runs_as("cuda", spec)


gdn: Op[ref.GdnSpec, ref.Gdn] = declared(
    ref, cuda, triton, cpu, shapes=shapes, holds_prompts=holds_prompts
)
