"""Experts on a GPU: right for every type that their files have, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machines import CARD, GPU
from moe_checks import check_company, check_hostile, experts

from pyspec.cuda import tri
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe import triton as moe_triton
from pyspec.cuda.ops.moe.ref import MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.moe_route import triton as moe_route_triton
from pyspec.gguf import GGMLType

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Q4_K, Q6_K, Q8_0, NVFP4, MXFP4 = (GGMLType[n] for n in ("Q4_K", "Q6_K", "Q8_0", "NVFP4", "MXFP4"))
SPECS = {
    "whole numbers": MoeSpec(GPU, 8, 768, 512, "swiglu", Q4_K, Q4_K, pieces=1),
    "whole numbers, then f16": MoeSpec(GPU, 3, 512, 256, "swiglu", Q4_K, Q6_K, pieces=1),
    "f16, then whole numbers": MoeSpec(GPU, 2, 320, 256, "relu2", Q8_0, Q4_K),
    "an odd chunk, a lower tile": MoeSpec(GPU, 5, 1280, 768, "relu2", Q4_K, Q4_K),
    "levels, then halves": MoeSpec(
        GPU, 6, 1280, 512, "swiglu", GGMLType.IQ2_XXS, GGMLType.Q2_K, limit=10.0
    ),
    "f16, then levels": MoeSpec(GPU, 3, 512, 768, "relu2", GGMLType.Q2_K, GGMLType.IQ2_XXS, pieces=1),
    "gpt-oss": MoeSpec(GPU, 4, 2880, 2880, "swiglu_oai", MXFP4, MXFP4, limit=7.0, biased=True),
    "biases, tanh, whole numbers": MoeSpec(GPU, 3, 512, 256, "geglu", Q4_K, Q4_K, biased=True),
    "scaled": MoeSpec(GPU, 4, 320, 192, "relu2", NVFP4, NVFP4, scaled=True, pieces=2),
}


@pytest.mark.parametrize("name", SPECS)
def test_experts_are_the_references_and_a_row_has_the_same_bits_alone(name: str) -> None:
    spec = SPECS[name]
    assert moe_cuda.limits(spec) is None
    assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec) is None
    run = experts(CARD, moe_cuda.bind, spec, 3 * spec.n_used)
    parts = slice(0, 1), slice(41, 43), slice(3, 6), slice(0, 8), slice(10, 34), slice(5, 64)
    check_company(CARD, run, spec, 70, 3 * spec.n_used, 40, parts)


V3 = RouteSpec(GPU, 7168, 256, 8, "sigmoid", scale=2.5, biased=True, n_group=8, n_group_used=4)
ROUTES = {
    "DeepSeek-V3": V3,
    "groups over two warps": replace(V3, n_in=256, n_expert=60, n_group=5, n_group_used=2),
    "groups of more than a warp": replace(V3, n_expert=300, n_group=3, n_group_used=2, biased=False),
    "gpt-oss-20b": RouteSpec(GPU, 2880, 32, 4, "chosen", False, shifted=True, eps=1e-5),
    "gemma-4-26b-a4b": RouteSpec(GPU, 2816, 128, 8, factored=True),
    "gpt-oss-120b": RouteSpec(GPU, 2880, 128, 4, "chosen", False, shifted=True, eps=1e-5),
}


@pytest.mark.parametrize("name", ROUTES)
def test_routers_with_biases_and_groups_are_the_references(name: str) -> None:
    spec = ROUTES[name]
    for impl in (moe_route_cuda, moe_route_triton):
        if impl is moe_route_triton and tri.missing(GPU) is not None:
            continue
        assert impl.limits(spec) is None
        assert moe_route_cuda.check(impl.bind(spec), moe_ref.bind_route(spec), spec) is None


@pytest.mark.parametrize("name", ["gpt-oss", "biases, tanh, whole numbers"])
def test_experts_with_biases_in_triton_are_the_references(name: str) -> None:
    if (why := tri.missing(GPU)) is not None:
        pytest.skip(why)
    spec = SPECS[name]
    assert moe_triton.limits(spec) is None
    assert moe_check.check(moe_triton.bind(spec), moe_ref.bind(spec), spec) is None


def test_rows_that_are_no_numbers_and_experts_that_are_none_harm_nobody() -> None:
    spec = SPECS["whole numbers"]
    check_hostile(CARD, experts(CARD, moe_cuda.bind, spec, 9), spec, 70, 9, 40, (6, 8, 70))
