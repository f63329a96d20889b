"""`gdn`: fold the last verify into the state, then run this forward's rows (Gated DeltaNet)."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.gdn import cpu as gdn_cpu
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn import triton as gdn_triton
from pyspec.cuda.ops.gdn.shape import GdnShape


def shapes(device: torch.device) -> list[gdn_ref.GdnSpec]:
    """27B."""
    shape = GdnShape(n_k_head=16, n_v_head=48, dim=128, n_conv=4, n_channel=(2 * 16 + 48) * 128)
    return [gdn_ref.GdnSpec(device, shape, 1e-6)]


def holds_prompts(spec: gdn_ref.GdnSpec) -> bool:
    """Its own kernels take a padded prompt, whose rows a graph has room for."""
    return gdn.runs_as("cuda", spec)


gdn: Op[gdn_ref.GdnSpec, gdn_ref.Gdn] = Op(
    "gdn",
    Impl("torch", gdn_ref.bind),
    [
        Impl("cuda", gdn_cuda.bind, gdn_cuda.limits, capturable=True, programs=gdn_cuda.programs),
        Impl("triton", gdn_triton.bind, gdn_triton.limits, capturable=True),
        Impl("cpu", gdn_cpu.bind, gdn_cpu.limits, capturable=True),
    ],
    gdn_cuda.check,
    guard=gdn_ref.GUARD,
    shapes=shapes,
    holds_prompts=holds_prompts,
)
