"""`moe_route`: the experts of a row, and the weight of each."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe_route import cpu, cuda, triton


def shapes(device: torch.device) -> list[moe_ref.RouteSpec]:
    """Routers of Qwen3.5 122B, of Nemotron 3 Super and of DeepSeek-V3."""
    return [
        moe_ref.RouteSpec(device, 3072, 256, 8, gated=True),
        moe_ref.RouteSpec(device, 4096, 512, 22, "sigmoid", scale=5.0, biased=True),
        replace(
            moe_ref.RouteSpec(device, 7168, 256, 8, "sigmoid", scale=2.5, biased=True),
            n_group=8,
            n_group_used=4,
        ),
    ]


moe_route: Op[moe_ref.RouteSpec, moe_ref.Route] = Op(
    "moe_route",
    Impl("torch", moe_ref.bind_route),
    implemented(cuda, triton, cpu),
    cuda.check,
    shapes=shapes,
    in_prompts=False,
)
