"""Workspace of `attend` for a planner, which needs it before a load and reserves it at the end; and the checks that wait until after
the load."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyspec.cuda.kernel_context import current
from pyspec.cuda.op import Op
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import prompt_blocks
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.prompt import Run, attend_blocks, attend_prompt, by_cudnn
from pyspec.cuda.ops.attend.ref import AttendSpec


def workspace_bytes(spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """Bytes of partial sums, which all layers of a device share: see attend_cuda. 0 if no kernel needs any."""
    if _runs_as(spec) == "triton":
        return attend_triton.workspace_bytes(spec, n_seq, n_key, n_row)
    return attend_cuda.workspace_bytes(spec, n_seq, n_key, n_row)


def _runs_as(spec: AttendSpec) -> str:
    """The implementation decided for such heads, or else the first within its limits."""
    for known, impl in attend.decided.items():
        if replace(known, scale=spec.scale, has_sinks=spec.has_sinks, cap=spec.cap) == spec:
            return impl.name
    if not torch.cuda.is_available():
        return ""
    return next((impl.name for impl in attend.impls if attend.out_of_question(impl, spec) is None), "")


def bytes_on(arch: str, n_sm: int, spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """The same on a GPU that is not here, of `n_sm` multiprocessors."""
    return attend_cuda.bytes_on(arch, n_sm, spec, n_seq, n_key, n_row)


def reserve(device: torch.device, n_bytes: int) -> None:
    """Reserve the bytes now, so that contexts grow later without a driver call in the middle of a round."""
    if n_bytes:
        attend_cuda.workspace(device).take(n_bytes // 4)


def late(device: torch.device) -> list[tuple[Op[AttendSpec, Run], AttendSpec]]:
    """Ops of the bound layers whose check is deferred until after the load. The caller checks and then decides them."""
    if device.type != "cuda" or current().is_exact:
        return []
    bound = [spec for spec, impl in attend_prompt.decided.items() if impl is not attend_prompt.reference]
    return [(attend_blocks, spec) for spec in bound if spec.device == device]


def warm(device: torch.device, n_key: int) -> None:
    """Warm the deferred ops whose verdict is known. n_key: of a slot, at most."""
    for op, spec in late(device):
        if spec in op.decided and op.runs_as("cudnn", spec):
            prompt_blocks.warm(by_cudnn(spec), spec, n_key)
