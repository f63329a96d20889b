"""The kernels of `ahead`, thread by thread on the CPU, and on a card at once and as replayed by graphs."""

from __future__ import annotations

import pytest
import torch
from machines import CPU, ON_CARD, Machine, cases

from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec, TorchAhead
from pyspec.slots.batch import Seq, lay_out

SPEC = AheadSpec(CPU)


@cases(seeds=range(3), slow=True)
def test_accept_and_move_do_what_the_reference_does(machine: Machine) -> None:
    spec = AheadSpec(machine.device)
    assert machine.is_emulated or ahead_cuda.limits(spec) is None
    with machine.started():
        own = ahead_cuda.bind(spec)
        assert ahead_cuda.check(own, ahead.reference.bind(spec), spec) is None
        assert machine.is_emulated or ahead_cuda.check(TorchAhead(), own, spec) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [SPEC, AheadSpec(CPU, n_seq=64, n_row=64 * 17), AheadSpec(CPU, n_seq=2, n_row=3)]
)
def test_a_verify_may_have_more_rows_than_any_graph_and_a_sequence_for_each_of_64_slots(
    machine: Machine,
    spec: AheadSpec,
) -> None:
    with machine.started():
        own = ahead_cuda.bind(spec)
        places = own.n, own.tokens
        batch, _, _ = ahead_cuda.verify([17] * 64, CPU, torch.Generator().manual_seed(0))
        best = batch.tokens.roll(-1)[None].double().expand(2, -1).contiguous()
        best[0, 5 * 17 + 3] = 7  # all drafts are right but one
        kept = own.accept(best, batch)
    assert kept.n.tolist() == [4 if s == 5 else 17 for s in range(64)] and len(kept.tokens) == 64 * 17
    if spec.n_row >= 64 * 17:
        assert (own.n, own.tokens) == places, "what was planned was taken at the start"


def test_older_gpus_do_the_same(machine: Machine) -> None:
    with machine.started((8, 0)):
        assert ahead_cuda.check(ahead_cuda.bind(SPEC), TorchAhead(), SPEC) is None


def test_a_row_past_its_pages_is_reported(machine: Machine) -> None:
    with machine.started():
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


@ON_CARD
def test_graphs_replay_accept_and_move(machine: Machine) -> None:
    own = ahead_cuda.bind(AheadSpec(machine.device))
    _, table, arena = ahead_cuda.verify([1] * 6, machine.device, torch.Generator().manual_seed(0))
    seqs = [Seq(i, 3 * i, [0], n_out=1, slack=20) for i in range(5)]
    batch = lay_out(table, seqs, machine.device, arena=arena)
    replay, _ = machine.captured(lambda: own.step(batch))
    for n in (3, 12):
        batch = lay_out(table, seqs, machine.device, arena=arena)
        for _ in range(n):
            replay()
        got = batch.positions.clone(), batch.kv_rows.clone(), batch.hi.clone()
        there = lay_out(
            table, [Seq(i, 3 * i + n, [0], n_out=1) for i in range(5)], machine.device, arena=arena
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(got, (there.positions, there.kv_rows, there.hi), strict=True)
        )
