"""The kept rows of a verify, and layouts moved behind them: plain torch against loops, the check, and the kernels on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from machines import CPU, ON_CARD, Machine, cases, compiled
from torch import Tensor

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import MAX_ENDS, NO_TOKEN, AheadSpec, Kept, TorchAhead, n_kept
from pyspec.slots.batch import Batch, Seq, lay_out

SPEC = AheadSpec(CPU)


def test_accept_keeps_drafts_as_long_as_they_are_the_tokens_chosen() -> None:
    assert n_kept([], [7], ()) == 1
    assert n_kept([7, 8], [7, 8, 9], ()) == 3
    assert n_kept([7, 8], [7, 5, 9], ()) == 2
    assert n_kept([7, 8], [6, 8, 9], ()) == 1
    assert n_kept([7, 8], [7, 8, 9], {8}) == 2, "the row of an end token is the host's"
    assert n_kept([7, 8], [7, 8, 9], {9}) == 3, "of what no row goes on from yet nobody asks"
    assert n_kept([7, 8, 1], [0, 0, 0, 0], (), 2) == 3
    assert n_kept([7, 8, 1], [0, 0, 0, 0], {7}, 2) == 1
    assert n_kept([7], [7, 0], (), 5) == 2


@pytest.mark.parametrize("seed", range(20))
def test_accept_is_the_rule_of_each_sequence(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    widths = [1, 17, 3, 2, 6, 1, 33][: 1 + seed % 7]
    batch, _, _ = ahead_cuda.verify(widths, CPU, gen)
    best = torch.randint(0, 2, (2, batch.tokens.shape[0]), generator=gen).double()
    ends = torch.full((len(widths), MAX_ENDS), NO_TOKEN, dtype=torch.int32)
    ends[::2, seed % MAX_ENDS] = seed % 2
    forced = torch.randint(0, 9, (len(widths),), generator=gen).int()
    tokens, found = batch.tokens.tolist(), best[0].long().tolist()
    for by in (None, forced):
        kept = TorchAhead().accept(best, batch, ends, by)
        for s, first in enumerate(batch.starts[:-1]):
            end = batch.starts[s + 1]
            own = None if by is None else int(by[s])
            n = n_kept(tokens[first + 1 : end], found[first:end], ends[s].tolist(), own)
            assert (int(kept.n[s]), int(kept.last[s])) == (n, first + n - 1)
            assert int(kept.goes[s]) == (found[first + n - 1] not in ends[s].tolist())
            want = [*tokens[first + 1 : first + n], *found[first + n - 1 : end]]
            assert kept.tokens[first:end].tolist() == want


def test_a_moved_batch_is_the_one_that_is_laid_out_there() -> None:
    gen = torch.Generator().manual_seed(3)
    batch, table, arena = ahead_cuda.verify([4, 1, 7], CPU, gen)
    kept = TorchAhead().accept(batch.tokens[None].double().roll(-1, 1), batch)
    assert kept.n.tolist() == [4, 1, 7], "all drafts are right"
    drafts = torch.arange(15).view(3, 5)
    there = [
        Seq(
            q.slot,
            q.n_past + int(n),
            [int(kept.tokens[last]), *row.tolist()[:2]],
            n_out=3,
            n_fold=int(n),
        )
        for q, n, last, row in zip(batch.seqs, kept.n, kept.last, drafts, strict=True)
    ]
    for own in (None, arena):
        before = [Seq(q.slot, q.n_past, [0] * 3, n_out=3, n_fold=1, slack=q.width) for q in batch.seqs]
        moved = TorchAhead().move(lay_out(table, before, CPU, arena=own), kept, drafts)
        got = [
            (f, getattr(moved, f).clone())
            for f in ("tokens", "positions", "kv_rows", "hi", "lo", "seq_fold", "out_rows")
        ]
        want = lay_out(table, there, CPU, arena=own)
        assert all(torch.equal(value, getattr(want, name)) for name, value in got)
        assert list(moved.seqs) == list(want.seqs) and moved.max_hi == want.max_hi


def test_padding_stays_and_what_is_no_padding_in_a_replay_moves() -> None:
    """A graph of six rows, captured with five: `step` looks at the layout alone."""
    _, table, arena = ahead_cuda.verify([1] * 6, CPU, torch.Generator().manual_seed(0))
    for n in (5, 6):
        batch = lay_out(
            table, [Seq(i, 3 * i, [0], n_out=1, slack=9) for i in range(n)], CPU, arena=arena
        )
        told = replace(batch, seqs=batch.seqs[:5], starts=batch.starts[:6])
        TorchAhead().step(told)
        assert batch.bucket == 6 and batch.positions[:n].tolist() == [3 * i + 1 for i in range(n)]
        assert batch.positions[n:].tolist() == [0] * (6 - n) and batch.kv_rows[n:].tolist() == [
            table.null_row
        ] * (6 - n)
        assert batch.hi[n:].tolist() == [1] * (6 - n)


class Wrong(TorchAhead):
    def __init__(self, spoil: Callable[[str, Kept | Batch], None]) -> None:
        self.spoil = spoil

    def accept(
        self, best: Tensor, batch: Batch, ends: Tensor | None = None, forced: Tensor | None = None
    ) -> Kept:
        kept = super().accept(best, batch, ends, forced)
        kept = replace(
            kept,
            n=kept.n.clone(),
            tokens=kept.tokens.clone(),
            last=kept.last.clone(),
            goes=kept.goes.clone(),
        )
        self.spoil("accept", kept)
        return kept

    def move(self, batch: Batch, kept: Kept, drafts: Tensor | None = None) -> Batch:
        moved = super().move(batch, kept, drafts)
        self.spoil("move", moved)
        return moved


def spoil(where: str, field: str) -> Callable[[str, Kept | Batch], None]:
    def one(what: str, found: Kept | Batch) -> None:
        if what == where:
            values: Tensor = getattr(found, field)
            values[len(values) // 2] += 1 if field != "last" else -1  # farther would be nowhere

    return one


@pytest.mark.sampled(1, most=5)
@pytest.mark.parametrize(
    ("where", "field"),
    [
        *(("accept", field) for field in ("n", "tokens", "last", "goes")),
        *(("move", field) for field in ("positions", "hi", "kv_rows", "tokens", "seq_fold", "seq_keep")),
    ],
)
def test_the_check_finds_what_is_wrong(where: str, field: str) -> None:
    assert ahead_cuda.check(TorchAhead(), TorchAhead(), SPEC) is None
    said = ahead_cuda.check(Wrong(spoil(where, field)), TorchAhead(), SPEC)
    assert said is not None and ("accepted" if where == "accept" else "moved") in said


def test_a_cpu_has_the_reference() -> None:
    assert limits_of(ahead_cuda)(SPEC) == "runs on NVIDIA GPUs only"
    assert isinstance(ahead.bind(SPEC), TorchAhead) and ahead.chosen(SPEC).capturable


@cases(seeds=range(3), slow=True)
def test_accept_and_move_do_what_the_reference_does(machine: Machine) -> None:
    spec = AheadSpec(machine.device)
    assert machine.is_emulated or limits_of(ahead_cuda)(spec) is None
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
        buffers = own.buffers
        places = buffers.n, buffers.tokens
        batch, _, _ = ahead_cuda.verify([17] * 64, CPU, torch.Generator().manual_seed(0))
        best = batch.tokens.roll(-1)[None].double().expand(2, -1).contiguous()
        best[0, 5 * 17 + 3] = 7  # all drafts are right but one
        kept = own.accept(best, batch)
    assert kept.n.tolist() == [4 if s == 5 else 17 for s in range(64)] and len(kept.tokens) == 64 * 17
    if spec.n_row >= 64 * 17:
        assert (buffers.n, buffers.tokens) == places, "what was planned was taken at the start"


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


@pytest.mark.parametrize("arch", ARCHS)
def test_accept_and_move_compile_for_every_architecture(arch: str) -> None:
    found = compiled("ahead", arch)
    assert set(found) == {"ahead_accept", "ahead_move"} and not any(
        r.spill_bytes for r in found.values()
    )
