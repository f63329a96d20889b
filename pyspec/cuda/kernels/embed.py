"""`embed`: rows of the embedding by token, and cos and sin of their rope beside them."""

from pyspec.cuda.kernels import embed_cuda, embed_ref
from pyspec.cuda.op import Impl, Op

embed: Op[embed_ref.EmbedSpec] = Op(
    "embed",
    Impl("torch", embed_ref.bind, capturable=True),
    [Impl("cuda", embed_cuda.bind, embed_cuda.limits, capturable=True)],
    embed_cuda.check,
)
