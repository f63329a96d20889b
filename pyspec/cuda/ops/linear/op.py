"""`linear`: few rows times a packed quantised matrix; `linear_tall`: more than about thirty; `linear_many`: a prompt's; `linear_cpu`: any
number, on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.linear import cpu as linear_on_cpu
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import triton as linear_triton
from pyspec.cuda.ops.linear import unpacked as linear_unpacked
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear import wgmma_many as linear_wgmma_many
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.ref import USUAL_TYPES, Epilogue
from pyspec.gguf import GGMLType


def shapes(device: torch.device) -> list[linear_ref.LinearSpec]:
    """A part of a matrix of 27B, in its usual types."""
    return [linear_ref.LinearSpec(device, type, 272, 5120) for type in USUAL_TYPES]


def every_type(device: torch.device) -> list[linear_ref.LinearSpec]:
    """Each packed type with each epilogue."""
    return [
        linear_ref.LinearSpec(device, type, 272, 5120, epilogue)
        for type in FORMATS
        for epilogue in Epilogue
    ]


linear: Op[linear_ref.LinearSpec, linear_ref.Linear] = Op(
    "linear",
    Impl("torch", linear_ref.bind),
    [
        Impl("cuda", linear_cuda.bind, linear_cuda.limits, programs=linear_cuda.programs),
        Impl(
            "triton", linear_triton.bind, linear_triton.limits, capturable=True, tune=linear_triton.tune
        ),
    ],
    linear_cuda.check,
    shapes=shapes,
    more_shapes=every_type,
)

linear_tall: Op[linear_ref.LinearSpec, linear_ref.Linear] = Op(
    "linear_tall",
    Impl("torch", linear_ref.bind),
    [Impl("wgmma", linear_wgmma.bind, linear_wgmma.limits, programs=linear_wgmma.programs)],
    partial(linear_cuda.check, n_rows=(40, 49, 96, 127, 200)),
    home="pyspec.cuda.ops.linear.op:linear_tall",
    named="linear",
    more_shapes=every_type,
)

linear_many: Op[linear_ref.LinearSpec, Any] = Op(
    "linear_many",
    Impl("torch", linear_ref.bind),
    [
        Impl(
            "wgmma",
            linear_wgmma_many.bind,
            linear_wgmma_many.limits,
            programs=linear_wgmma_many.programs,
        ),
        Impl("cuda", linear_unpacked.bind, linear_unpacked.limits, programs=linear_unpacked.programs),
    ],
    partial(linear_cuda.check, n_rows=(129, 300)),
    home="pyspec.cuda.ops.linear.op:linear_many",
    named="linear",
    shapes=shapes,
    more_shapes=every_type,
)


def cpu_types(device: torch.device) -> list[linear_on_cpu.CpuLinearSpec]:
    """The usual types of files that CPUs run."""
    names = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "MXFP4") if device.type == "cpu" else ()
    types = [GGMLType[name] for name in names]
    eight = [
        linear_on_cpu.CpuLinearSpec(device, type, 8) for type in types if linear_on_cpu.has_eight(type)
    ]
    return [linear_on_cpu.CpuLinearSpec(device, type) for type in types] + eight


linear_cpu: Op[linear_on_cpu.CpuLinearSpec, linear_on_cpu.Product] = Op(
    "linear_cpu",
    Impl("torch", linear_on_cpu.reference),
    [Impl("cpu", linear_on_cpu.bind, linear_on_cpu.limits, capturable=True)],
    linear_on_cpu.check,
    home="pyspec.cuda.ops.linear.op:linear_cpu",
    named="linear",
    shapes=cpu_types,
)

OPS = (linear, linear_tall, linear_many, linear_cpu)
