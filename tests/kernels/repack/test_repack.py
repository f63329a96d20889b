"""`repack` on every machine: the records of linear/pack.py, of any bytes, rows and blocks that fill no tile; and which types it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.machine import needs_compiler
from machines import Machine, cases, compiled

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.pack import Packed, repack, unpack
from pyspec.cuda.ops.repack import cuda as repack_cuda
from pyspec.cuda.ops.repack import ref as repack_ref
from pyspec.cuda.ops.repack.ref import RepackSpec
from pyspec.gguf import GGMLType as G

CPU = torch.device("cpu")
OTHERS = (G.NVFP4, G.BF16, G.IQ2_XXS, G.IQ3_XXS)
TAKEN = tuple(type for type in FORMATS if type not in OTHERS)


@cases("type", emulated=[*TAKEN], card=[*TAKEN])
def test_records_are_the_references(machine: Machine, type: G) -> None:
    """Bytes of all kinds: scales that are no numbers are moved as others are."""
    spec = RepackSpec(machine.device, type)
    with machine.started():
        assert repack_ref.check(repack_cuda.bind(spec), repack_ref.bind(spec), spec) is None


@needs_compiler
def test_a_wrong_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RepackSpec(CPU, G.Q4_K)
    places, flips = repack_ref.bits_of(G.Q4_K)  # type: ignore[misc]
    turned = places.clone()
    turned[[0, 9]] = turned[[9, 0]]
    monkeypatch.setattr(repack_cuda, "bits_of", lambda type: (turned, flips))
    with Machine("emulated", CPU).started():
        wrong = repack_ref.check(repack_cuda.bind(spec), repack_ref.bind(spec), spec)
    assert wrong is not None and "277 rows of 768 columns" in wrong


@pytest.mark.parametrize("type", [G.Q4_K, G.MXFP4, G.Q3_K])
def test_a_bit_of_a_record_is_one_of_the_files(type: G) -> None:
    """Moved by the table alone, and unpacked: the file's weights."""
    found = repack_ref.bits_of(type)
    assert found is not None
    places, flips = found
    raw = torch.randint(
        0, 120, (16, FORMATS[type].chunk * 32 // type.block_size * type.type_size), dtype=torch.uint8
    )
    bits = torch.cat(
        [
            (raw.flatten()[:, None] >> torch.arange(8) & 1).flatten().byte(),
            torch.zeros(1, dtype=torch.uint8),
        ]
    )
    moved = ((bits[places.long()] ^ flips).view(-1, 8) << torch.arange(8)).sum(-1).byte()
    if FORMATS[type].raised:
        moved[FORMATS[type].raised :] += 1
    n_in = 32 * FORMATS[type].chunk
    packed = repack(raw, type, (16, n_in))
    assert torch.equal(moved, packed.data)
    assert torch.equal(unpack(Packed(moved, type, 16, n_in)).nan_to_num(), unpack(packed).nan_to_num())


def test_types_that_are_more_than_their_bits_are_refused() -> None:
    gpu = RepackSpec(torch.device("cuda", 0), G.Q8_0)
    assert limits_of(repack_cuda)(replace(gpu, device=CPU)) == "runs on NVIDIA GPUs only"
    assert [type for type in FORMATS if repack_ref.bits_of(type) is None] == sorted(
        OTHERS, key=list(FORMATS).index
    )
    for type in (*OTHERS, G.F32):
        why = repack_cuda.limits(replace(gpu, type=type))
        assert why is not None and type.name in why
    assert all(repack_cuda.limits(replace(gpu, type=type)) is None for type in TAKEN)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    for type in (G.Q6_K, G.Q8_0, G.MXFP4):
        found = compiled("repack", arch, repack_cuda.defines(type))["repack"]
        assert found.registers <= 128, (type, found)
