"""`best`: the token of each row's largest logit, for verdicts and drafts."""

from __future__ import annotations

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.best import cpu, cuda, ref, triton

best: Op[ref.BestSpec, ref.Best] = declared(
    ref, cuda, triton, cpu, shapes=lambda device: [ref.BestSpec(device)], capturable=True
)
