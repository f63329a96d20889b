"""`heads` in Triton: one launch over matrices of 16 or 32 bits (triton_kernels.py), to the last bits of f32.

A program always has sixteen rows, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.ops.heads.ref import Heads, HeadsRun, HeadsSpec
from pyspec.gguf import GGMLType

DTYPES = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
ROWS, OUTPUTS, STEP = 16, 64, 64  # rows and outputs of a program, columns of a turn


def limits(spec: HeadsSpec) -> str | None:
    if spec.type not in DTYPES:
        return f"the matrices are {spec.type.name}; the kernel takes {', '.join(t.name for t in DTYPES)}"
    return None


def bind(spec: HeadsSpec) -> Heads:
    constants = {"N_IN": spec.n_in, "N_OUT": spec.n_out, "BM": ROWS, "BN": OUTPUTS, "BK": STEP}

    def load(data: Tensor) -> HeadsRun:
        weight = data.view(torch.uint8).reshape(-1).view(DTYPES[spec.type])
        assert weight.numel() == spec.n_head * spec.n_out * spec.n_in

        def heads(x: Tensor) -> Tensor:
            from pyspec.cuda.ops.heads import triton_kernels as kernels

            assert x.dtype == torch.float32 and x.shape[1:] == (spec.n_head, spec.n_in)
            x = x if x.stride(2) == 1 else x.contiguous()
            n = len(x)
            out = torch.empty(n, spec.n_head, spec.n_out, dtype=torch.float32, device=x.device)
            if n:
                grid = (-(-spec.n_out // OUTPUTS), spec.n_head, -(-n // ROWS))
                args = (x, weight, out, x.stride(0), x.stride(1), n, spec.n_head)
                tri.launch(kernels.heads, grid, args, constants, 4)
            return out

        return heads

    return load
