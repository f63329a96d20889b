"""`attend` on CPUs: one call (cpu/native/attend.cpp). It reads pages in the pool's type, and a KV head's keys once for all of its query heads.

Keys are summed in segments at absolute positions, so a row has the same bits beside any rows and on any number of threads. Rows without a
sequence or without keys are zeros.
"""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.attend.ref import Attend, AttendSpec, check_given
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

run = CpuKernel("pyspec_attend", "5q" + "4q" + "q" + "2q" + "12q" + "2d")


def limits(spec: AttendSpec) -> str | None:
    if spec.n_head % spec.n_kv_head:
        return f"{spec.n_head} heads are no multiple of {spec.n_kv_head} KV heads"
    return None


def bind(spec: AttendSpec) -> Attend:
    kinds, heads = (spec.kv.k.kind, spec.kv.v.kind), (spec.n_head, spec.n_kv_head, spec.head_dim)

    def attend(
        q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        check_given(q, pool, batch, sinks, spec)
        out = empty(len(q), spec.n_head, spec.value_dim)  # of keys that are values all dims are summed
        planes = (pool.k, pool.v, pool.k_scale, pool.v_scale)
        rows = (batch.page_table, batch.positions, batch.lo, batch.hi, batch.row_seq)
        size = batch.page_size
        sizes = (q.shape[0], *batch.page_table.shape, size, pool.n_row // size)
        numbers = (*sizes, *heads, window, *kinds, spec.value_dim, spec.scale, spec.cap)
        run(q, *planes, *rows, sinks, out, *numbers)
        return out

    return attend
