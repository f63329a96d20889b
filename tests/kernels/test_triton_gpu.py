"""The tier in Triton on a GPU: every op against its reference in models' shapes, bits in company, graphs, faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from attend_cases import CASES, MIXED
from attend_checks import (
    check_company,
    check_graph,
    check_large_pool,
    check_rows,
    check_wild_page,
)
from machines import CARD, GPU, same
from moe_checks import check_company as experts_in_company
from moe_checks import check_hostile, experts
from recurrent_cases import Op, gdn_shape, kept, played, seq, verified

from pyspec.cuda import faults, survey, tri
from pyspec.cuda.op import limits_of, listed_ops
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.cases import Case
from pyspec.cuda.ops.heads.triton import DTYPES
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe import triton as moe_triton
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.gguf import GGMLType
from pyspec.slots.kv_types import PLAIN, KvFormat

OPS = (
    "linear",
    "moe",
    "moe_route",
    "attend",
    "gdn",
    "mamba2",
    "rope_kv",
    "rope_latent",
    "heads",
    "rows",
    "norms",
    "best",
    "ahead",
)
FAR = Case(
    24, 4, 256, torch.float16, [(17000, 7), (16380, 3), (300, 1), (16500, 1)], 64
)  # both sizes of splits
pytestmark = pytest.mark.skipif(tri.missing(GPU) is not None, reason=tri.missing(GPU) or "")


def triton_of(op: str) -> Any:
    return import_module(f"pyspec.cuda.ops.{op}.triton")


def asks() -> Iterator[Any]:
    for op, spec in survey.standard(GPU) if torch.cuda.is_available() else ():
        kv = getattr(spec, "kv", PLAIN)
        is_packed = isinstance(kv, KvFormat) and (kv.k.is_packed or kv.v.is_packed)  # CUDA's alone
        if op.name in OPS and not is_packed and (op.name != "heads" or spec.type in DTYPES):
            yield pytest.param(op, spec, id=f"{op.name} {survey.shape_of(spec)}")


@pytest.mark.parametrize("op, spec", asks())
def test_an_op_in_a_models_shape_passes_the_check_it_is_chosen_by(op: Any, spec: Any) -> None:
    module = triton_of(op.name)
    assert limits_of(module)(spec) is None
    assert op.check(module.bind(spec), op.reference.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("name", [*CASES, *MIXED, "far"])
def test_rows_are_the_references_and_have_the_same_bits_alone(name: str) -> None:
    case = {**CASES, **MIXED}.get(name, FAR)
    check_rows(CARD, attend_triton.bind, case)
    far = attend_triton.FAR  # from there on splits are larger
    check_company(CARD, attend_triton.bind, case, 0, lambda past, n: past + n <= far or past > far)


def test_keys_and_values_of_two_types_are_kept_and_read_in_cuda() -> None:
    """And the kernels pass their checks. Keys that are the values have one type."""
    for k, v in (("q8_0", "f16"), ("bf16", "f8_e4m3"), ("q5_1", "q4_0")):
        kv = KvFormat.named(k, v)
        for op, spec in survey.standard(GPU):
            if op.name in ("attend", "rope_kv") and spec.kv == PLAIN and not getattr(spec, "n_value", 0):
                assert op.chosen(replace(spec, kv=kv)).name == "cuda"
    assert faults.record(GPU).tolist() == [0] * 5


def test_a_captured_graph_serves_batches_of_other_lengths() -> None:
    case = Case(24, 4, 256, torch.float16, [(2000, 4), (1500, 4)], 16)
    check_graph(CARD, attend_triton.bind, case, (0, -1, -700, -1499), bucket=8)


def test_pools_beyond_two_gigarows_of_bytes_are_addressed() -> None:
    check_large_pool(CARD, attend_triton.bind)


def test_a_page_out_of_the_pool_is_reported_and_harms_no_other_sequence() -> None:
    check_wild_page(CARD, attend_triton.bind, attend_triton.GUARD.number, CASES["ragged"], 4, 3, 1 << 33)


RECURRENT = {
    "gdn": Op(gdn_shape(16, 48), GPU, triton_of("gdn")),
    "mamba2": Op(
        Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4), GPU, triton_of("mamba2")
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_states_and_outputs_have_the_same_bits_however_tokens_came(name: str) -> None:
    plans = (
        kept(*[1] * 40),
        kept(40),
        verified([8] * 5),
        [*kept(17), *verified([5, 7]), *kept(11)],
    )
    assert same(*(played(RECURRENT[name], plan, 40, 8, folds=True) for plan in plans))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_captured_graph_runs_other_sequences_of_the_same_count(name: str) -> None:
    op = RECURRENT[name]
    run, rows, w, captured, eager = op.bind(), op.rows(8), op.weights(), op.layer(), op.layer()
    batches = [
        op.laid(seqs) for seqs in ([seq(0, 5), seq(2, 3)], [seq(3, 2, fold=4), seq(0, 6, fold=2)])
    ]
    names = ("seq_slot", "seq_start", "seq_fold", "seq_keep")
    fields = {name: getattr(batches[0], name).clone() for name in names}
    own = replace(batches[0], **fields, bucket=8)
    replay, out = CARD.captured(
        lambda: run(*rows, *w, captured, own), lambda: run(*rows, *w, op.layer(), own)
    )
    for batch in batches:
        for key, field in fields.items():
            field.copy_(getattr(batch, key))
        replay()
        want = run(*rows, *w, eager, batch)
        CARD.waited()
        assert torch.equal(out, want)
    assert same(captured.tensors(), eager.tensors())


def test_graphs_hold_what_follows_a_verify() -> None:
    batch, _, _ = ahead_cuda.verify((3, 5), GPU, torch.Generator().manual_seed(1))
    logits = torch.randn(batch.tokens.shape[0], 40_000, device=GPU)
    best, ahead = triton_of("best").bind(_spec("best")), triton_of("ahead").bind(_spec("ahead"))

    def both() -> tuple[torch.Tensor, Any]:
        pairs = best.pairs(logits)
        return pairs, ahead.accept(pairs, batch)

    replay, (pairs, kept) = CARD.captured(both)
    for seed in (2, 3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        logits[torch.arange(7), batch.tokens[1:8]] += 50.0 * (torch.arange(7, device=GPU) < 4)
        replay()
        CARD.waited()
        assert torch.equal(pairs[0].long(), logits.argmax(-1))
        other = (
            next(op for op in listed_ops() if op.name == "ahead")
            .reference.bind(_spec("ahead"))
            .accept(pairs, batch)
        )
        assert torch.equal(kept.n, other.n) and torch.equal(kept.tokens, other.tokens)


Q4_K, Q6_K, Q8_0, NVFP4, MXFP4 = (GGMLType[n] for n in ("Q4_K", "Q6_K", "Q8_0", "NVFP4", "MXFP4"))
EXPERTS = {
    "gated, a piece": MoeSpec(GPU, 8, 768, 512, "swiglu", Q4_K, Q6_K, pieces=1),
    "scaled, two pieces": MoeSpec(GPU, 6, 320, 192, "relu2", NVFP4, NVFP4, scaled=True, pieces=2),
    "cut gates, a lower tile": MoeSpec(GPU, 3, 1280, 288, "swiglu", MXFP4, Q8_0, limit=7.0),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_the_references_and_a_row_has_the_same_bits_alone(name: str) -> None:
    spec = EXPERTS[name]
    assert moe_check.check(moe_triton.bind(spec), moe_ref.bind(spec), spec) is None
    n_expert = 3 * spec.n_used
    run = experts(CARD, moe_triton.bind, spec, n_expert)
    parts = slice(0, 1), slice(61, 63), slice(3, 6), slice(0, 8), slice(10, 42), slice(5, 120)
    experts_in_company(CARD, run, spec, 150, n_expert, 60, parts)
    check_hostile(CARD, run, spec, 150, n_expert, 60, (8, 100))


def test_a_captured_graph_runs_other_choices() -> None:
    spec, gen = EXPERTS["gated, a piece"], torch.Generator().manual_seed(1)
    run = experts(CARD, moe_triton.bind, spec, 40, 1)
    for n_row in (1, 8, 100):
        x = torch.randn(n_row, spec.n_in, generator=gen).to(GPU)
        weights = torch.rand(n_row, spec.n_used, generator=gen).to(GPU)
        ids = torch.zeros(n_row, spec.n_used, dtype=torch.int32, device=GPU)
        replay, out = CARD.captured(partial(run, x, ids, weights))
        for _ in range(3):
            ids.copy_(torch.rand(n_row, 40, generator=gen).argsort(-1)[:, : spec.n_used])
            replay()
            CARD.waited()
            assert torch.equal(out, run(x, ids, weights))


def _spec(name: str) -> Any:
    return next(spec for op, spec in survey.standard(GPU) if op.name == name)
