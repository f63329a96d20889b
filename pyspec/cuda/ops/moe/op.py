"""`moe`: rows through the experts they chose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.moe import builds, cpu, cuda, host, ref, triton
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe.loaded import LoadedExperts
from pyspec.gguf import GGMLType


def shapes(device: torch.device) -> list[ref.MoeSpec]:
    """Experts of Qwen3.5 122B and 35B, and of Nemotron 3 Nano; the last two with a shared one in pieces, where launches take it."""
    q4, q6, q8 = GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0
    one, two = (0, 0) if device.type == "cpu" else (1, 2)
    return [
        ref.MoeSpec(device, 8, 3072, 1024, "swiglu", q4, q6),
        ref.MoeSpec(device, 8, 2048, 512, "swiglu", q8, q8, pieces=one),
        ref.MoeSpec(device, 6, 2688, 1856, "relu2", q8, q8, pieces=two),
    ]


Launch = Callable[[ref.Stacks], ref.ExpertsRun]


def check(launch: Launch, reference: Launch, spec: ref.MoeSpec) -> str | None:
    """Of small experts on a CPU."""
    on = cpu if spec.device.type == "cpu" and spec.up is not None else moe_check
    return on.check(launch, reference, spec)


def scratch(spec: ref.MoeSpec, n_row: int, n_token: int) -> int:
    """Values between the loops of a CPU's kernel, or between the products of a GPU's."""
    if spec.device.type == "cuda":
        return buffer_bytes(spec.n_used, spec.n_expert, spec.n_in, spec.n_ff)
    return cpu.buffer_bytes(n_row, spec.n_used, spec.n_in, spec.n_ff)


moe: Op[ref.MoeSpec, ref.Moe] = Op(
    "moe",
    Impl("torch", ref.bind),
    [
        *implemented(cuda, triton, cpu),
        Impl("lane", host.bind, host.limits, capturable=True, programs=host.programs),
    ],
    check,
    guard=ref.GUARD,
    shapes=shapes,
    in_prompts=False,
    scratch=scratch,
    also=host.also,
    loaded=lambda spec, run: LoadedExperts(spec, run, of_cpu=moe.runs_as("cpu", spec)),
)


def buffer_bytes(n_used: int, n_expert: int, n_in: int, n_ff: int) -> int:
    """Memory of rows for the gates and ups, and for the downs, of the largest types, on GPUs: a planner counts it before a load."""
    of_inner, of_row = (-(-n // 256) * (4 * builds.HALVED_UNIT + 64) for n in (n_ff, n_in))
    return cuda.rows_at_once(n_used, n_expert) * (n_used * of_inner + of_row)
