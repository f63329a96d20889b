"""The kernels of experts compile for every architecture, without a GPU, without spills, within shared memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from machines import compiled
from sampling import few

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.linear.cuda import n_shared
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.moe import builds as moe_builds
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.builds import (
    BUILDS,
    FEW_PAIRS,
    GROUPS,
    MANY_PAIRS,
    NONE,
    OAI,
    PARTS,
    RELU2,
    SITU,
    SPLIT_RESIDENT,
    SWIGLU,
    MoeBuild,
    n_stages,
    residents,
    splits,
    stage_bytes,
)
from pyspec.cuda.ops.moe.ref import RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.gguf import GGMLType

CAPABILITIES = dict(zip(ARCHS, [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], strict=True))
CPU = torch.device("cpu")


def compiles(
    type: GGMLType, arch: str, pairs: int, act: int, inner: bool, listed: bool = True, adds: bool = False
) -> None:
    stages = n_stages(type, pairs, CAPABILITIES[arch], inner)
    assert stages >= 2 and stages * stage_bytes(type, pairs, inner) <= n_shared(CAPABILITIES[arch])
    fewer = bool(moe_builds.planes_of(type, inner)) and arch not in ("sm_90a", "sm_100a")
    nexts = (type, GGMLType.Q6_K if type is GGMLType.Q4_K else GGMLType.Q4_K) if inner else (None,)
    for next, n in product(nexts, residents(type, pairs, listed, inner)):
        macros = MoeBuild(type, pairs, stages, act, inner, listed, adds, next, n).defines()
        found = compiled("moe", arch, macros)["moe"]
        assert found.registers * 32 * GROUPS * (n - fewer) <= 65536, (next, n)


@pytest.mark.slow
@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(("pairs", "listed"), BUILDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_products_compile_for_every_architecture(arch: str, pairs: int, listed: bool) -> None:
    compiles(GGMLType.Q4_K, arch, pairs, SWIGLU, True, listed)
    compiles(GGMLType.Q6_K, arch, pairs, NONE, False, listed)


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", few(CHUNKS, GGMLType.Q8_0, GGMLType.NVFP4))
def test_products_compile_for_every_type(type: GGMLType) -> None:
    compiles(type, "sm_90a", MANY_PAIRS, RELU2, True)
    for arch in ("sm_89", "sm_90a"):
        for adds in (False, True):
            compiles(type, arch, FEW_PAIRS, NONE, False, listed=False, adds=adds)
    compiles(type, "sm_90a", FEW_PAIRS, NONE, False)
    compiles(type, "sm_90a", FEW_PAIRS, SWIGLU, True)


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_parts_of_columns_with_warps_of_their_own_compile_for_every_architecture(arch: str) -> None:
    for type, act, next, adds in (
        (GGMLType.IQ2_XXS, SWIGLU, GGMLType.Q2_K, False),
        (GGMLType.Q2_K, NONE, None, True),
    ):
        inner = next is not None
        stages = n_stages(type, FEW_PAIRS, CAPABILITIES[arch], inner)
        assert splits(type, FEW_PAIRS, False, inner) and not splits(type, FEW_PAIRS, True, inner)
        build = MoeBuild(
            type, FEW_PAIRS, stages, act, inner, False, adds, next, 0, 10.0 if inner else 0.0, True
        )
        found = compiled("moe", arch, build.defines())["moe"]
        fewer = arch not in ("sm_90a", "sm_100a")
        assert found.spill_bytes == 0
        assert found.registers * PARTS * 32 * GROUPS * (SPLIT_RESIDENT - fewer) <= 65536
        assert PARTS * stages * stage_bytes(type, FEW_PAIRS, inner) <= n_shared(CAPABILITIES[arch])


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_lists_and_routes_compile_for_every_architecture(arch: str) -> None:
    found = compiled("moe_pairs", arch)
    assert found["moe_lists"].spill_bytes == found["moe_combine"].spill_bytes == 0
    for spec in (
        RouteSpec(CPU, 2048, 256, 8, gated=True),
        RouteSpec(CPU, 4096, 512, 22, "sigmoid", scale=5.0, biased=True),
        RouteSpec(CPU, 3072, 128, 8),
        RouteSpec(CPU, 4096, 256, 6, "sqrtsoftplus", scale=1.5, biased=True),
        RouteSpec(CPU, 7168, 384, 6, "sqrtsoftplus", scale=2.5, given=True),
        RouteSpec(CPU, 64, 512, 32, "softmax", False, biased=True),
        RouteSpec(CPU, 2880, 32, 4, "chosen", False, shifted=True),
        RouteSpec(CPU, 7168, 256, 8, "sigmoid", scale=2.5, biased=True, n_group=8, n_group_used=4),
        RouteSpec(CPU, 64, 300, 22, "softmax", n_group=3, n_group_used=2),
        RouteSpec(CPU, 2816, 128, 8, factored=True),
        RouteSpec(CPU, 64, 512, 32, "sigmoid", biased=True, n_group=512, n_group_used=33),
    ):
        found = compiled("moe_route", arch, moe_route_cuda.defines(spec))
        assert found["moe_scores"].spill_bytes == found["moe_choose"].spill_bytes == 0
        assert found["moe_scores"].registers <= 128 and found["moe_choose"].registers <= 40


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_activations_that_are_cut_compile_for_every_architecture(arch: str) -> None:
    """MXFP4, in every build of gates and ups: DeepSeek's, and gpt-oss's with biases."""
    type = GGMLType.MXFP4
    stages = [n_stages(type, pairs, CAPABILITIES[arch], True) for pairs, _ in BUILDS]
    for (pairs, listed), n_stage in zip(BUILDS, stages, strict=True):
        for n in residents(type, pairs, listed, True):
            for act, biased, cut in (
                (SWIGLU, False, 10.0),
                (OAI, True, 10.0),
                (SITU, False, (4.0, 25.0)),
            ):
                of = pairs, n_stage, act, True, listed, False, type, n, cut, False, biased
                build = MoeBuild(type, *of)
                found = compiled("moe", arch, build.defines())["moe"]
                assert found.registers * 32 * GROUPS * n <= 65536


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_downs_with_biases_compile_for_every_architecture(arch: str) -> None:
    type = GGMLType.MXFP4
    for pairs, listed, adds in (*((*build, False) for build in BUILDS), (*BUILDS[0], True)):
        n_stage = n_stages(type, pairs, CAPABILITIES[arch], False)
        for n in residents(type, pairs, listed, False):
            of = pairs, n_stage, NONE, False, listed, adds, None, n, 0.0, False, True
            found = compiled("moe", arch, MoeBuild(type, *of).defines())["moe"]
            assert found.registers * 32 * GROUPS * n <= 65536


def test_what_does_not_fit_is_known_before_compiling() -> None:
    assert all(n_stages(type, MANY_PAIRS, (8, 9)) >= 2 for type in CHUNKS)
    assert (
        limits_of(moe_cuda)(moe_cuda.MoeSpec(CPU, 8, 64, 64, "swiglu", None, None))
        == "runs on NVIDIA GPUs only"
    )


@pytest.mark.parametrize("pairs", [FEW_PAIRS, MANY_PAIRS])
def test_stages_leave_room_for_as_many_ctas_as_registers(pairs: int) -> None:
    """On a GPU with 228 KB a multiprocessor, of which each CTA costs 1 KB and its static variables more."""
    for type in CHUNKS:
        for inner in (True, False):
            stages = n_stages(type, pairs, (9, 0), inner)
            assert 2 <= stages <= 8
            n_cta = 228 * 1024 // (stages * stage_bytes(type, pairs, inner) + 1024 + 512)
            assert n_cta >= max(residents(type, pairs, True, inner)), (type, inner)


def test_few_last_ctas_are_avoided() -> None:
    """H200's multiprocessors, 122B's gates by rows: one's all run at once, three's with seven on each; of four the last would be few."""
    jobs = {n: 32 * (moe_builds.n_taken(256, 8, n) + -(-n // 4)) for n in (1, 2, 3, 4, 8, 24)}
    few, listed = (residents(GGMLType.Q4_K, FEW_PAIRS, n, True) for n in (False, True))
    assert (few, listed) == ((4, 5), (5, 7))
    assert [moe_builds.n_resident(jobs[n], few, 132) for n in (1, 2)] == [4, 5]
    assert [moe_builds.n_resident(jobs[n], listed, 132) for n in (3, 4, 8, 24)] == [7, 5, 5, 7]
    assert moe_builds.n_resident(5.0, (4,), 132) == 4


def test_experts_that_rows_take_are_counted_as_if_all_were_as_likely() -> None:
    ids = torch.rand(400, 6, 40).argsort(-1)[..., :3].flatten(1)
    mean = sum(len(draw.unique()) for draw in ids) / 400
    assert abs(moe_builds.n_taken(40, 3, 6) - mean) < 0.5 and moe_builds.n_taken(
        40, 3, 1
    ) == pytest.approx(3)
    for n_expert in (1, 2, 3, 7):  # a prompt's last few experts that come from host memory
        assert moe_builds.n_taken(n_expert, 8, 2048) == n_expert
