"""mamba2_chunk.cu and its launcher run thread by thread on the CPU, against the reference in float64 and themselves to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
WIDTH, N_SLOT = 6, 4
SHAPE = Mamba2Shape(4, 64, 1, 128, 4)


def seq(slot: int, n: int, keep: bool = False, fold: int = 0) -> Seq:
    return Seq(slot, 0, [0] * n, SeqMode.KEEP if keep else SeqMode.VERIFY, 0, fold)


def laid(seqs: list[Seq]) -> Batch:
    return lay_out(SlotTable(N_SLOT, 64, 64), seqs, CPU)


def rows_of(n: int, shape: Mamba2Shape, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """m and dt, as slices of wider rows that are NaN elsewhere."""
    sizes = [shape.n_channel, shape.n_head]
    m, dt, _ = torch.full((n, sum(sizes) + 64 + -sum(sizes) % 4), torch.nan).split(
        [*sizes, 64 + -sum(sizes) % 4], 1
    )
    return m.copy_(torch.randn(m.shape, generator=gen)), dt.copy_(torch.randn(dt.shape, generator=gen))


def layer_of(shape: Mamba2Shape, doubled: bool = False) -> StateLayer:
    """A new layer; for the kernels, unwritten records hold NaN."""
    layer = StateLayer(shape, N_SLOT, WIDTH, CPU)
    for name in ("state", "conv", *shape.records):
        t = getattr(layer, name)
        if doubled:
            setattr(layer, name, t.double())
        elif name != "state":
            (t[:, 3:] if name == "conv" else t).fill_(torch.nan)
    return layer


def doubled(p: Params) -> Params:
    return Params(*(getattr(p, name).double() for name in Params.__slots__))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


PROMPTS = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 130, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 129, True, fold=6), seq(3, 127, True), seq(0, 4, True), seq(2, 1)],
]
SHAPES = {
    "128 columns": (SHAPE, (9, 0), (64, 64)),
    "groups of 96": (Mamba2Shape(4, 64, 4, 96, 4), (9, 0), (64, 64)),
    "narrow": (Mamba2Shape(8, 32, 4, 32, 4), (9, 0), (64, 32)),
    "wide heads": (Mamba2Shape(4, 128, 2, 64, 4), (9, 0), (64, 64)),
    "chunks of 32": (SHAPE, (8, 6), (32, 32)),
}


def follow(
    shape: Mamba2Shape,
    rounds: list[list[Seq]],
    capability: tuple[int, int],
    seed: int,
    chunked: int = 63,
) -> float:
    """Rounds on the kernels and on the reference in float64. Returns the largest error of a state."""
    gen, p = torch.Generator().manual_seed(6), make_params(shape, torch.Generator().manual_seed(1), CPU)
    mine, theirs, reference = (
        layer_of(shape),
        layer_of(shape, doubled=True),
        mamba2_ref.bind(Mamba2Spec(CPU, shape)),
    )
    worst = 0.0
    with emulated_gpu(capability, seed=seed):
        run = mamba2_cuda.bind(Mamba2Spec(CPU, shape), columns=2, chunked=chunked)
        for seqs in rounds:
            m, dt = rows_of(sum(s.width for s in seqs), shape, gen)
            got = run(m, dt, p, mine, laid(seqs))
            want = reference(m.double(), dt.double(), doubled(p), theirs, laid(seqs))
            for h in range(shape.n_head):
                assert error(got[:, h], want[:, h]) < 1e-3
            for s in seqs:
                worst = max(worst, error(mine.state[s.slot], theirs.state[s.slot]))
                n = 3 if s.keep else 3 + s.width
                assert error(mine.conv[s.slot, :n], theirs.conv[s.slot, :n]) < 1e-6
        assert faults.record(CPU).tolist() == [0] * 5
    return worst


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_chunked_prompts_follow_the_reference(name: str, seed: int) -> None:
    """Beside sequences that are not chunked, with records to fold and without."""
    shape, capability, cut = SHAPES[name]
    assert mamba2_chunk.cut(shape, jit.arch_of(capability)) == cut
    assert follow(shape, PROMPTS, capability, seed) < 3e-6


LENGTHS = {
    (9, 0): [(63, 64, 65), (127, 128, 129), (4, 5, 300)],
    (8, 6): [(31, 32, 33), (63, 64, 65), (95, 97, 4)],  # chunks of 32
}


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("capability", LENGTHS)
def test_lengths_around_the_ends_of_chunks_follow_the_reference(capability: tuple[int, int]) -> None:
    shape = Mamba2Shape(4, 32, 4, 128, 4)
    assert mamba2_chunk.cut(shape, jit.arch_of(capability))[0] == (64 if capability == (9, 0) else 32)
    rounds = [[seq(i, n, True) for i, n in enumerate(group)] for group in LENGTHS[capability]]
    assert follow(shape, rounds, capability, 0, chunked=4) < 3e-6


def hostile(kind: str, n: int, shape: Mamba2Shape) -> tuple[Tensor, Tensor, Params]:
    """Rows and parameters that make chunked sums hard."""
    gen = torch.Generator().manual_seed(7)
    (m, dt), p = rows_of(n, shape, gen), make_params(shape, gen, CPU)
    if kind == "nothing forgotten, equal directions":
        inner = shape.n_head * shape.head_dim
        m[:, inner:] = m[:1, inner:] + 0.01 * m[:, inner:]
        p = replace(p, a=torch.full_like(p.a, -1e-7))
    if kind == "steps next to nothing":
        dt = dt - 30
    if kind == "steps of 50":
        dt = dt + 50
    if kind == "forgets all now and then":
        p = replace(p, a=torch.full_like(p.a, -300.0))
        dt = torch.where(torch.rand(dt.shape, generator=gen) < 0.1, 50.0, -12.0)
    if kind == "sizes from 1e-8 to 1e6":
        m *= torch.logspace(-8, 6, m.shape[1])[torch.randperm(m.shape[1], generator=gen)]
    if kind == "rows from 1e-6 to 1e6":
        m *= torch.logspace(-6, 6, n)[torch.randperm(n, generator=gen), None]
    if kind == "loud":
        m *= 3000
    if kind == "quiet":
        m *= 1e-9
        p = replace(p, conv_b=torch.zeros_like(p.conv_b))
    return m, dt, p


HOSTILE = (
    "nothing forgotten, equal directions",
    "steps next to nothing",
    "steps of 50",
    "forgets all now and then",
    "sizes from 1e-8 to 1e6",
    "rows from 1e-6 to 1e6",
    "loud",
    "quiet",
)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", HOSTILE)
def test_chunked_prompts_follow_the_reference_on_hostile_rows(kind: str) -> None:
    shape, seqs = Mamba2Shape(4, 64, 2, 64, 4), [seq(1, 270, True), seq(3, 66, True)]
    m, dt, p = hostile(kind, 336, shape)
    mine, theirs, reference = (
        layer_of(shape),
        layer_of(shape, doubled=True),
        mamba2_ref.bind(Mamba2Spec(CPU, shape)),
    )
    with emulated_gpu():
        got = mamba2_cuda.bind(Mamba2Spec(CPU, shape), columns=2, chunked=63)(m, dt, p, mine, laid(seqs))
    want = reference(m.double(), dt.double(), doubled(p), theirs, laid(seqs))
    off = [
        error(mine.state[slot, h], theirs.state[slot, h]) for slot in (1, 3) for h in range(shape.n_head)
    ]
    assert got.isfinite().all()
    assert error(got, want) < 1e-3
    assert max(off) < 1e-5


@pytest.mark.slow
def test_a_chunked_prompt_does_not_depend_on_its_neighbours_nor_on_the_order_to_the_bit() -> None:
    """Alone, its state is cut into blocks of 32 rows on this GPU."""
    gen, p, found = (
        torch.Generator().manual_seed(8),
        make_params(SHAPE, torch.Generator().manual_seed(1), CPU),
        [],
    )
    rows = rows_of(300, SHAPE, gen)
    for seed, (before, after) in enumerate(
        (([], []), ([seq(0, 70, True), seq(3, 4)], [seq(2, 64, True)]))
    ):
        layer, first = StateLayer(SHAPE, N_SLOT, WIDTH, CPU), sum(s.width for s in before)
        for t in layer.tensors():
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(9)))
        seqs = [*before, seq(1, 100, True, fold=3), *after]
        m, dt = (
            torch.cat([x[150 : 150 + first], x[:100], x[230:]])[: sum(s.width for s in seqs)]
            for x in rows
        )
        with emulated_gpu(seed=seed, n_multiprocessor=8):
            got = mamba2_cuda.bind(Mamba2Spec(CPU, SHAPE), columns=2, chunked=63)(
                m, dt, p, layer, laid(seqs)
            )
        found.append((got[first : first + 100], layer.state[1], layer.conv[1, :3]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_slots_of_nobody_and_records_are_not_touched() -> None:
    p, layer = (
        make_params(SHAPE, torch.Generator().manual_seed(1), CPU),
        StateLayer(SHAPE, N_SLOT, WIDTH, CPU),
    )
    for t in layer.tensors():
        t[[0, 2, 3]] = torch.nan
    for t in (*layer.records(), layer.conv[:, 3:]):
        t.fill_(torch.nan)
    with emulated_gpu():
        run = mamba2_cuda.bind(Mamba2Spec(CPU, SHAPE), columns=2, chunked=63)
        got = run(
            *rows_of(70, SHAPE, torch.Generator().manual_seed(3)), p, layer, laid([seq(1, 70, True)])
        )
    assert (
        got.isfinite().all() and layer.state[1].isfinite().all() and layer.conv[1, :3].isfinite().all()
    )
    assert all(t[[0, 2, 3]].isnan().all() for t in layer.tensors())
    assert all(t.isnan().all() for t in (*layer.records(), layer.conv[:, 3:]))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("field", "value", "index", "limit"),
    [
        ("seq_slot", N_SLOT, N_SLOT, N_SLOT),
        ("seq_slot", -1, -1, N_SLOT),
        ("seq_fold", 7, 7, 7),
        ("seq_fold", -1, -1, 7),
    ],
)
def test_a_bad_index_is_reported_and_its_prompt_skipped(
    field: str, value: int, index: int, limit: int
) -> None:
    shape, gen = Mamba2Shape(4, 64, 4, 32, 4), torch.Generator().manual_seed(4)
    p, rows = make_params(shape, gen, CPU), rows_of(140, shape, gen)
    seqs = [seq(0, 3, True), seq(1, 70, True), seq(2, 67, True)]
    good, bad, batch = (
        StateLayer(shape, N_SLOT, WIDTH, CPU),
        StateLayer(shape, N_SLOT, WIDTH, CPU),
        laid(seqs),
    )
    with emulated_gpu():
        run = mamba2_cuda.bind(Mamba2Spec(CPU, shape), columns=2, chunked=63)
        want = run(*rows, p, good, laid(seqs))
        assert faults.record(CPU).tolist() == [0] * 5
        getattr(batch, field)[1] = value
        got = run(*rows, p, bad, batch)
        assert faults.record(CPU).tolist() == [1, 7, value if field == "seq_slot" else 1, index, limit]
    for part in (slice(0, 3), slice(73, 140)):
        assert torch.equal(got[part], want[part])
    for a, b in zip(bad.tensors(), good.tensors(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and not a[[1, 3]].any()
