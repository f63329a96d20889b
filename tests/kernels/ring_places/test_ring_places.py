"""Rows and pages in rings: the kernels' are the reference's, and the reference's are those of a ring told row by row."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.ring_places import cpu as ring_places_cpu
from pyspec.cuda.ops.ring_places import cuda as ring_places_cuda
from pyspec.cuda.ops.ring_places import ref as ring_places_ref
from pyspec.cuda.ops.ring_places.ref import RingPlacesSpec
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, lay_out
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


def test_a_cpus_places_are_the_references() -> None:
    if (why := ring_places_cpu.limits(SPEC)) is not None:
        pytest.skip(why)
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


def test_other_devices_are_refused() -> None:
    gpu = RingPlacesSpec(torch.device("cuda", 0))
    assert ring_places_cuda.limits(SPEC) == "runs on NVIDIA GPUs only"
    assert ring_places_cpu.limits(gpu) == "runs on CPUs only"
    assert ring_places_cuda.limits(gpu) is None
