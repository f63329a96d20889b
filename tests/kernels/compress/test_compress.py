"""compress.cu, thread by thread on the CPU and on a card, against the reference and itself to the bit; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, GPU, NO_FAULT, Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress import ref as compress_ref
from pyspec.cuda.ops.compress.cases import NAMES, Given, check, difference, make
from pyspec.cuda.ops.compress.ref import VALUES, CompressSpec
from pyspec.cuda.ops.index_rows.cases import pool_for
from pyspec.cuda.ops.ragged import Ragged, place

CSA = CompressSpec(CPU, 4, 64, True, 16, 1e-6, torch.float16)
HCA = CompressSpec(CPU, 128, 32, False, 32, 1e-6, torch.bfloat16)
POOLS = replace(CSA, overlaps=False, n_rot=2, normed=False)
SHAPES = [
    CSA,
    HCA,
    replace(CSA, dim=32, kv=torch.float32),
    replace(CSA, dim=96, n_rot=96, kv=torch.float8_e4m3fn),
    replace(CSA, dim=512, n_rot=64),
    replace(HCA, dim=512, n_rot=64),
    replace(CSA, ratio=6, overlaps=False),
    POOLS,
    replace(CSA, overlaps=False, weighed=False),
]
MODELS = [
    CompressSpec(GPU, 4, 512, True, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 4, 128, True, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 128, 512, False, 64, 1e-6, torch.float16),
    CompressSpec(GPU, 4, 32, True, 16, 1e-6, torch.float32),
    CompressSpec(GPU, 128, 32, False, 16, 1e-6, torch.bfloat16),
]
WIDE = Ragged([(5000 + 431 * i, 1 + i) for i in range(17)], 32, (7, 2))


@pytest.mark.parametrize(("spec", "seed"), [(CSA, 0), (HCA, 1), (SHAPES[-1], 2), (POOLS, 3)])
def test_rows_and_rings_are_the_references(machine: Machine, spec: CompressSpec, seed: int) -> None:
    made = make(
        Ragged([(0, 1), (spec.ratio - 2, 5), (70, 17), (5 * spec.ratio - 1, 2)], 16, (2, 1)), spec, seed
    )
    with machine.started(seed=seed):
        assert difference(made, compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


def both(main: CompressSpec, beside: CompressSpec, case: Ragged, slack: int, seed: int) -> None:
    """Two compressors of the same tokens write the same bits in one launch as one after the other."""
    one, other = (make(case, spec, seed + i, slack) for i, spec in enumerate((main, beside)))
    first, second = compress_cuda.bind(main), compress_cuda.bind(beside)
    # As products lie: side by side
    wide = torch.randn(len(one.values), 2 * (first.width + second.width) + 4, device=main.device)
    wide[one.placed.plain.n_row :] = torch.nan
    at = 2 * first.width
    parts = [wide[:, :at].chunk(2, -1), wide[:, at : at + 2 * second.width].chunk(2, -1)]
    wants, given = [], []
    for launch, of, (values, scores) in zip((first, second), (one, other), parts, strict=True):
        ring, pool = of.copies()
        launch(values, scores, of.places, of.norm, one.freq, ring, pool, one.placed.batch)
        wants.append((ring, pool))
        ring, pool = of.copies()
        given.append((values, scores, of.places, of.norm, ring, pool))
    together = first.with_beside(second)
    assert together is not None
    assert first.with_beside(compress_cuda.bind(replace(beside, eps=1e-5))) is None
    together(given[0], given[1], one.freq, one.placed.batch)
    for (*_, ring, pool), (kept, want) in zip(given, wants, strict=True):
        assert torch.equal(pool.k.view(torch.int16), want.k.view(torch.int16))
        assert all(
            torch.equal(ring.rows[x].view(torch.int32), kept.rows[x].view(torch.int32))
            for x in ring.rows
        )


@pytest.mark.sampled(most=1)
@cases("slack", emulated=[0, 34], card=[0, 8, 34])
def test_two_compressors_in_one_launch_leave_what_they_leave_one_after_the_other(
    machine: Machine, slack: int
) -> None:
    with machine.started(seed=6):
        if machine.name == "card":
            both(*MODELS[:2], WIDE, slack, 2)
        else:
            small = replace(CSA, dim=32)
            both(CSA, small, Ragged([(0, 1), (2, 5), (70, 17), (19, 2)], 16, (2, 1)), slack, 6)
            both(small, small, Ragged([(3, 1)], 16), slack, 7)
        assert machine.faults().tolist() == NO_FAULT


@cases("spec", emulated=SHAPES, card=MODELS, seeds=(2, 3), slow=True)
def test_its_own_check_holds(machine: Machine, spec: CompressSpec) -> None:
    with machine.started():
        assert check(compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


@cases(
    "spec, case, slack",
    emulated=[
        (spec, Ragged([(31 * i % 297, 1 + i) for i in range(17)], 16, (3, 2)), slack)
        for slack in (0, 3, 34)
        for spec in (CSA, HCA)
    ],
    card=[(spec, WIDE, slack) for spec in MODELS for slack in (0, 8, 34)],
    slow=True,
)
def test_widths_from_1_to_17_side_by_side_are_the_references(
    machine: Machine, spec: CompressSpec, case: Ragged, slack: int
) -> None:
    made = make(case, spec, 1, slack)
    with machine.started(seed=4):
        assert difference(made, compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None


def test_rows_are_moved_on_the_device_without_the_host_knowing(machine: Machine) -> None:
    made = make(Ragged([(102, 3), (61, 5)], 16), CSA)
    early = place(Ragged([(100, 3), (60, 5)], 16), CPU).batch
    moved = replace(
        made, placed=replace(made.placed, batch=replace(made.placed.batch, seqs=early.seqs, bucket=8))
    )
    with machine.started(seed=2):
        assert difference(moved, compress_cuda.bind(CSA), compress_ref.bind(CSA), CSA) is None


@pytest.mark.parametrize("name", ["position", "slot", "row"])
@pytest.mark.parametrize("bad", [-2, 1 << 20, 1 << 30])
def test_what_is_out_of_bounds_is_reported_and_other_sequences_are_right(
    machine: Machine, name: str, bad: int
) -> None:
    made = make(Ragged([(90, 3), (99, 2), (70, 2)]), CSA)
    want, kept = made.run(compress_ref.bind(CSA), (slice(None), made.placed.plain))
    b = made.placed.batch
    positions, slots, rows = b.positions.clone(), b.seq_slot.clone(), b.kv_rows.clone()
    # Row 3 ends a block, row 4 none
    {"position": positions[4:5], "slot": slots[1:2], "row": rows[3:4]}[name].fill_(bad)
    with machine.started(seed=5):
        wrong = replace(b, positions=positions, seq_slot=slots, kv_rows=rows)
        ring, pool = made.run(compress_cuda.bind(CSA), (slice(None), wrong))
        assert machine.faults().tolist()[:3] == [1, compress_cuda.GUARD.number, 1]
    for seq in (0, 2):
        slot = made.placed.plain.seqs[seq].slot
        assert torch.equal(
            ring.rows[VALUES][slot].view(torch.int32), want.rows[VALUES][slot].view(torch.int32)
        )
    made_here = ~pool.k[:, 0, 0].isnan()
    off = (pool.k[made_here].float() - kept.k[made_here].float()).abs().amax()
    assert int(made_here.sum()) >= 1 and bool(off < 0.02)


@cases("spec", card=MODELS[:3])
def test_a_captured_compressor_serves_rows_that_are_moved(machine: Machine, spec: CompressSpec) -> None:
    lengths = [(300, 126), (301, 127), (302, 130), (303, 0), (299, 383)]
    made = [make(Ragged([(a, 4), (b, 2)]), spec, seed) for seed, (a, b) in enumerate(lengths)]
    launch, first = compress_cuda.bind(spec), made[0]
    made = [replace(m, places=first.places) for m in made]
    batch = replace(first.placed.batch, bucket=6, seqs=())
    n_page = max(m.placed.n_page for m in made)
    pool = pool_for(replace(first.placed, n_page=n_page), spec.ratio, spec.dim, spec.kv, machine.device)
    values, scores, norm, (ring, _) = (
        first.values.clone(),
        first.scores.clone(),
        first.norm.clone(),
        first.copies(),
    )

    def put(m: Given) -> None:
        own = m.placed.batch
        names = ("positions", "kv_rows", "seq_slot")
        pairs = [(getattr(batch, name), getattr(own, name)) for name in names]
        pairs += [(ring.rows[name], m.ring.rows[name]) for name in NAMES]
        for to, by in (*pairs, (values, m.values), (scores, m.scores), (norm, m.norm)):
            to.copy_(by)
        pool.k.fill_(torch.nan)

    wants = [m.run(compress_ref.bind(spec), (slice(None), m.placed.plain)) for m in made]
    put(first)
    given = values, scores, first.places, norm, first.freq
    replay, _ = machine.captured(
        lambda: launch(*given, ring, pool, batch), lambda: launch(*given, first.copies()[0], pool, batch)
    )
    for m, (kept, want) in zip(made, wants, strict=True):
        put(m)
        replay()
        own = pool.k[: len(want.k)]
        assert torch.equal(own.isnan(), want.k.isnan())
        assert bool((own.nan_to_num(0.0).float() - want.k.nan_to_num(0.0).float()).abs().amax() < 0.02)
        for name in NAMES:
            assert torch.equal(ring.rows[name].view(torch.int32), kept.rows[name].view(torch.int32))
    assert machine.faults().tolist() == NO_FAULT


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_without_spills(arch: str) -> None:
    for spec in (
        replace(CSA, dim=512, n_rot=64),
        replace(CSA, dim=128, n_rot=64),
        replace(HCA, dim=512, n_rot=64),
        SHAPES[2],
    ):
        found = compiled("compress", arch, compress_cuda.defines(spec))
        assert set(found) == set(compress_cuda.FORMS)
        assert found["compress_rows"].registers * compress_cuda.n_group(spec) * spec.dim // 4 <= 65536
    beside = {"BESIDE_DIM": 128, "BESIDE_GROUPS": compress_cuda.n_group(replace(CSA, dim=128))}
    names = compress_cuda.defines(replace(CSA, dim=512, n_rot=64)) | beside
    found = compiled("compress", arch, names)
    assert set(found) == {*compress_cuda.FORMS, *compress_cuda.BOTH}
    assert all(found[name].spill_bytes == 0 for name in compress_cuda.BOTH)
