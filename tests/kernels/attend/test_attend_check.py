"""The check an implementation of `attend` must pass before it is chosen."""

import torch
from torch import Tensor

from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.op import check
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool

SPEC = AttendSpec(torch.device("cpu"), 6, 1, 64, 0.125)
REFERENCE = attend_ref.bind(SPEC)


def test_the_reference_passes_its_own_check() -> None:
    assert check(REFERENCE, REFERENCE, SPEC) is None


def test_a_launch_that_forgets_the_window_is_refused() -> None:
    def forgets(q: Tensor, pool: KVPool, batch: Batch, window: int, sinks: object) -> Tensor:
        return REFERENCE(q, pool, batch, 0)

    assert "differs" in (check(forgets, REFERENCE, SPEC) or "")


def test_a_launch_that_reads_what_nobody_wrote_is_refused() -> None:
    def leaks(q: Tensor, pool: KVPool, batch: Batch, window: int, sinks: object) -> Tensor:
        return REFERENCE(q, pool, batch, window) + 0 * pool.v.sum()

    assert "differs from the reference by inf" in (check(leaks, REFERENCE, SPEC) or "")
