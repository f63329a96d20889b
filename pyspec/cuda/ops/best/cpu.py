"""`best` on CPUs (cpu/native/best.cpp): each logit is read once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty, missing
from pyspec.cuda.ops.best.ref import Best, BestSpec

_RUN = CpuKernel("pyspec_best", "6q")


def limits(spec: BestSpec) -> str | None:
    return missing() if spec.device.type == "cpu" else "runs on CPUs only"


class CpuBest:
    """Implements `Best`."""

    def tokens(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        out = empty(logits.shape[0], dtype=torch.int64) if out is None else out
        assert out.dtype == torch.int64 and out.is_contiguous() and out.shape == logits.shape[:1]
        self._run(logits, out, None)
        return out

    def pairs(self, logits: Tensor) -> Tensor:
        out = empty(2, logits.shape[0], dtype=torch.float64)
        self._run(logits, None, out)
        return out

    def _run(self, logits: Tensor, tokens: Tensor | None, pairs: Tensor | None) -> None:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        assert logits.dtype == torch.float32 and logits.shape[1] > 0
        _RUN(logits, tokens, pairs, *logits.shape, logits.stride(0))


def bind(spec: BestSpec) -> Best:
    return CpuBest()
