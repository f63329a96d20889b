"""linear compiles for every architecture, without a GPU, within registers and shared memory."""

from __future__ import annotations

import pytest
import torch
from sampling import few

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear.cuda import defines, fitting, n_shared, n_stages, stage_bytes, stem
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.gguf import GGMLType

CAPABILITIES = dict(zip(ARCHS, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], strict=True))


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_q8_0_compiles_without_spills_up_to_32_rows(arch: str) -> None:
    capability = CAPABILITIES[arch]
    shapes = fitting(GGMLType.Q8_0, capability)
    assert {s.rows for s in shapes} >= {8, 16, 24, 32, 48, 64, 96, 128}
    for shape in shapes[0], shapes[3], shapes[5], shapes[-1]:
        stages = n_stages(GGMLType.Q8_0, shape, capability)
        macros = defines(GGMLType.Q8_0, shape, stages, Epilogue.PLAIN)
        found = compile_cubin(stem(capability), arch, macros, use_cache=False).resources["linear"]
        assert found.spill_bytes == 0 or shape.rows > 32
        assert found.registers * 32 * (shape.n_warp + (capability >= (9, 0))) <= 65536
        room = (227 if arch in ("sm_90a", "sm_100a") else 163 if arch == "sm_80" else 99) * 1024
        assert stages * stage_bytes(GGMLType.Q8_0, shape) + found.shared_bytes <= room


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize("epilogue", Epilogue)
def test_every_type_and_epilogue_compiles_for_hopper(type: GGMLType, epilogue: Epilogue) -> None:
    shape = fitting(type, (9, 0))[3]
    code = compile_cubin(
        stem((9, 0)),
        "sm_90a",
        defines(type, shape, n_stages(type, shape, (9, 0)), epilogue),
        use_cache=False,
    )
    assert code.resources["linear"].spill_bytes == 0


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", few(CHUNKS, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.NVFP4))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_pairs_compile_without_spills_and_leave_room_for_their_barriers(
    arch: str, type: GGMLType
) -> None:
    pads = linear_pair.GROUPS if type is GGMLType.Q8_0 else (8, 48)
    for pad in pads:
        for epilogue in Epilogue if type is GGMLType.Q8_0 else (Epilogue.RESIDUAL,):
            macros = linear_pair.defines(type, pad, epilogue)
            found = compile_cubin("linear_pair", arch, macros, use_cache=False).resources["linear_pair"]
            # Its minima take registers; experts have it
            most = 120 if type is GGMLType.Q2_K else 24 if arch == "sm_100a" else 0
            assert found.spill_bytes <= (most if pad == 48 else 0)
            assert found.shared_bytes <= 2048


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_type_compiles_without_spills_at_32_rows(type: GGMLType, arch: str) -> None:
    """Where it fits at all: records of 256 columns are too large for two stages in 99 KiB. Blackwell may spill a little."""
    capability = CAPABILITIES[arch]
    shapes = [s for s in fitting(type, capability) if s.rows <= 32]
    assert shapes or (
        type in (GGMLType.Q5_K, GGMLType.Q6_K) and capability not in ((8, 0), (9, 0), (10, 0))
    )
    for shape in shapes[-1:]:
        macros = defines(type, shape, n_stages(type, shape, capability), Epilogue.PLAIN)
        found = compile_cubin(stem(capability), arch, macros, use_cache=False).resources["linear"]
        assert found.spill_bytes <= (96 if capability >= (10, 0) else 0)


def test_a_type_too_wide_for_small_shared_memory_is_known_before_compiling() -> None:
    assert fitting(GGMLType.Q6_K, (8, 9)) == () and fitting(GGMLType.Q8_0, (12, 0))


@pytest.mark.parametrize("pad", linear_pair.GROUPS)
@pytest.mark.parametrize("type", CHUNKS)
def test_the_ring_of_a_pair_fits_whatever_the_matrix(type: GGMLType, pad: int) -> None:
    room = n_shared((9, 0))
    for n_group in (1, 2, 65, 66, 67, 168, 528, 529, 1030, 15520):
        n_pair = min(66, n_group)
        spec = LinearSpec(torch.device("cpu"), type, 16 * n_group, 256)
        if linear_pair.takes(spec, pad, room):
            ring = linear_pair.ring(type, pad, n_group, n_pair, room)
            assert ring.n_bytes <= room and ring.n_slot % linear_pair.FETCHERS == 0
            assert 2 <= ring.early <= ring.n_slot >= ring.steady >= 2


def test_pairs_take_small_matrices_where_shared_memory_is_large() -> None:
    def spec(n_out: int, n_in: int) -> LinearSpec:
        return LinearSpec(torch.device("cpu"), GGMLType.Q8_0, n_out, n_in)

    assert all(linear_pair.takes(spec(12352, 2048), pad, n_shared((9, 0))) for pad in linear_pair.GROUPS)
    assert not linear_pair.takes(spec(12352, 2048), 64, n_shared((9, 0)))
    assert not linear_pair.takes(spec(34816, 5120), 8, n_shared((9, 0)))
    assert not any(
        linear_pair.takes(spec(2048, 2048), 8, n_shared(c)) for c in ((8, 0), (8, 9), (12, 0))
    )
