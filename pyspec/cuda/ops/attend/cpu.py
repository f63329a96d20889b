"""`attend` on CPUs: one call (cpu/native/attend.cpp). It reads pages in the pool's type, and a KV head's keys once for all of its query heads.

Keys are summed in segments at absolute positions, so a row has the same bits beside any rows and on any number of threads. Rows without a
sequence or without keys are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty, missing
from pyspec.cuda.ops.attend.ref import Attend, AttendSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

run = CpuKernel("pyspec_attend", "5q" + "4q" + "q" + "2q" + "12q" + "2d")


def limits(spec: AttendSpec) -> str | None:
    if spec.device.type != "cpu":
        return "runs on CPUs only"
    if spec.n_head % spec.n_kv_head:
        return f"{spec.n_head} heads are no multiple of {spec.n_kv_head} KV heads"
    return missing()


def _check(q: Tensor, pool: KVPool, batch: Batch, sinks: Tensor | None, spec: AttendSpec) -> None:
    """Assert dtypes, shapes and layouts, which only our own code can get wrong."""
    assert q.dtype == torch.float32 and q.is_contiguous() and q.shape[1:] == (spec.n_head, spec.head_dim)
    assert (pool.n_head, pool.head_dim, pool.kv) == (spec.n_kv_head, spec.head_dim, spec.kv)
    assert all(plane.is_contiguous() for plane in pool.planes)
    assert sinks is None or (
        sinks.dtype == torch.float32 and sinks.is_contiguous() and len(sinks) == spec.n_head
    )
    assert pool.n_row % batch.page_size == 0 and batch.row_seq.dtype == torch.int32
    for t in (batch.page_table, batch.positions, batch.lo, batch.hi):
        assert t.dtype == torch.int64 and t.is_contiguous()
    assert all(len(t) == q.shape[0] for t in (batch.positions, batch.lo, batch.hi, batch.row_seq))


def bind(spec: AttendSpec) -> Attend:
    kinds, heads = (spec.kv.k.kind, spec.kv.v.kind), (spec.n_head, spec.n_kv_head, spec.head_dim)

    def attend(
        q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        _check(q, pool, batch, sinks, spec)
        out = empty(len(q), spec.n_head, spec.value_dim)  # of keys that are values all dims are summed
        planes = (pool.k, pool.v, pool.k_scale, pool.v_scale)
        rows = (batch.page_table, batch.positions, batch.lo, batch.hi, batch.row_seq)
        size = batch.page_size
        sizes = (q.shape[0], *batch.page_table.shape, size, pool.n_row // size)
        numbers = (*sizes, *heads, window, *kinds, spec.value_dim, spec.scale, spec.cap)
        run(q, *planes, *rows, sinks, out, *numbers)
        return out

    return attend
