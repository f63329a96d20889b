"""Rows of activations as the products read them: normed if asked, f16 over a power of two of their own (linear_rows.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.jit import Kernel, arch_of, compile_cubin


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ready to be multiplied, padded to `pad` with zeros: see linear_rows.cu."""

    blocks: Tensor
    sums: Tensor
    powers: Tensor
    n_row: int
    pad: int


@cache
def _rows_kernel(capability: tuple[int, int], is_bf16: bool, has_norm: bool) -> Kernel:
    code = compile_cubin("linear_rows", arch_of(capability), {"IS_BF16": int(is_bf16), "HAS_NORM": int(has_norm)})
    return code.kernel("linear_rows", "pppppfiiil")


class RowsLaunch:
    """Prepares rows of n_in columns, RMS-normed if a weight is given. Owns what it returns until the next call."""

    def __init__(self, device: torch.device, n_in: int, pads: tuple[int, ...]) -> None:
        self.n_in, self.pads, self.n_block = n_in, pads, -(-n_in // 256) * 8
        self.capability = torch.cuda.get_device_capability(device)
        self.overlap = self.capability >= (9, 0)
        self.blocks = torch.empty(self.n_block * pads[-1] * 32, dtype=torch.float16, device=device)
        self.sums = torch.empty(self.n_block * pads[-1], dtype=torch.float32, device=device)
        self.powers = torch.empty(pads[-1], dtype=torch.float32, device=device)
        for has_norm in (False, True):
            for is_bf16 in (False, True):
                _rows_kernel(self.capability, is_bf16, has_norm)

    def __call__(self, x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Rows:
        """x [row, n_in] f32 or bf16, columns contiguous, rows at most the largest pad; weight [n_in] f32."""
        n_row = x.shape[0]
        assert x.shape[1] == self.n_in and x.stride(1) == 1 and x.stride(0) % 4 == 0
        pad = next(p for p in self.pads if n_row <= p)
        kernel = _rows_kernel(self.capability, x.dtype == torch.bfloat16, weight is not None)
        args = (x, self.powers if weight is None else weight, self.blocks, self.sums, self.powers, np.float32(eps))
        scalars = (np.int32(n_row), np.int32(self.n_in), np.int32(self.n_block), np.int64(x.stride(0)))
        kernel.launch((pad,), 512, (*args, *scalars), overlap=self.overlap)
        return Rows(self.blocks, self.sums, self.powers, n_row, pad)
