"""`embed`: rows of the embedding by token, and cos and sin of their rope beside them."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.embed import cpu, cuda, ref
from pyspec.cuda.ops.linear.ref import USUAL_TYPES

embed: Op[ref.EmbedSpec, ref.Embed] = Op(
    "embed",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, cpu),
    cuda.check,
    guard=ref.GUARD,
    # 27B in its usual types
    shapes=lambda device: [ref.EmbedSpec(device, type, 5120) for type in USUAL_TYPES],
)
