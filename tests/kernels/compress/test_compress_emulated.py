"""compress.cu runs thread by thread on the CPU, against the reference and itself to the bit; and compiles everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda import faults
from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress import ref as compress_ref
from pyspec.cuda.ops.compress.cases import check, difference, make
from pyspec.cuda.ops.compress.ref import VALUES, CompressSpec
from pyspec.cuda.ops.index_rows.cases import Ragged, place

CSA = CompressSpec(CPU, 4, 64, True, 16, 1e-6, torch.float16)
HCA = CompressSpec(CPU, 128, 32, False, 32, 1e-6, torch.bfloat16)
SHAPES = [
    CSA,
    HCA,
    replace(CSA, dim=32, kv=torch.float32),
    replace(CSA, dim=96, n_rot=96, kv=torch.float8_e4m3fn),
    replace(CSA, dim=512, n_rot=64),
    replace(HCA, dim=512, n_rot=64),
    replace(CSA, ratio=6, overlaps=False),
]


@needs_compiler
@pytest.mark.parametrize(("spec", "seed"), [(CSA, 0), (HCA, 1)])
def test_rows_and_rings_are_the_references(spec: CompressSpec, seed: int) -> None:
    made = make(
        Ragged([(0, 1), (spec.ratio - 2, 5), (70, 17), (5 * spec.ratio - 1, 2)], 16, (2, 1)), spec, seed
    )
    with emulated_gpu(seed=seed):
        assert difference(made, compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
        assert faults.record(CPU).tolist() == [0] * 5


def both(main: CompressSpec, case: Ragged, slack: int, seed: int) -> None:
    """Two compressors of the same tokens write the same bits in one launch as one after the other."""
    beside = replace(main, dim=32)
    one, other = (make(case, spec, seed + i, slack) for i, spec in enumerate((main, beside)))
    first, second = compress_cuda.bind(main), compress_cuda.bind(beside)
    wide = torch.randn(
        len(one.values), 2 * (first.width + second.width) + 4
    )  # as products lie: side by side
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
    assert (
        together is not None and first.with_beside(compress_cuda.bind(replace(beside, eps=1e-5))) is None
    )
    together(given[0], given[1], one.freq, one.placed.batch)
    for (*_, ring, pool), (kept, want) in zip(given, wants, strict=True):
        assert torch.equal(pool.k.view(torch.int16), want.k.view(torch.int16))
        assert all(
            torch.equal(ring.rows[x].view(torch.int32), kept.rows[x].view(torch.int32))
            for x in ring.rows
        )
    assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.sampled(most=1)
@needs_compiler
@pytest.mark.parametrize("slack", [0, 34])
def test_two_compressors_in_one_launch_leave_what_they_leave_one_after_the_other(slack: int) -> None:
    with emulated_gpu(seed=6):
        both(CSA, Ragged([(0, 1), (2, 5), (70, 17), (19, 2)], 16, (2, 1)), slack, 6)
        both(replace(CSA, dim=32), Ragged([(3, 1)], 16), slack, 7)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("spec", SHAPES)
@pytest.mark.parametrize("seed", [2, 3])
def test_its_own_check_holds(spec: CompressSpec, seed: int) -> None:
    with emulated_gpu(seed=seed):
        assert check(compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None
        assert faults.record(CPU).tolist() == [0] * 5


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, 3, 34])
def test_widths_from_1_to_17_side_by_side_are_the_references(slack: int) -> None:
    for spec in (CSA, HCA):
        made = make(Ragged([(31 * i % 297, 1 + i) for i in range(17)], 16, (3, 2)), spec, 4, slack)
        with emulated_gpu(seed=4):
            assert difference(made, compress_cuda.bind(spec), compress_ref.bind(spec), spec) is None


@needs_compiler
def test_rows_are_moved_on_the_device_without_the_host_knowing() -> None:
    made = make(Ragged([(102, 3), (61, 5)], 16), CSA)
    early = place(Ragged([(100, 3), (60, 5)], 16), CPU).batch
    moved = replace(
        made, placed=replace(made.placed, batch=replace(made.placed.batch, seqs=early.seqs, bucket=8))
    )
    with emulated_gpu(seed=2):
        assert difference(moved, compress_cuda.bind(CSA), compress_ref.bind(CSA), CSA) is None


@needs_compiler
@pytest.mark.parametrize("name", ["position", "slot", "row"])
@pytest.mark.parametrize("bad", [-2, 1 << 20, 1 << 30])
def test_what_is_out_of_bounds_is_reported_and_other_sequences_are_right(name: str, bad: int) -> None:
    made = make(Ragged([(90, 3), (99, 2), (70, 2)]), CSA)
    want, kept = made.run(compress_ref.bind(CSA), (slice(None), made.placed.plain))
    b = made.placed.batch
    positions, slots, rows = b.positions.clone(), b.seq_slot.clone(), b.kv_rows.clone()
    # Row 3 ends a block, row 4 none
    {"position": positions[4:5], "slot": slots[1:2], "row": rows[3:4]}[name].fill_(bad)
    with emulated_gpu(seed=5):
        wrong = replace(b, positions=positions, seq_slot=slots, kv_rows=rows)
        ring, pool = made.run(compress_cuda.bind(CSA), (slice(None), wrong))
        assert faults.record(CPU).tolist()[:3] == [1, compress_cuda.OP_ID, 1]
    for seq in (0, 2):
        slot = made.placed.plain.seqs[seq].slot
        assert torch.equal(
            ring.rows[VALUES][slot].view(torch.int32), want.rows[VALUES][slot].view(torch.int32)
        )
    made_here = ~pool.k[:, 0, 0].isnan()
    off = (pool.k[made_here].float() - kept.k[made_here].float()).abs().amax()
    assert int(made_here.sum()) >= 1 and bool(off < 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for spec in (
        replace(CSA, dim=512, n_rot=64),
        replace(CSA, dim=128, n_rot=64),
        replace(HCA, dim=512, n_rot=64),
        SHAPES[2],
    ):
        found = compile_cubin("compress", arch, compress_cuda.defines(spec), use_cache=False).resources
        assert set(found) == set(compress_cuda.FORMS) and all(
            of.spill_bytes == 0 for of in found.values()
        )
        assert found["compress_rows"].registers * compress_cuda.n_group(spec) * spec.dim // 4 <= 65536
    beside = {"BESIDE_DIM": 128, "BESIDE_GROUPS": compress_cuda.n_group(replace(CSA, dim=128))}
    names = compress_cuda.defines(replace(CSA, dim=512, n_rot=64)) | beside
    found = compile_cubin("compress", arch, names, use_cache=False).resources
    assert set(found) == {*compress_cuda.FORMS, *compress_cuda.BOTH}
    assert all(found[name].spill_bytes == 0 for name in compress_cuda.BOTH)


def test_what_it_can_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compress_cuda.limits(CSA) == "runs on NVIDIA GPUs only"
    monkeypatch.setattr(compress_cuda, "missing", lambda device: None)
    assert all(compress_cuda.limits(spec) is None for spec in SHAPES)
    for change, why in (({"kv": torch.int8}, "q8_0"), ({"dim": 48}, "48 dim"), ({"dim": 544}, "544 dim"), ({"n_rot": 0}, "0 of"), ({"ratio": 7, "dim": 32}, "7 tokens")):  # fmt: skip
        found = compress_cuda.limits(replace(CSA, **{"overlaps": False, **change})) or ""
        assert why in found, (change, found)
