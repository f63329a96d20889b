"""Rows and pages in rings: the kernels' are the reference's, and the reference's are those of a ring told row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cpu import build
from pyspec.cuda import jit
from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.attend import cpu as attend_cpu
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, worst
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.ragged import spoil
from pyspec.cuda.ops.ring_places import cpu as ring_places_cpu
from pyspec.cuda.ops.ring_places import cuda as ring_places_cuda
from pyspec.cuda.ops.ring_places import ref as ring_places_ref
from pyspec.cuda.ops.ring_places.ref import RingPlacesSpec
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.ring_pool import RingPool
from pyspec.slots.table import SlotTable

SPEC = RingPlacesSpec(CPU)
REFERENCE = ring_places_ref.bind(SPEC)


def test_every_row_is_its_position_in_its_slots_ring() -> None:
    table = SlotTable(3, 40, 16)
    for slot in table.slots[:2]:
        table.acquire(slot, 300)
    seqs = [Seq(1, 253, [5, 6, 7]), Seq(0, 47, [8])]
    batch = lay_out(table, seqs, CPU, arena=Arena(3, 19, CPU))
    rows, pages = REFERENCE(batch, 5, 240)
    assert rows.tolist()[:4] == [80 + 253 % 80, 80 + 254 % 80, 80 + 255 % 80, 47]
    for row, at in enumerate((253, 254, 255)):
        assert pages[0, at // 16] * 16 + at % 16 == rows[row]
    assert pages[1, 2] * 16 + 15 == rows[3] and (rows[4:] == 240).all()
    assert pages.shape == batch.page_table.shape and pages.max() < 15


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")
def test_a_cpus_places_are_the_references() -> None:
    assert limits_of(ring_places_cpu)(SPEC) is None
    assert ring_places_cuda.check(ring_places_cpu.bind(SPEC), REFERENCE, SPEC) is None


@needs_compiler
def test_a_gpus_places_are_the_references() -> None:
    with emulated_gpu():
        own = ring_places_cuda.bind(SPEC)
        assert ring_places_cuda.check(own, REFERENCE, SPEC) is None
        wrong = ring_places_cuda.check(lambda b, n, z: own(b, n + (n == 7), z), REFERENCE, SPEC)
        assert wrong == "rows in rings of 7 pages of 8 differ from the reference's"


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_places_compile_for_every_architecture(arch: str) -> None:
    pytest.importorskip("cuda.core")
    found = compile_cubin("ring_places", arch, use_cache=False).resources["ring_places"]
    assert found.spill_bytes == 0 and found.registers <= 64


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = RingPlacesSpec(torch.device("cuda", 0))
    assert limits_of(ring_places_cuda)(SPEC) == "runs on NVIDIA GPUs only"
    assert limits_of(ring_places_cpu)(gpu) == "runs on CPUs only"
    monkeypatch.setattr(jit, "missing", lambda device: None)
    assert limits_of(ring_places_cuda)(gpu) is None


KINDS = ["torch", "cpu", pytest.param("cuda", marks=needs_compiler)]


@pytest.mark.parametrize(("window", "size"), [(21, 16), (40, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_rings_is_that_over_the_texts_pages(kind: str, window: int, size: int) -> None:
    """Of rows far behind several turns of the ring, with NaN in every row that is behind the window of all of them."""
    spec, gen = AttendSpec(CPU, 6, 2, 64, 0.125, KvFormat.named("f16")), torch.Generator().manual_seed(4)
    table, spare = SlotTable(3, 60, size), 12
    ring = RingPool(3, -(-(window + spare) // size), size, window, 2, 64, spec.kv, CPU)
    pool = KVPool(table.n_alloc_row, 2, 64, spec.kv, CPU)
    spoil(pool)
    spoil(ring)
    seqs = [Seq(2, 253, [1] * 5), Seq(0, 3, [1] * spare), Seq(1, 5 * ring.n_seat - 2, [1] * 4)]
    for seq in seqs:
        table.acquire(table.slots[seq.slot], 20 * size)
    batch = lay_out(table, seqs, CPU, arena=Arena(3, 30, CPU))
    rows, pages = REFERENCE(batch, ring.n_ring, ring.null_row)
    placed = replace(batch, kv_rows=rows, page_table=pages, pages=())
    for i, seq in enumerate(seqs):
        at = torch.arange(max(0, seq.n_past - window + 1), seq.n_past + seq.width)
        k, v = (torch.randn(len(at), 2, 64, generator=gen) for _ in "kv")
        for where, of in ((batch, pool), (placed, ring)):
            of.write(where.page_table[i, at // size] * size + at % size, k, v)
    n, q = batch.n_row, torch.randn(len(batch.tokens), 6, 64, generator=gen)
    plain = replace(batch, positions=batch.positions[:n], lo=batch.lo[:n], hi=batch.hi[:n])
    want = attend_ref.bind(spec)(q[:n], pool, plain, window)
    assert want.isfinite().all()
    if kind == "torch":
        plain = replace(plain, page_table=placed.page_table)
        got = attend_ref.bind(spec)(q[:n], ring, plain, window)
    elif kind == "cpu":
        got = attend_cpu.bind(spec)(q, ring, placed, window)[:n]
    else:
        with emulated_gpu(seed=2):
            got = attend_cuda.bind(spec)(q, ring, placed, window)[:n]
    assert worst(got, want) < TOLERANCE[torch.float16]
