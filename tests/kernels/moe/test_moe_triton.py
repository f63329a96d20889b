"""Experts in Triton against the reference, in the interpreter: types, activations, shared experts, hostile choices, bits in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from machines import CPU, INTERPRETED
from moe_checks import check_company, check_hostile, experts
from sampling import few

from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.linear.tiles import FORMATS
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe import triton as moe_triton
from pyspec.cuda.ops.moe.ref import ExpertsRun, MoeSpec
from pyspec.gguf import GGMLType

Q4_K, Q6_K, Q8_0, NVFP4, MXFP4 = (GGMLType[n] for n in ("Q4_K", "Q6_K", "Q8_0", "NVFP4", "MXFP4"))
SPECS = {
    "gated, a piece": MoeSpec(CPU, 2, 160, 96, "swiglu", Q8_0, Q8_0, pieces=1),
    "four bits, six": MoeSpec(CPU, 2, 256, 256, "swiglu", Q4_K, Q6_K),
    "squares, two pieces, scaled": MoeSpec(CPU, 2, 128, 64, "relu2", NVFP4, NVFP4, scaled=True, pieces=2),
    "cut gates": MoeSpec(CPU, 3, 96, 64, "swiglu", MXFP4, Q8_0, limit=7.0),
    "biases, gates of gpt-oss": MoeSpec(CPU, 2, 96, 64, "swiglu_oai", MXFP4, MXFP4, limit=7.0, biased=True),
    "gates of kimi-k3": MoeSpec(CPU, 2, 96, 64, "situ", MXFP4, Q8_0, betas=(1.5, 2.0)),
    "biases, tanh": MoeSpec(CPU, 2, 64, 96, "geglu", Q8_0, Q8_0, biased=True),
    "biases, squares": MoeSpec(CPU, 2, 64, 96, "relu2", Q8_0, Q8_0, biased=True),
    "lattices": MoeSpec(CPU, 2, 256, 256, "swiglu", GGMLType.IQ2_XXS, GGMLType.IQ3_XXS),
    "five bits, half a pair": MoeSpec(CPU, 2, 96, 160, "swiglu", GGMLType.Q5_1, GGMLType.Q5_0),
    "one of each row": MoeSpec(CPU, 1, 128, 32, "relu2", Q8_0, MXFP4),
}  # fmt: skip
KEPT = ("biases, gates of gpt-oss",)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few columns are split, and few rows are many."""
    monkeypatch.setattr(moe_triton, "LEAST", 1)
    monkeypatch.setattr(moe_triton, "FEW", 12)
    monkeypatch.setattr(moe_triton, "MORE", 20)


@pytest.mark.parametrize("name", few(SPECS, *KEPT))
def test_experts_are_the_references(name: str) -> None:
    spec = SPECS[name]
    assert limits_of(moe_triton)(spec) is not None, "on a CPU only in the interpreter"
    assert moe_check.check(moe_triton.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9, 13)) is None


OTHERS = [
    t for t in FORMATS if t in moe_cuda.CHUNKS and all(t not in (s.up, s.down) for s in SPECS.values())
]
"""Types that no spec above has: an interpreter takes half a minute for each."""


@pytest.mark.slow
@pytest.mark.parametrize("type", OTHERS, ids=lambda t: t.name)
def test_every_type_is_the_references(type: GGMLType) -> None:
    spec = MoeSpec(CPU, 2, 512, 256, "swiglu", type, type)
    assert moe_check.check(moe_triton.bind(spec), moe_ref.bind(spec), spec, n_rows=(2, 5)) is None


@pytest.mark.parametrize("name", few(SPECS, "one of each row"))
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str) -> None:
    spec = SPECS[name]
    run = experts(INTERPRETED, moe_triton.bind, spec, 6)
    assert isinstance(run, moe_triton.ExpertsTriton) and max(run.inner.n_split, run.down.n_split) > 1
    parts = slice(0, 1), slice(19, 21), slice(3, 9), slice(0, 12), slice(4, 18)
    check_company(INTERPRETED, run, spec, 30, 6, 18, parts)


def test_rows_that_are_no_numbers_and_experts_that_are_none_harm_nobody() -> None:
    spec = replace(SPECS["one of each row"], n_used=2)
    run = experts(INTERPRETED, moe_triton.bind, spec, 4)
    check_hostile(INTERPRETED, run, spec, 14, 4, 14, (1, 2, 9, 14))
    x, ids = torch.randn(0, spec.n_in), torch.zeros(0, 2, dtype=torch.int32)
    assert run(x, ids, torch.zeros(0, 2)).shape == (0, spec.n_in)


@pytest.mark.slow
def test_a_wrong_scale_is_noticed() -> None:
    """Or the checks above could not fail."""
    spec = SPECS["squares, two pieces, scaled"]

    def wrong(stacks: moe_ref.Stacks) -> ExpertsRun:
        made = moe_triton.ExpertsTriton(spec, stacks)
        made.down_factors *= 1.01
        return made

    assert "differ" in (moe_check.check(wrong, moe_ref.bind(spec), spec, n_rows=(1,)) or "")


def test_what_it_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = SPECS["four bits, six"]
    assert moe_triton.limits(spec) is None
    assert "of one type" in (moe_triton.limits(replace(spec, up=None)) or "")
    assert "F16" in (moe_triton.limits(replace(spec, up=GGMLType.F16)) or "")
    assert moe_triton.limits(replace(spec, up=GGMLType.IQ2_XXS, down=GGMLType.IQ3_XXS)) is None
    assert "multiples of 32" in (moe_triton.limits(replace(spec, n_in=272)) or "")
    assert "pieces" in (moe_triton.limits(replace(spec, pieces=9)) or "")
    assert "with biases" in (moe_triton.limits(replace(spec, pieces=1, biased=True)) or "")
    assert "2000" in (moe_triton.limits(replace(spec, n_expert=2000)) or "")
