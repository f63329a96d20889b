"""`linear`: few rows times a packed quantised matrix; `linear_tall`: more than about thirty; `linear_many`: a prompt's; `linear_cpu`: any
number, on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyspec.cuda.jit import HOPPER, arch_of
from pyspec.cuda.op import Impl, Op, implemented, limits_of
from pyspec.cuda.ops.linear import cpu, cuda, ref, triton, unpacked, wgmma, wgmma_many
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.ref import USUAL_TYPES, Epilogue
from pyspec.gguf import GGMLType


def shapes(device: torch.device) -> list[ref.LinearSpec]:
    """A part of a matrix of 27B, in its usual types."""
    return [ref.LinearSpec(device, type, 272, 5120) for type in USUAL_TYPES]


def every_type(device: torch.device) -> list[ref.LinearSpec]:
    """Each packed type with each epilogue."""
    return [
        ref.LinearSpec(device, type, 272, 5120, epilogue) for type in FORMATS for epilogue in Epilogue
    ]


def partial_bytes(arch: str, n_sm: int) -> int:
    """Of shares of cut tiles: on Hopper `linear_tall` has its own."""
    return 4 * cuda.n_partial(n_sm) * (1 + (arch == arch_of(HOPPER)))


linear: Op[ref.LinearSpec, ref.Linear] = Op(
    "linear",
    Impl("torch", ref.bind),
    implemented(cuda, triton),
    cuda.check,
    shapes=shapes,
    more_shapes=every_type,
)

linear_tall: Op[ref.LinearSpec, ref.Linear] = Op(
    "linear_tall",
    Impl("torch", ref.bind),
    implemented(wgmma),
    partial(cuda.check, n_rows=(40, 49, 96, 127, 200)),
    home="pyspec.cuda.ops.linear.op:linear_tall",
    named="linear",
    more_shapes=every_type,
)

linear_many: Op[ref.LinearSpec, Any] = Op(
    "linear_many",
    Impl("torch", ref.bind),
    [
        Impl("wgmma", wgmma_many.bind, limits_of(wgmma_many), programs=wgmma_many.programs),
        Impl("cuda", unpacked.bind, limits_of(unpacked), programs=unpacked.programs),
    ],
    partial(cuda.check, n_rows=(129, 300)),
    home="pyspec.cuda.ops.linear.op:linear_many",
    named="linear",
    shapes=shapes,
    more_shapes=every_type,
)


def cpu_types(device: torch.device) -> list[cpu.CpuLinearSpec]:
    """The usual types of files that CPUs run."""
    names = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4") if device.type == "cpu" else ()
    types = [GGMLType[name] for name in names]
    eight = [cpu.CpuLinearSpec(device, type, 8) for type in types if cpu.has_eight(type)]
    return [cpu.CpuLinearSpec(device, type) for type in types] + eight


linear_cpu: Op[cpu.CpuLinearSpec, cpu.Product] = Op(
    "linear_cpu",
    Impl("torch", cpu.reference),
    implemented(cpu),
    cpu.check,
    home="pyspec.cuda.ops.linear.op:linear_cpu",
    named="linear",
    shapes=cpu_types,
)

OPS = (linear, linear_tall, linear_many, linear_cpu)
