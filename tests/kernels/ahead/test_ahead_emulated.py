"""The kernels of `ahead` run thread by thread on the CPU."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from sampling import few

from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead.ref import AheadSpec, TorchAhead
from pyspec.slots.batch import Seq, lay_out

pytestmark = needs_compiler
SPEC = AheadSpec(CPU)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(3), 0))
def test_accept_and_move_do_what_the_reference_does(seed: int) -> None:
    with emulated_gpu(seed=seed):
        assert ahead_cuda.check(ahead_cuda.bind(SPEC), TorchAhead(), SPEC) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [SPEC, AheadSpec(CPU, n_seq=64, n_row=64 * 17), AheadSpec(CPU, n_seq=2, n_row=3)]
)
def test_a_verify_may_have_more_rows_than_any_graph_and_a_sequence_for_each_of_64_slots(
    spec: AheadSpec,
) -> None:
    with emulated_gpu():
        own = ahead_cuda.bind(spec)
        places = own.n, own.tokens
        batch, _, _ = ahead_cuda.verify([17] * 64, CPU, torch.Generator().manual_seed(0))
        best = batch.tokens.roll(-1)[None].double().expand(2, -1).contiguous()
        best[0, 5 * 17 + 3] = 7  # all drafts are right but one
        kept = own.accept(best, batch)
    assert kept.n.tolist() == [4 if s == 5 else 17 for s in range(64)] and len(kept.tokens) == 64 * 17
    if spec.n_row >= 64 * 17:
        assert (own.n, own.tokens) == places, "what was planned was taken at the start"


def test_older_gpus_do_the_same() -> None:
    with emulated_gpu((8, 0)):
        assert ahead_cuda.check(ahead_cuda.bind(SPEC), TorchAhead(), SPEC) is None


def test_a_row_past_its_pages_is_reported() -> None:
    with emulated_gpu():
        own = ahead_cuda.bind(SPEC)
        batch, table, arena = ahead_cuda.verify([3, 2], CPU, torch.Generator().manual_seed(0))
        kept = own.accept(batch.tokens[None].double().expand(2, -1), batch)
        kept.n[1] = 8 * 40
        seqs = [Seq(q.slot, q.n_past, [0, 0], n_out=2) for q in batch.seqs]
        own.fault.zero_()
        own.move(lay_out(table, seqs, CPU, arena=arena), kept)
        page = (batch.seqs[1].n_past + 8 * 40) // 8
        assert own.fault.tolist() == [1, 10, 1, page, 40]
        own.fault.zero_()
