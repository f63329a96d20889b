"""`embed`: rows of the embedding by token, and cos and sin of their rope beside them."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.embed import cpu as embed_cpu
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed import ref as embed_ref
from pyspec.cuda.ops.linear.ref import USUAL_TYPES


def shapes(device: torch.device) -> list[embed_ref.EmbedSpec]:
    """27B in its usual types."""
    return [embed_ref.EmbedSpec(device, type, 5120) for type in USUAL_TYPES]


embed: Op[embed_ref.EmbedSpec, embed_ref.Embed] = Op(
    "embed",
    Impl("torch", embed_ref.bind, capturable=True),
    [
        Impl("cuda", embed_cuda.bind, embed_cuda.limits, capturable=True, programs=embed_cuda.programs),
        Impl("cpu", embed_cpu.bind, embed_cpu.limits, capturable=True),
    ],
    embed_cuda.check,
    guard=embed_ref.GUARD,
    shapes=shapes,
)
