"""What `attend` needs of a device's memory beside its tensors, for a planner: to be known before a load, and taken at its end; and what
it has to have seen before the first prompt."""

from __future__ import annotations

import torch

from pyspec.cuda import jit
from pyspec.cuda.exact import EXACT
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import prompt_blocks
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.prompt import attend_prompt
from pyspec.cuda.ops.attend.ref import AttendSpec


def workspace_bytes(spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """Of partial sums, which all layers of a device share: see attend_cuda. 0 where no kernel needs any."""
    if not jit.is_installed() and attend_triton.limits(spec) is None:
        return attend_triton.workspace_bytes(spec, n_seq, n_key, n_row)
    return attend_cuda.workspace_bytes(spec, n_seq, n_key, n_row)


def bytes_on(arch: str, n_sm: int, spec: AttendSpec, n_seq: int, n_key: int, n_row: int) -> int:
    """The same on a GPU that is not here, of `n_sm` multiprocessors."""
    return attend_cuda.bytes_on(arch, n_sm, spec, n_seq, n_key, n_row)


def reserve(device: torch.device, n_bytes: int) -> None:
    """Take so many now, so that contexts may grow later without a request to the driver in the midst of a round."""
    if n_bytes:
        attend_cuda.workspace(device).take(n_bytes // 4)


def warm(spec: AttendSpec, n_key: int) -> None:
    """n_key: of a slot, at most."""
    if spec.device.type == "cuda" and not EXACT.is_on and attend_prompt.runs_as("cudnn", spec):
        prompt_blocks.warm(attend_prompt.bind(spec), spec, n_key)
