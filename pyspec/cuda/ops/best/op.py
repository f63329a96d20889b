"""`best`: the token of each row's largest logit, for verdicts and drafts."""

from __future__ import annotations

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.best import cpu, cuda, ref, triton

best: Op[ref.BestSpec, ref.Best] = Op(
    "best",
    Impl("torch", ref.bind, capturable=True),
    implemented(cuda, triton, cpu),
    cuda.check,
    shapes=lambda device: [ref.BestSpec(device)],
)
