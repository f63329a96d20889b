"""`heads`: in C++, and heads.cu on every machine and for every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heads_cases import SIZES, spec_of
from machines import CPU, ON_CARD, Machine, cases, compiled

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda import jit
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.heads import cpu as heads_cpu
from pyspec.cuda.ops.heads import cuda as heads_cuda
from pyspec.cuda.ops.heads import ref as heads_ref
from pyspec.cuda.ops.heads.op import asked, heads, kept_bytes, shapes, ways
from pyspec.cuda.ops.linear.cpu import sample
from pyspec.gguf import GGMLType, TensorInfo
from pyspec.models.weight_bytes import repacked_bytes

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", SIZES)
def test_products_in_cpp_are_the_references(name: str) -> None:
    spec = spec_of(name)
    assert heads.chosen(spec).name == "cpu"
    assert heads_ref.check(heads_cpu.bind(spec), heads_ref.bind(spec), spec) is None


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
def test_a_matrix_too_many_or_a_wrong_one_fails_the_check() -> None:
    spec = spec_of("tiny values")

    def wrong(data: torch.Tensor) -> heads_ref.HeadsRun:
        return heads_cpu.bind(spec)(data.view(5, -1).roll(1, 0).contiguous())

    assert "differs" in (heads_ref.check(wrong, heads_ref.bind(spec), spec) or "")


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
def test_rows_have_the_same_bits_in_pieces_and_with_any_threads() -> None:
    """More heads of rows than lie between the loops at once."""
    spec, before = heads_ref.HeadsSpec(CPU, GGMLType.Q8_0, 130, 24, 32), torch.get_num_threads()
    gen = torch.Generator().manual_seed(2)
    run = heads_cpu.bind(spec)(sample(spec.type, 130 * 24, 32, gen))
    x = torch.randn(67, 130, 32, generator=gen)
    whole = run(x)
    for n_thread in (1, 3):
        torch.set_num_threads(n_thread)
        assert torch.equal(run(x[30:35]), whole[30:35]) and torch.equal(run(x), whole)
    torch.set_num_threads(before)


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
def test_a_recording_reads_its_rows_when_it_is_replayed() -> None:
    spec = spec_of("GLM-4.7-Flash's keys")
    run = heads_cpu.bind(spec)(sample(spec.type, 3 * 512, 192, torch.Generator().manual_seed(2)))
    both = torch.randn(4, 3, 256)
    recorded = Recorded(lambda: run(both[..., :192]), TapeMemory())
    for _ in range(2):
        both.normal_()
        assert torch.equal(recorded.replay(), run(both[..., :192]))


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
def test_gpus_keep_the_files_type_or_f16() -> None:
    spec = replace(spec_of("DeepSeek-V3's keys"), device=torch.device("cuda", 0))
    rare = replace(spec, type=GGMLType.IQ3_XXS, n_in=256)
    assert [way.type for way in ways(spec)] == [GGMLType.Q8_0, GGMLType.F16]
    assert asked(spec).type is GGMLType.Q8_0 and asked(rare).type is GGMLType.F16
    assert ways(replace(spec, type=GGMLType.BF16)) == [replace(spec, type=GGMLType.BF16)]
    assert ways(replace(rare, device=CPU)) == [replace(rare, device=CPU)]
    own = TensorInfo("k_b", GGMLType.Q8_0, (128, 512, 128), 0, 128 * 512 * 128 * 34 // 32, 0)
    assert kept_bytes(own) == own.n_bytes == repacked_bytes(replace(own, name="blk.3.attn_k_b.weight"))
    with within(KernelContext(tiers=(("", "triton"),))):
        assert kept_bytes(own) == 2 * 8_388_608


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(1)
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


SPECS = [*shapes(torch.device("cuda")), *map(spec_of, SIZES)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_every_type_compiles_without_spills(arch: str) -> None:
    for spec in SPECS:
        made = compiled("heads", arch, heads_cuda.FILE.defines(spec))
        assert set(made) == {"heads_1", "heads_2", "heads_4"}
        assert all(r.registers <= 128 for r in made.values()), (spec, made)
