"""Latent attention's kernels on a GPU: keys that are their values, against the reference, at DeepSeek-V3's dims."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, make, only, spec_of, worst
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.op import check as attend_check
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.rope_latent import cuda as rope_latent_cuda
from pyspec.cuda.ops.rope_latent import ref as rope_latent_ref
from pyspec.cuda.ops.rope_latent.op import check as rope_latent_check
from pyspec.cuda.ops.rope_latent.op import rope_latent
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv_types import Q4_0, Q5_1, TYPES, KvFormat

GPU = torch.device("cuda", 0)
RAGGED = [(0, 3), (255, 1), (1500, 17), (4097, 2), (9000, 1)]
CASES = {
    "128 heads": Case(128, 1, 576, torch.float16, RAGGED, 32, pad=(5, 2), n_value=512),
    "16 heads": Case(16, 1, 576, torch.float16, RAGGED, 64, pad=(5, 2), n_value=512),
    "20 heads": Case(20, 1, 576, torch.bfloat16, [(70, 16), (3000, 1)], 16, pad=(1, 1), n_value=512),
    "q8_0": Case(128, 1, 576, torch.int8, RAGGED, 32, pad=(5, 2), n_value=512),
    "f8": Case(16, 1, 576, torch.float8_e4m3fn, [(1023, 5), (40, 1)], 16, n_value=512),
    "q4_0": Case(16, 1, 576, Q4_0, [(1023, 5), (40, 1)], 16, n_value=512),
    "q5_1": Case(16, 1, 576, Q5_1, [(600, 3)], 16, n_value=512),
    "small window": Case(16, 1, 576, torch.float16, [(600, 5), (127, 2)], 16, 70, n_value=512),
    "odd size": Case(5, 1, 24, torch.float16, [(40, 3), (0, 2)], 16, pad=(1, 1), n_value=16),
    "a prompt": Case(16, 1, 576, torch.float16, [(900, 300), (77, 3)], 64, n_value=512),
    "rows of one part": Case(16, 1, 576, torch.float16, [(900, 600), (77, 3)], 64, n_value=512),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str) -> None:
    case = CASES[name]
    made, spec = make(case, GPU), spec_of(case, GPU)
    n = made.plain.n_row
    want = attend_ref.bind(spec)(made.q[:n].double(), made.pool, made.plain, case.window)
    run = latent.bind(spec)
    out = run(made.q, made.pool, made.batch, case.window)
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any()
    assert torch.equal(out, run(made.q, made.pool, made.batch, case.window))
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("name", ["128 heads", "16 heads", "20 heads", "q8_0", "small window"])
def test_a_row_has_the_same_bits_alone_and_in_any_company_and_build(name: str) -> None:
    case = CASES[name]
    made, spec = make(case, GPU, seed=1), spec_of(case, GPU)
    run = latent.bind(spec)
    out = run(made.q, made.pool, made.batch, case.window)
    for build in run.builds:
        one = latent.bind(spec, build=build)
        assert torch.equal(one(made.q, made.pool, made.batch, case.window), out), build
    for i, (_, width) in enumerate(case.seqs):
        start = made.plain.starts[i]
        for row in {0, width // 2, width - 1}:
            q, batch = only(made, i, row, 1)
            assert torch.equal(run(q, made.pool, batch, case.window)[0], out[start + row]), (i, row)


def test_a_captured_graph_serves_batches_of_other_lengths() -> None:
    case = Case(16, 1, 576, torch.float16, [(2000, 4), (1500, 4)], 16, n_value=512)
    made, spec = make(case, GPU), spec_of(case, GPU)
    run, reference = latent.bind(spec), attend_ref.bind(spec)
    b = replace(made.batch, bucket=8, hi=made.batch.hi.clone(), positions=made.batch.positions.clone())
    run(made.q, made.pool, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(made.q, made.pool, b)
    for shift in (0, -1, -700, -1499):
        b.hi.copy_(made.batch.hi + shift)
        b.positions.copy_(made.batch.positions + shift)
        graph.replay()
        plain = replace(made.plain, hi=made.plain.hi + shift, positions=made.plain.positions + shift)
        want = reference(made.q.double(), made.pool, plain)
        assert worst(out, want) < case.tolerance
    assert faults.record(GPU).tolist() == [0] * 5


def test_a_hundred_rounds_without_waiting_give_what_waiting_rounds_give() -> None:
    case, results = CASES["128 heads"], []
    made = make(case, GPU)
    for waits in (True, False):
        run, out = latent.bind(spec_of(case, GPU)), torch.zeros(len(made.q), 128, 512, device=GPU)
        for _ in range(100):
            out += run(made.q, made.pool, made.batch)
            if waits:
                torch.cuda.synchronize()
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.parametrize("n_head", [128, 16])
@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0", "q4_0"])
def test_both_ops_pass_their_checks_and_are_what_models_run_with(n_head: int, kv: str) -> None:
    form = KvFormat.named(kv)
    spec = AttendSpec(GPU, n_head, 1, 576, 192**-0.5, form, n_value=512)
    assert attend_check(latent.bind(spec), attend_ref.bind(spec), spec) is None
    roped = RopeLatentSpec(GPU, n_head, 128, 512, 64, False, 1e-6, form)
    own, other = rope_latent_cuda.bind(roped), rope_latent_ref.bind(roped)
    assert rope_latent_check(own, other, roped) is None
    if kv == "f16":
        assert attend.chosen(spec).name == rope_latent.chosen(roped).name == "cuda"


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("kv", TYPES)
def test_keys_of_every_type_are_the_references(kv: str, neox: bool) -> None:
    for sizes in ((5, 8, 24, 8), (3, 128, 40, 24), (20, 192, 512, 64)):
        spec = RopeLatentSpec(GPU, *sizes, neox, 1e-6, KvFormat.named(kv))
        own, other = rope_latent_cuda.bind(spec), rope_latent_ref.bind(spec)
        assert rope_latent_check(own, other, spec) is None
    assert not faults.record(GPU).any()
