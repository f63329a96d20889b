"""`best`: the token of each row's largest logit, for verdicts and drafts."""

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best import ref as best_ref
from pyspec.cuda.ops.best import triton as best_triton

best: Op[best_ref.BestSpec, best_ref.Best] = Op(
    "best",
    Impl("torch", best_ref.bind, capturable=True),
    [
        Impl("cuda", best_cuda.bind, best_cuda.limits, capturable=True),
        Impl("triton", best_triton.bind, best_triton.limits, capturable=True),
    ],
    best_cuda.check,
)
