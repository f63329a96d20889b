"""`best` on CPUs (cpu/native/best.cpp): each logit is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.best.ref import Best, BestSpec, IntoMemory

_RUN = CpuKernel("pyspec_best", "6q")


class CpuBest(IntoMemory):
    def _empty(self, logits: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        return empty(*shape, dtype=dtype)

    def _run(self, logits: Tensor, tokens: Tensor | None, pairs: Tensor | None) -> None:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        assert logits.dtype == torch.float32 and logits.shape[1] > 0
        _RUN(logits, tokens, pairs, *logits.shape, logits.stride(0))


def bind(spec: BestSpec) -> Best:
    return CpuBest()
