"""`embed`: rows of the embedding by token, and cos and sin of their rope beside them."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.embed import cpu, cuda, ref
from pyspec.cuda.ops.linear.ref import USUAL_TYPES

embed: Op[ref.EmbedSpec, ref.Embed] = declared(
    ref,
    cuda,
    cpu,
    # 27B in its usual types
    shapes=lambda device: [ref.EmbedSpec(device, type, 5120) for type in USUAL_TYPES],
    capturable=True,
)
