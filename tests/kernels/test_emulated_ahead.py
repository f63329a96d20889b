"""The kernels of `ahead` run thread by thread on the CPU."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead.ref import AheadSpec, TorchAhead
from pyspec.slots.batch import Seq, lay_out

pytestmark = needs_compiler
SPEC = AheadSpec(CPU)


@pytest.mark.parametrize("seed", range(3))
def test_they_do_what_the_reference_does(seed: int) -> None:
    with emulated_gpu(seed=seed):
        assert ahead_cuda.check(ahead_cuda.bind(SPEC), TorchAhead(), SPEC) is None


def test_older_gpus_do_the_same() -> None:
    with emulated_gpu((8, 0)):
        assert ahead_cuda.check(ahead_cuda.bind(SPEC), TorchAhead(), SPEC) is None


def test_a_row_past_its_pages_is_reported() -> None:
    with emulated_gpu():
        own = ahead_cuda.bind(SPEC)
        batch, table, arena = ahead_cuda.verify([3, 2], CPU, torch.Generator().manual_seed(0))
        kept = own.keep(batch.tokens[None].double().expand(2, -1), batch)
        kept.n[1] = 8 * 40
        seqs = [Seq(q.slot, q.n_past, [0, 0], n_out=2) for q in batch.seqs]
        own.fault.zero_()
        own.move(lay_out(table, seqs, CPU, arena=arena), kept)
        page = (batch.seqs[1].n_past + 8 * 40) // 8
        assert own.fault.tolist() == [1, 10, 1, page, 40]
        own.fault.zero_()
