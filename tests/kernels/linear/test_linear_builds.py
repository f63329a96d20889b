"""linear.cu, linear_sm90.cu and linear_pair.cu for every architecture; the reference: epilogues, rounding, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from machines import CPU
from sampling import few
from torch import Tensor

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear.cuda import defines, fitting, n_shared, n_stages, stage_bytes, stem
from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.op import linear
from pyspec.cuda.ops.linear.pack import Packed, interleave, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import (
    PADS,
    blocks_for_wgmma,
    shared_bytes,
    stages,
)
from pyspec.cuda.ops.linear.wgmma import (
    defines as wgmma_defines,
)
from pyspec.gguf import GGMLType


def test_interleaved_gate_and_up_give_the_gated_product() -> None:
    gate, up = (quantize(torch.randn(24, 64), GGMLType.Q8_0) for _ in "gu")
    packed, x = repack(interleave(gate, up), GGMLType.Q8_0, (48, 64)), torch.randn(3, 64)
    out = torch.full((3, 24), torch.nan)
    linear_ref.bind(LinearSpec(CPU, GGMLType.Q8_0, 24, 64, Epilogue.GATED))(x, packed, out)
    g, u = (F.linear(x, dequantize(w, GGMLType.Q8_0, (24, 64))) for w in (gate, up))
    assert torch.allclose(out, F.silu(g) * u, rtol=1e-5, atol=1e-5)


def test_the_residual_may_be_the_output() -> None:
    raw = quantize(torch.randn(20, 32), GGMLType.Q4_0)
    packed, x, out = repack(raw, GGMLType.Q4_0, (20, 32)), torch.randn(2, 32), torch.ones(2, 20)
    linear_ref.bind(LinearSpec(CPU, GGMLType.Q4_0, 20, 32, Epilogue.RESIDUAL))(x, packed, out, out)
    assert torch.allclose(out, 1 + F.linear(x, dequantize(raw, GGMLType.Q4_0, (20, 32))), atol=1e-5)


def test_rounded_rows_are_off_by_at_most_one_part_in_2048() -> None:
    x = torch.randn(6, 1024) * torch.tensor([0.0, 1e-33, 1e-6, 1.0, 1e9, 1e37])[:, None]
    off = (linear_ref.rounded(x) - x.double()).abs()
    assert (off <= x.abs().double() * 2.0**-11 + x.abs().amax(1, keepdim=True).double() * 2.0**-24).all()
    assert float(off[3].norm() / x[3].double().norm()) < 2.5e-4


def test_the_cpu_runs_the_reference_and_says_why() -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 20, 32)
    assert dict(linear.choices(spec)) == {
        "cuda": "runs on NVIDIA GPUs only",
        "triton": "runs on GPUs only",
        "torch": None,
    }


def test_shapes_for_more_rows_follow_each_other_up_to_the_limit() -> None:
    rows = [shape.rows for shape in linear_cuda.SHAPES]
    assert rows == sorted(rows) and rows[-1] == linear_cuda.MAX_ROWS
    assert all(shape.warps_m * shape.tiles_m == 16 for shape in linear_cuda.SHAPES)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_in", [4096, 7168])
def test_the_check_of_cut_activations_takes_f16_weights_and_sees_a_limit_that_is_none(n_in: int) -> None:
    """Clamped products are always right: if most were clamped, the rounding of the others would seem larger than it is."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, 272, n_in, Epilogue.GATED, 10.0)

    def wgmma(limit: float) -> linear_ref.Linear:
        def run(x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
            y = linear_ref.rounded(x) @ unpack(packed).half().double().T
            out.copy_(linear_ref.finish(y, spec.epilogue, residual, limit))

        return run

    assert linear_cuda.check(wgmma(10.0), linear_ref.bind(spec), spec, n_rows=(40,)) is None
    for wrong in (0.0, 11.0):
        assert "differ" in str(
            linear_cuda.check(wgmma(wrong), linear_ref.bind(spec), spec, n_rows=(40,))
        )


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


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize("pad", PADS)
def test_every_type_and_size_fits_a_multiprocessor(type: GGMLType, pad: int) -> None:
    """640 threads start with 96 registers each; the computing ones then take more, and few may spill in the epilogue."""
    assert min(stages(type, pad)) >= 2
    epilogue = Epilogue(pad // 32 % 3)
    code = compile_cubin("linear_wgmma", "sm_90a", wgmma_defines(type, pad, epilogue), use_cache=False)
    found = code.resources["linear_wgmma"]
    assert found.registers * 640 <= 65536 and found.spill_bytes <= 512
    assert shared_bytes(type, pad) + found.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("n_row", [1, 33, 64])
def test_rows_lie_where_the_text_says(n_row: int) -> None:
    n_in, pad = 320, 64
    x = torch.randn(n_row, n_in).half()
    blocks = blocks_for_wgmma(x, pad)
    want = torch.zeros(512 // 64 * pad * 64, dtype=torch.float16)
    for block in range(n_in // 64):
        for place in range(64):
            s, h, t, e = place // 16, place // 8 % 2, place // 2 % 4, place % 2
            for n in range(n_row):
                at = (block * pad + n) * 64 + ((place // 8) ^ (n % 8)) * 8 + place % 8
                want[at] = x[n, block * 64 + 16 * s + 4 * t + 2 * h + e]
    assert torch.equal(blocks, want)
