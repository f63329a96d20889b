"""`embed`: rows of the embedding by token, and cos and sin of their rope beside them."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed import ref as embed_ref

embed: Op[embed_ref.EmbedSpec, embed_ref.Embed] = Op(
    "embed",
    Impl("torch", embed_ref.bind, capturable=True),
    [Impl("cuda", embed_cuda.bind, embed_cuda.limits, capturable=True)],
    embed_cuda.check,
)
