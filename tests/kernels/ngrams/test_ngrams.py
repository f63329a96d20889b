"""ngrams.cu, thread by thread on the CPU and on a card, against the reference; the reference's rows against whole numbers of Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, NO_FAULT, Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.ngrams import cuda as ngrams_cuda
from pyspec.cuda.ops.ngrams.ref import IDS, INPUTS, Ngrams, NgramsSpec
from pyspec.cuda.ops.ragged import Ragged, place
from pyspec.slots.ring import RingRows

LARGE = (0xFFFF_FFFF_FFFF_FFC5, (1 << 45) - 55, (1 << 44) + 7, (1 << 63) + 9)  # products pass 2^64
SPEC = NgramsSpec(CPU, 3, LARGE[:3], (101, 103, 107, 109), (0, 101, 204, 311), 7, 4, 24, 4, 1e-6)
WIDE = replace(
    SPEC,
    n_gram=4,
    multipliers=LARGE,
    sizes=(113, 127, 101),
    offsets=(0, 113, 240),
    n_stream=3,
    n=1028,
    n_tap=3,
)
MODEL = replace(SPEC, n=2560, sizes=(1 << 22,) * 20, offsets=tuple((1 << 22) * i for i in range(20)))


def ring_of(spec: NgramsSpec, n_slot: int, slack: int = 4) -> RingRows:
    dims = {IDS: (1,), INPUTS: (spec.n_stream * spec.n,)}
    return RingRows(dims, n_slot, spec.window, slack, torch.float32, spec.device)


def rows_of(spec: NgramsSpec, ids: list[int]) -> list[int]:
    """Rows of a text's last token, in whole numbers."""
    context, ended = [ids[-1]], False
    for j in range(1, spec.n_gram):
        before = ids[-1 - j] if j < len(ids) else spec.end
        ended = ended or before == spec.end
        context.append(spec.end if ended else before)
    per, rows = spec.n_head // (spec.n_gram - 1), []
    for head in range(spec.n_head):
        m = 0
        for j in range(head // per + 2):
            m ^= context[j] * spec.multipliers[j] % (1 << 64)
        rows.append(m % spec.sizes[head] + spec.offsets[head])
    return rows


@pytest.mark.parametrize("spec", [SPEC, WIDE])
def test_rows_are_those_of_whole_numbers(spec: NgramsSpec) -> None:
    """A text read in pieces, with ends beside each other and apart, one of them the token itself."""
    ids = [5, 7, 7, 250_000, 3, 9, 7, 1, 2, 4, 11, 7, 0, 6, 8]
    ring, own, at, got = ring_of(spec, 3), Ngrams(spec), 0, []
    for width in (1, 4, 2, 8):
        batch = place(Ragged([(at, width)]), CPU).plain
        tokens = torch.tensor(ids[at : at + width])
        got += own.rows(ring, replace(batch, tokens=tokens)).view(width, -1).tolist()
        at += width
    assert got == [rows_of(spec, ids[: i + 1]) for i in range(len(ids))]


@cases("spec", emulated=[SPEC, WIDE], card=[SPEC, WIDE, MODEL])
def test_rows_and_streams_are_the_references(machine: Machine, spec: NgramsSpec) -> None:
    spec = replace(spec, device=machine.device)
    with machine.started():
        own = ngrams_cuda.bind(spec)
        assert ngrams_cuda.check(own, Ngrams(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT
        other = Ngrams(replace(spec, end=spec.end + 1))
        assert "other rows" in str(ngrams_cuda.check(own, other, spec))


@cases("bad", both=[-2, 1 << 20])
def test_a_slot_out_of_bounds_is_reported_and_others_are_right(machine: Machine, bad: int) -> None:
    spec = replace(SPEC, device=machine.device)
    batch = place(Ragged([(9, 3), (4, 2)]), spec.device).plain
    batch = replace(batch, tokens=torch.arange(5, device=spec.device))
    slots = batch.seq_slot.clone()
    slots[1:2].fill_(bad)
    with machine.started():
        want = ngrams_cuda.bind(spec).rows(ring_of(spec, 4), batch)
        got = ngrams_cuda.bind(spec).rows(ring_of(spec, 4), replace(batch, seq_slot=slots))
        assert machine.faults().tolist()[:3] == [1, ngrams_cuda.GUARD.number, 1]
        assert torch.equal(got[: 3 * spec.n_head], want[: 3 * spec.n_head])
        machine.faults().zero_()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture(arch: str) -> None:
    for spec in (SPEC, WIDE, MODEL):
        assert set(compiled("ngrams", arch, ngrams_cuda.FILE.defines(spec))) == set(ngrams_cuda.FORMS)
