"""`ahead` on CPUs: chained passes of a drafter are recorded, so their step is a kernel (cpu/native/ahead.cpp). Rounds of a CPU are not
launched ahead, so the rest is the reference."""

from __future__ import annotations

from pyspec.cpu.kernels import CpuKernel, here
from pyspec.cuda.ops.ahead.ref import AheadSpec, TorchAhead, described
from pyspec.slots.batch import Batch

_STEP = CpuKernel("pyspec_ahead_step", "9q")


class CpuAhead(TorchAhead):
    """Implements `Ahead`. A recorded step leaves the host's description as it is, because a replay could not change it."""

    def step(self, batch: Batch) -> Batch:
        pages = batch.page_table
        assert pages.stride(1) == 1 or pages.shape[1] == 1
        _STEP(
            batch.positions,
            batch.rope_at,
            batch.kv_rows,
            batch.hi,
            pages,
            batch.row_seq,
            len(batch.positions),
            pages.stride(0) if len(pages) > 1 else pages.shape[1],
            batch.page_size,
        )
        return described(batch) if here.tape is None else batch


def bind(spec: AheadSpec) -> CpuAhead:
    return CpuAhead()
