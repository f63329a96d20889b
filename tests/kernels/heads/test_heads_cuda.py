"""heads.cu, thread by thread on the CPU and on a card: matrices of every type, odd sizes, numbers beyond f16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heads_cases import SIZES, spec_of
from machines import CPU, ON_CARD, Machine, cases

from pyspec.cuda.ops.heads import cuda as heads_cuda
from pyspec.cuda.ops.heads import ref as heads_ref
from pyspec.cuda.ops.heads.op import heads, shapes
from pyspec.cuda.ops.linear.cpu import sample
from pyspec.gguf import GGMLType

pytestmark = pytest.mark.sampled(1)
GPU = torch.device("cuda", 0)


@pytest.mark.sampled(most=3)
@cases(
    "spec",
    emulated=[pytest.param(spec_of(name), id=name) for name in SIZES],
    card=[*map(spec_of, SIZES), *shapes(CPU)],
)
def test_products_are_the_references(machine: Machine, spec: heads_ref.HeadsSpec) -> None:
    spec = replace(spec, device=machine.device)
    assert heads_cuda.limits(replace(spec, device=GPU)) is None
    with machine.started(seed=spec.n_in):
        assert heads_ref.check(heads_cuda.bind(spec), heads_ref.bind(spec), spec) is None


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.BF16])
def test_numbers_far_beyond_f16_and_close_to_f32s_last_bits(machine: Machine, type: GGMLType) -> None:
    """Weights of 1e-30 with rows of 1e30, and sums that cancel to a part in 10,000."""
    spec = heads_ref.HeadsSpec(CPU, type, 2, 16, 64)
    gen = torch.Generator().manual_seed(3)
    half = torch.randn(2, 16, 32, generator=gen) * torch.tensor([1e-30, 1.0])[:, None, None]
    weight = torch.cat((half, half), -1).to(torch.float32 if type is GGMLType.F32 else torch.bfloat16)
    x = torch.randn(3, 2, 64, generator=gen) * torch.tensor([1e30, 1.0])[:, None]
    x[1, :, 32:] = -x[1, :, :32] * (1 + 1e-4)
    want = torch.einsum("nhi,hoi->nho", x.double(), weight.double())
    size = torch.einsum("nhi,hoi->nho", x.double().abs(), weight.double().abs())
    with machine.started():
        got = heads_cuda.bind(spec)(weight.view(torch.uint8))(x)
    assert float(((got - want).abs() / size).max()) < 2e-6


def test_a_head_that_is_no_number_harms_no_other(machine: Machine) -> None:
    spec = heads_ref.HeadsSpec(CPU, GGMLType.F16, 3, 16, 32)
    gen = torch.Generator().manual_seed(4)
    data = torch.randn(3, 16, 32, generator=gen).half().view(torch.uint8)
    x = torch.randn(9, 3, 32, generator=gen)
    with machine.started():
        run = heads_cuda.bind(spec)(data)
        clean, x[4, 1, 7], x[5, 2, 0] = run(x), torch.nan, torch.inf
        got = run(x)
        assert run(x[:0]).shape == (0, 3, 16)
    bad = torch.zeros(9, 3, dtype=torch.bool)
    bad[4, 1] = bad[5, 2] = True
    assert torch.equal(got[~bad], clean[~bad]) and not got[bad].isfinite().any()


def test_what_it_does_not_take_is_said(machine: Machine) -> None:
    spec = replace(spec_of("DeepSeek-V3's keys"), device=GPU)
    assert heads_cuda.limits(spec) is None and heads_cuda.warps_of(spec) == 2
    assert "IQ2_XXS" in (heads_cuda.limits(replace(spec, type=GGMLType.IQ2_XXS)) or "")
    assert "whole blocks" in (heads_cuda.limits(replace(spec, type=GGMLType.Q4_K)) or "")
    assert "of 16 bytes" in (heads_cuda.limits(replace(spec, n_out=19)) or "")
    wide = replace(spec, type=GGMLType.F32, n_in=1024)
    assert "4096 bytes" in (heads_cuda.limits(wide) or "")
    assert heads_cuda.limits(replace(wide, n_in=768)) is None and heads_cuda.warps_of(wide) == 1
    pitches = {n: heads_cuda.pitch_of(replace(wide, n_in=n)) for n in (16, 20, 512, 752, 768)}
    assert pitches == {16: 80, 20: 80, 512: 2064, 752: 3024, 768: 3072}


@ON_CARD
def test_a_captured_graph_reads_its_rows_anew(machine: Machine) -> None:
    spec = next(iter(shapes(machine.device)))
    assert heads.chosen(spec).name == "cuda"
    gen = torch.Generator().manual_seed(1)
    run = heads.bind(spec)(
        sample(spec.type, spec.n_head * spec.n_out, spec.n_in, gen).to(machine.device)
    )
    x = torch.randn(17, spec.n_head, 192, device=machine.device)
    replay, out = machine.captured(lambda: run(x[..., : spec.n_in]))
    for _ in range(3):
        x.normal_()
        replay()
        assert torch.equal(out, run(x[..., : spec.n_in]))
