"""`heads` in C++: the reference, rows alone, threads, recordings; and what the op keeps of a file's types."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heads_cases import CPU, SIZES, spec_of

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.heads import cpu as heads_cpu
from pyspec.cuda.ops.heads import ref as heads_ref
from pyspec.cuda.ops.heads.op import asked, heads, kept_bytes, ways
from pyspec.cuda.ops.linear.cpu import sample
from pyspec.gguf import GGMLType, TensorInfo
from pyspec.models.weight_bytes import repacked_bytes

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("name", SIZES)
def test_products_are_the_references(name: str) -> None:
    spec = spec_of(name)
    assert heads.chosen(spec).name == "cpu"
    assert heads_ref.check(heads_cpu.bind(spec), heads_ref.bind(spec), spec) is None


def test_a_matrix_too_many_or_a_wrong_one_fails_the_check() -> None:
    spec = spec_of("tiny values")

    def wrong(data: torch.Tensor) -> heads_ref.HeadsRun:
        return heads_cpu.bind(spec)(data.view(5, -1).roll(1, 0).contiguous())

    assert "differs" in (heads_ref.check(wrong, heads_ref.bind(spec), spec) or "")


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


def test_a_recording_reads_its_rows_when_it_is_replayed() -> None:
    spec = spec_of("GLM-4.7-Flash's keys")
    run = heads_cpu.bind(spec)(sample(spec.type, 3 * 512, 192, torch.Generator().manual_seed(2)))
    both = torch.randn(4, 3, 256)
    recorded = Recorded(lambda: run(both[..., :192]), TapeMemory())
    for _ in range(2):
        both.normal_()
        assert torch.equal(recorded.replay(), run(both[..., :192]))


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
