"""sparse_attend.cu, thread by thread on the CPU and on a card, against the reference and itself to the bit; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CPU, GPU, NO_FAULT, ON_CARD, Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.attend.cases import TOLERANCE, worst
from pyspec.cuda.ops.index_rows.cases import pool_for
from pyspec.cuda.ops.ragged import Ragged, copied, place
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend import ref as sparse_ref
from pyspec.cuda.ops.sparse_attend.cases import Windowed, check, difference, make, ring_fault
from pyspec.cuda.ops.sparse_attend.ref import ROWS, SparseSpec

CSA = SparseSpec(CPU, 12, 32, 12, 4, torch.float16, 16, 1e-6)
HCA = replace(CSA, ratio=128, dim=64, n_rot=64)
RAW = replace(CSA, ratio=0, n_head=3, kv=torch.bfloat16)
OF_A_MODEL = SparseSpec(GPU, 64, 512, 128, 4, torch.float16, 64, 1e-6)
MODELS = OF_A_MODEL, replace(OF_A_MODEL, ratio=128), replace(OF_A_MODEL, ratio=0)
CHOICES = [(MODELS[0], 512), (MODELS[1], 0), (MODELS[2], 0)]
WIDE = Ragged([(5000 + 431 * i, 1 + i) for i in range(17)], 32, (7, 2))
CASE = Ragged([(0, 1), (3, 7), (11, 3), (100, 2), (300, 4)], 16, (2, 1))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("spec", "top_k", "seed"), [(CSA, 6, 0), (HCA, 0, 1), (RAW, 0, 2), (replace(CSA, n_head=8), 6, 3)]
)
def test_rows_and_rings_are_the_references(
    machine: Machine, spec: SparseSpec, top_k: int, seed: int
) -> None:
    made = make(CASE, spec, top_k, seed)
    with machine.started(seed=seed):
        assert difference(made, sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


@cases(
    "spec, arch",
    emulated=[
        (spec, arch)
        for spec in (CSA, HCA, RAW, replace(CSA, kv=torch.bfloat16, n_head=33, dim=128))
        for arch in ((8, 0), (8, 6), (9, 0), (12, 0))
    ],
    card=[
        (replace(spec, kv=kv), (9, 0))
        for spec in (
            *MODELS,
            replace(MODELS[0], n_head=128),
            replace(MODELS[0], n_head=4, dim=32, window=12, n_rot=16),
        )
        for kv in (torch.float16, torch.bfloat16)
    ],
    slow=True,
)
def test_its_own_check_holds(machine: Machine, spec: SparseSpec, arch: tuple[int, int]) -> None:
    with machine.started(arch, seed=arch[0]):
        assert check(sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


@cases(
    "case, spec, top_k",
    emulated=[(Ragged([(31 * i % 97, 1 + i) for i in range(17)], 16, (3, 2)), CSA, 6)],
    card=[
        *((WIDE, *choice) for choice in (*CHOICES, (MODELS[0], 8))),
        *((Ragged([(0, 700), (4000, 300), (9000, 1)], 32), *choice) for choice in CHOICES),
    ],
    slow=True,
)
def test_widths_from_1_to_17_side_by_side_and_prompts_are_the_references(
    machine: Machine, case: Ragged, spec: SparseSpec, top_k: int
) -> None:
    made = make(case, spec, top_k)
    with machine.started(seed=3):
        assert difference(made, sparse_cuda.bind(spec), sparse_ref.bind(spec), spec) is None


SHARED = SparseSpec(CPU, 64, 128, 128, 4, torch.float16, 64, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "seqs", "top_k"),
    [
        (SHARED, [(300, 2), (5, 1)], 64),
        (replace(SHARED, n_head=40, dim=512), [(300, 2), (5, 1)], 64),
        (
            replace(SHARED, window=70),
            [(300, 2), (1500, 3), (5, 1)],
            200,
        ),  # half a tile, and lists of one and of some
        (SHARED, [(9000, 1)], 0),  # more units than parts
    ],
)
def test_heads_shared_out_otherwise_give_the_same_bits(
    machine: Machine, spec: SparseSpec, seqs: list[tuple[int, int]], top_k: int
) -> None:
    made, found = make(Ragged(seqs), spec, top_k), []
    for arch in ((9, 0), (8, 0)):
        with machine.started(arch, seed=4):
            attend = sparse_cuda.bind(spec)
            outs = [
                made.run(sparse_cuda.bind(spec, build=build), made.placed.batch)[0]
                for build in attend.builds
            ]
            assert len(outs) > 1 and all(torch.equal(outs[0], other) for other in outs[1:])
            assert difference(made, attend, sparse_ref.bind(spec), spec) is None
            found.append(outs[0])
    assert worst(found[0], found[1]) < TOLERANCE[torch.float16]


@pytest.mark.slow
def test_more_rows_than_a_launch_takes_are_the_references(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(Ragged([(20, 290), (300, 1)], 32, (5, 1)), CSA, 6)
    with machine.started(seed=5):
        assert difference(made, sparse_cuda.bind(CSA), sparse_ref.bind(CSA), CSA) is None
        monkeypatch.setattr(sparse_cuda, "MOST_FLOATS", 9 * 12 * 34)
        assert difference(made, sparse_cuda.bind(CSA), sparse_ref.bind(CSA), CSA) is None


@pytest.mark.slow
@pytest.mark.parametrize("seqs", [[(20, 140), (300, 1)], [(900, 2), (3, 290)]])
def test_with_exact_rows_have_the_same_bits_in_any_number(
    machine: Machine, seqs: list[tuple[int, int]]
) -> None:
    """A prompt's rows are each one part else, summed in another order than those of few."""
    made = make(Ragged(seqs, 32, (5, 1)), CSA, 6)
    n = sum(width for _, width in seqs)
    with machine.started(seed=6):
        usual = sparse_cuda.bind(CSA)
        use(KernelContext(is_exact=True))
        exact = sparse_cuda.bind(CSA)
        assert usual.exact_rows < n <= exact.exact_rows
        assert (
            difference(made, exact, sparse_ref.bind(CSA), CSA) is None
        )  # each sequence's first row alone, to the bit
        assert not torch.equal(
            made.run(exact, made.placed.batch)[0][:n], made.run(usual, made.placed.batch)[0][:n]
        )


