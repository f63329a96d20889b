"""`best`: the token of each row's largest logit, for verdicts and drafts."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.best import cpu as best_cpu
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best import ref as best_ref
from pyspec.cuda.ops.best import triton as best_triton


def shapes(device: torch.device) -> list[best_ref.BestSpec]:
    return [best_ref.BestSpec(device)]


best: Op[best_ref.BestSpec, best_ref.Best] = Op(
    "best",
    Impl("torch", best_ref.bind, capturable=True),
    [
        Impl("cuda", best_cuda.bind, best_cuda.limits, capturable=True, programs=best_cuda.programs),
        Impl("triton", best_triton.bind, best_triton.limits, capturable=True),
        Impl("cpu", best_cpu.bind, best_cpu.limits, capturable=True),
    ],
    best_cuda.check,
    shapes=shapes,
)
