"""`heads`: products of heads with matrices of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyspec.cuda.kernel_context import current
from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.heads import cpu, cuda, ref, triton
from pyspec.cuda.ops.heads.ref import Heads, HeadsSpec
from pyspec.gguf import GGMLType, TensorInfo

PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def shapes(device: torch.device) -> list[HeadsSpec]:
    """DeepSeek-V3's two, in the types that files have and in f16, and what each of 8 ranks has of the first."""
    keys = HeadsSpec(device, GGMLType.Q8_0, 128, 512, 128)
    values = replace(keys, n_out=128, n_in=512)
    return [
        keys,
        values,
        replace(keys, n_head=16, type=GGMLType.Q5_0),
        replace(values, type=GGMLType.Q4_K),
        replace(values, type=GGMLType.F16),
    ]


heads: Op[HeadsSpec, Heads] = declared(ref, cuda, triton, cpu, shapes=shapes)


def ways(spec: HeadsSpec) -> list[HeadsSpec]:
    """The types that matrices may be kept in on the device: the file's, or f16, if no kernel reads that."""
    is_file_s = spec.device.type == "cpu" or spec.type in PLAIN
    return [spec] if is_file_s else [spec, replace(spec, type=GGMLType.F16)]


def asked(spec: HeadsSpec) -> HeadsSpec:
    """The way that a load will most likely choose, before any check."""
    found = ways(spec)
    keeps = current().wanted("heads") != "triton" and cuda.limits(spec) is None
    return found[0] if keeps else found[-1]


def kept_bytes(info: TensorInfo) -> int:
    """Bytes of the matrices [head, n_out, n_in] on a GPU."""
    keeps = current().wanted("heads") != "triton" and info.type in cuda.TYPES
    return info.n_bytes if keeps or info.type in PLAIN else 2 * info.n_elements