def test_rows_are_moved_on_the_device_without_the_host_knowing(machine: Machine) -> None:
    made = make(Ragged([(103, 3), (63, 5)], 16), CSA, 6)
    early = place(Ragged([(100, 3), (60, 5)], 16), CPU).batch
    moved = replace(made.placed.batch, seqs=early.seqs, bucket=8)
    want, kept = made.run(sparse_ref.bind(CSA), made.placed.plain)
    with machine.started(seed=2):
        got, ring = made.run(sparse_cuda.bind(CSA), moved)
    assert worst(got, want) < TOLERANCE[torch.float16]
    assert ring_fault(ring, kept) is None


@pytest.mark.parametrize("name", ["page", "position", "slot", "row"])
@pytest.mark.parametrize("bad", [-2, 1000, 1 << 30])
def test_what_is_out_of_bounds_is_reported_and_other_sequences_are_right(
    machine: Machine, name: str, bad: int
) -> None:
    made = make(Ragged([(90, 3), (100, 2), (70, 1)]), CSA, 6)
    for plane in (made.pool.k, made.ring.rows[ROWS]):  # the row that is read instead may have no owner
        plane.nan_to_num_(0.0)
    want, _ = made.run(sparse_ref.bind(CSA), made.placed.plain)
    b = made.placed.batch
    table, positions, slots = b.page_table.clone(), b.positions.clone(), b.seq_slot.clone()
    chosen = made.chosen.clone()
    wrong = {
        "page": table[1, :2],
        "position": positions[4:5],
        "slot": slots[1:2],
        "row": chosen[4, 2:3],
    }[name]
    wrong.fill_(bad)
    batch = replace(b, page_table=table, positions=positions, seq_slot=slots)
    with machine.started(seed=5):
        got, _ = replace(made, chosen=chosen).run(sparse_cuda.bind(CSA), batch)
        assert machine.faults().tolist()[:3] == [1, sparse_cuda.GUARD.number, 1]
    others = [0, 1, 2, 5]
    assert worst(got[others], want[others]) < TOLERANCE[torch.float16]


@cases("spec, top_k", card=CHOICES)
def test_sparse_attend_gives_the_same_bits_however_heads_are_shared_out(
    machine: Machine, spec: SparseSpec, top_k: int
) -> None:
    made = make(Ragged([(9000, 5), (70_000, 3), (40, 1)], 64), spec, top_k)
    builds = sparse_cuda.bind(spec).builds
    outs = [made.run(sparse_cuda.bind(spec, build=build), made.placed.batch)[0] for build in builds * 2]
    assert all(torch.equal(outs[0], other) for other in outs[1:])


