"""`index_rows` on CPUs (cpu/native/index_rows.cpp): keys in their own type, some hundred of a row in a task."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.index_rows.ref import GUARD, IndexRows, IndexSpec
from pyspec.cuda.ops.tokens import POOL, TOKENS, pool_args, tokens_args, width_limit
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

_RUN = CpuKernel("pyspec_index_rows", "4q" + TOKENS + POOL + "5q")


def limits(spec: IndexSpec) -> str | None:
    return width_limit(spec.dim)


def bind(spec: IndexSpec) -> IndexRows:
    def index_rows(q: Tensor, w: Tensor | None, freq: Tensor, pool: KVPool, batch: Batch) -> Tensor:
        assert q.shape[1:] == (spec.n_head, spec.dim) and q[0].is_contiguous()
        assert w is None or w.stride(1) == 1
        assert freq.dtype == torch.float64 and len(freq) == spec.n_rot // 2
        out = empty(len(q), spec.top_k, dtype=torch.int32)
        given = *tokens_args(batch, GUARD), *pool_args(pool, batch.page_size)
        steps = q.stride(0), 0 if w is None else w.stride(0)
        _RUN(q, w, freq, out, *given, *steps, spec.n_head, spec.top_k, spec.n_rot)
        return out

    return index_rows