@cases("spec, top_k", card=CHOICES)
def test_a_captured_attention_serves_batches_of_other_lengths(
    machine: Machine, spec: SparseSpec, top_k: int
) -> None:
    """Every length has its rings and its choice at the same addresses."""
    lengths = [(9000, 5000), (8999, 4990), (300, 70), (2, 0), (9000, 1)]
    made = [make(Ragged([(a, 4), (b, 4)]), spec, top_k, seed) for seed, (a, b) in enumerate(lengths)]
    launch, first = sparse_cuda.bind(spec), made[0]
    n_col = max(m.placed.batch.page_table.shape[1] for m in made)
    n_page = max(m.placed.n_page for m in made)
    table = torch.zeros(2, n_col, dtype=torch.int64, device=machine.device)
    pool = (
        None
        if first.pool is None
        else pool_for(replace(first.placed, n_page=n_page), spec.ratio, spec.dim, spec.kv, GPU)
    )
    batch = replace(first.placed.batch, page_table=table, bucket=8, seqs=())
    ring, q, kv, chosen = copied(first.ring), first.q.clone(), first.kv.clone(), first.chosen
    sinks, tail = first.sinks.clone(), first.tail
    made = [replace(m, tail=tail) for m in made]

    def put(m: Windowed) -> None:
        own = m.placed.batch
        table.zero_()[:, : own.page_table.shape[1]].copy_(own.page_table)
        for to, by in ((q, m.q), (kv, m.kv), (ring.rows[ROWS], m.ring.rows[ROWS]), (sinks, m.sinks), (batch.positions, own.positions), (batch.seq_slot, own.seq_slot)):  # fmt: skip
            to.copy_(by)
        if chosen is not None and m.chosen is not None:
            chosen.copy_(m.chosen)
        if pool is not None and m.pool is not None:
            pool.k[: len(m.pool.k)].copy_(m.pool.k)

    wants = [m.run(sparse_ref.bind(spec), m.placed.plain)[0] for m in made]
    put(first)
    rest = pool, chosen, sinks, batch
    replay, out = machine.captured(
        lambda: launch(q, kv, tail, ring, *rest), lambda: launch(q, kv, tail, copied(ring), *rest)
    )
    for m, want in zip(made, wants, strict=True):
        put(m)
        replay()
        assert worst(out, want) < TOLERANCE[spec.kv], m.placed.plain.max_hi
    assert machine.faults().tolist() == NO_FAULT


@ON_CARD
def test_sparse_attend_reports_rows_and_pages_that_do_not_exist(machine: Machine) -> None:
    made, launch = make(WIDE, MODELS[0], 512), sparse_cuda.bind(MODELS[0])
    for plane in (made.pool.k, made.ring.rows[ROWS]):
        plane.nan_to_num_(0.0)
    right, _ = made.run(launch, made.placed.batch)
    starts = made.placed.plain.starts
    table, chosen = made.placed.batch.page_table.clone(), made.chosen.clone()
    table[3] = 1 << 33
    chosen[starts[5], 7] = 1 << 28
    for batch, rows, seq in (
        (replace(made.placed.batch, page_table=table), made.chosen, 3),
        (made.placed.batch, chosen, 5),
    ):
        bad, _ = replace(made, chosen=rows).run(launch, batch)
        assert machine.faults().tolist()[:3] == [1, sparse_cuda.GUARD.number, seq]
        machine.faults().zero_()
        assert torch.equal(bad[: starts[seq]], right[: starts[seq]])
        assert torch.equal(bad[starts[seq + 1] :], right[starts[seq + 1] :])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_without_spills(arch: str) -> None:
    for dim, n_head, kv in ((512, 64, torch.float16), (512, 64, torch.bfloat16), (32, 4, torch.float16)):
        spec = replace(CSA, dim=dim, kv=kv, n_head=n_head)
        for build in {*sparse_cuda.builds(spec, arch), sparse_cuda.long_build(spec, arch)}:
            found = compiled("sparse_attend", arch, build.defines())
            assert set(found) == set(sparse_cuda.FORMS)
            assert found["sparse_parts"].registers * 32 * build.warps <= 65536


def test_every_architecture_has_a_build_for_every_width() -> None:
    for arch in ARCHS:
        for dim in (32, 64, 96, 128, 256, 384, 512):
            found = sparse_cuda.builds(replace(CSA, dim=dim, n_head=64), arch)
            assert found and len({build.unit for build in found}) == 1, (arch, dim)
    assert [build.heads for build in sparse_cuda.builds(replace(CSA, dim=512, n_head=64), "sm_90a")] == [16, 32, 64]  # fmt: skip
    long = sparse_cuda.long_build(SparseSpec(CPU, 64, 512, 128, 4, torch.float16, 64, 1e-6), "sm_90a")
    assert (long.heads, long.keys, long.buffers, long.rows) == (64, 64, 2, sparse_cuda.LONG_ROW)
    assert sparse_cuda.long_build(CSA, "sm_90a") in sparse_cuda.builds(CSA, "sm_90a")
