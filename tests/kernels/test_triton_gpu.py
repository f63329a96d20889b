"""The tier in Triton on a GPU: every op against its reference in models' shapes, bits in company, graphs, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from pyspec.cuda import faults, survey, tri
from pyspec.cuda.op import listed_ops
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.cases import CASES, MIXED, TOLERANCE, Case, make, only, spec_of, worst
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.heads.triton import DTYPES
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe import triton as moe_triton
from pyspec.cuda.ops.moe.ref import Added, MoeSpec
from pyspec.gguf import GGMLType
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.kv_types import PLAIN, KvFormat
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

GPU = torch.device("cuda", 0)
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
GDN = GdnSpec(GPU, GdnShape(16, 48, 128, 4, (2 * 16 + 48) * 128), 1e-6)
MAMBA2 = Mamba2Spec(GPU, Mamba2Shape(n_head=128, head_dim=64, n_group=8, n_state=128, n_conv=4))
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
    assert module.limits(spec) is None
    assert op.check(module.bind(spec), op.reference.bind(spec), spec) is None
    assert faults.record(GPU).tolist() == [0] * 5


@pytest.mark.parametrize("name", [*CASES, *MIXED, "far"])
def test_rows_are_the_references_and_have_the_same_bits_alone(name: str) -> None:
    case = {**CASES, **MIXED}.get(name, FAR)
    made = make(case, GPU)
    n, attend = made.plain.n_row, attend_triton.bind(spec_of(case, GPU))
    want = attend_ref.bind(spec_of(case, GPU))(
        made.q[:n].double(), made.pool, made.plain, case.window, made.sinks
    )
    out = attend(made.q, made.pool, made.batch, case.window, made.sinks)
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any() and faults.record(GPU).tolist() == [0] * 5
    for i, (past, width) in enumerate(case.seqs):
        start = made.plain.starts[i]
        q, batch = only(made, i)
        assert torch.equal(
            out[start : start + width], attend(q, made.pool, batch, case.window, made.sinks)
        ), i
        for row in (
            {0, width - 1}
            if past + width <= attend_triton.FAR or past > attend_triton.FAR
            else set[int]()
        ):
            q, batch = only(made, i, row, 1)
            assert torch.equal(
                out[start + row], attend(q, made.pool, batch, case.window, made.sinks)[0]
            ), (i, row)


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
    made = make(case, GPU)
    attend = attend_triton.bind(spec_of(case, GPU))
    b = replace(made.batch, hi=made.batch.hi.clone(), positions=made.batch.positions.clone(), bucket=8)
    attend(made.q, made.pool, b, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(made.q, made.pool, b, 0)
    for shift in (0, -1, -700, -1499):
        b.hi.copy_(made.batch.hi + shift)
        b.positions.copy_(made.batch.positions + shift)
        graph.replay()
        torch.cuda.synchronize()
        now = replace(made.plain, hi=b.hi, positions=b.positions)
        want = attend_ref.bind(spec_of(case, GPU))(made.q.double(), made.pool, now, 0)
        assert worst(out, want) < TOLERANCE[case.dtype], shift


def test_pools_beyond_two_gigarows_of_bytes_are_addressed() -> None:
    case = Case(8, 4, 256, torch.float16, [(100, 3)], 16, spare=200_000)  # 6.5 GB each of K and V
    made = make(case, GPU, seed=3)
    want = attend_ref.bind(spec_of(case, GPU))(made.q.double(), made.pool, made.plain, 0)
    got = attend_triton.bind(spec_of(case, GPU))(made.q, made.pool, made.batch, 0)
    assert worst(got, want) < TOLERANCE[case.dtype]


def test_a_page_out_of_the_pool_is_reported_and_harms_no_other_sequence() -> None:
    case = CASES["ragged"]
    made = make(case, GPU)
    attend = attend_triton.bind(spec_of(case, GPU))
    out, table = attend(made.q, made.pool, made.batch, 0), made.batch.page_table.clone()
    table[4, 3] = 1 << 33
    bad = attend(made.q, made.pool, replace(made.batch, page_table=table), 0)
    fault = faults.record(GPU)
    tripped = fault.tolist()[:3]
    fault.zero_()
    assert tripped == [1, attend_triton.OP_ID, 4]
    assert torch.equal(bad[: made.plain.starts[4]], out[: made.plain.starts[4]])


def text(name: str, n: int) -> tuple[Any, Callable[..., torch.Tensor], Any]:
    """(shape, run(layer, batch, rows) over rows of one text, fold) of a recurrence."""
    gen, spec = torch.Generator().manual_seed(3), GDN if name == "gdn" else MAMBA2
    launch, shape = triton_of(name).bind(spec), spec.shape
    n_head = shape.n_v_head if name == "gdn" else shape.n_head
    m, first, second = (
        torch.randn(n, size, generator=gen).to(GPU) for size in (shape.n_channel, n_head, n_head)
    )
    if name == "gdn":
        drawn = (
            -torch.rand(48, generator=gen),
            torch.randn(48, generator=gen),
            torch.randn(shape.n_channel, 4, generator=gen),
        )
        w = [t.to(GPU) for t in drawn]
        return (
            shape,
            lambda layer, b, r: launch(m[r], first[r], second[r], *w, layer, b),
            launch.folder(),
        )
    p = make_params(shape, gen, GPU)
    return shape, lambda layer, b, r: launch(m[r], first[r], p, layer, b), launch.folder()


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_states_and_outputs_have_the_same_bits_however_tokens_came(name: str) -> None:
    n = 40
    shape, run, fold = text(name, n)
    found = []
    for plan in (
        [(1, True)] * n,
        [(n, True)],
        [(8, False)] * 5,
        [(17, True), (5, False), (7, False), (11, True)],
    ):
        layer, table, at, n_fold, out = StateLayer(shape, 2, 8, GPU), SlotTable(2, 32, 16), 0, 0, []
        for width, keep in plan:
            batch = lay_out(
                table,
                [Seq(1, at, [0] * width, SeqMode.KEEP if keep else SeqMode.VERIFY, 0, n_fold)],
                GPU,
            )
            out.append(run(layer, batch, slice(at, at + width)))
            at, n_fold = at + width, 0 if keep else width
        fold(layer, 1, n_fold)
        found.append((torch.cat(out), layer.state.clone(), layer.conv[:, :3].clone()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_a_captured_graph_runs_other_sequences_of_the_same_count(name: str) -> None:
    shape, run, _ = text(name, 8)
    batches = [
        lay_out(SlotTable(4, 32, 16), seqs, GPU)
        for seqs in (
            [Seq(0, 0, [0] * 5), Seq(2, 0, [0] * 3)],
            [Seq(3, 9, [0] * 2, SeqMode.VERIFY, 0, 4), Seq(0, 9, [0] * 6, SeqMode.VERIFY, 0, 2)],
        )
    ]
    names = ("seq_slot", "seq_start", "seq_fold", "seq_keep")
    live, captured, eager = batches[0], StateLayer(shape, 4, 6, GPU), StateLayer(shape, 4, 6, GPU)
    fields = {name: getattr(live, name).clone() for name in names}
    own = replace(live, **fields, bucket=8)
    run(StateLayer(shape, 4, 6, GPU), own, slice(0, 8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(captured, own, slice(0, 8))
    for batch in batches:
        for name_, field in fields.items():
            field.copy_(getattr(batch, name_))
        graph.replay()
        want = run(eager, batch, slice(0, 8))
        torch.cuda.synchronize()
        assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(captured.tensors(), eager.tensors(), strict=True))


def test_graphs_hold_what_follows_a_verify() -> None:
    batch, _, _ = ahead_cuda.verify((3, 5), GPU, torch.Generator().manual_seed(1))
    logits = torch.randn(batch.tokens.shape[0], 40_000, device=GPU)
    best, ahead = triton_of("best").bind(_spec("best")), triton_of("ahead").bind(_spec("ahead"))
    ahead.accept(best.pairs(logits), batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pairs = best.pairs(logits)
        kept = ahead.accept(pairs, batch)
    for seed in (2, 3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        logits[torch.arange(7), batch.tokens[1:8]] += 50.0 * (torch.arange(7, device=GPU) < 4)
        graph.replay()
        torch.cuda.synchronize()
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
    spec, gen = EXPERTS[name], torch.Generator().manual_seed(0)
    assert moe_check.check(moe_triton.bind(spec), moe_ref.bind(spec), spec) is None
    n_expert = 3 * spec.n_used
    experts = moe_triton.bind(spec)(moe_check.random_stacks(spec, n_expert, gen))
    x = torch.randn(150, spec.n_in, generator=gen).to(GPU)
    ids = torch.rand(150, n_expert, generator=gen).argsort(-1)[:, : spec.n_used].int()
    ids[:60, 0] = 0  # a crowd: items of all sizes
    ids = ids.to(GPU)
    weights = torch.rand(150, spec.n_used, generator=gen).to(GPU)
    added = Added(x, None, torch.rand(150, 1, generator=gen).to(GPU) if spec.pieces else None)
    whole = experts(x, ids, weights, None, added)
    for part in (slice(0, 1), slice(61, 63), slice(3, 6), slice(0, 8), slice(10, 42), slice(5, 120)):
        got = experts(x[part], ids[part], weights[part], None, added.part(part))
        assert torch.equal(got, whole[part]), part
    x[3], ids[5] = torch.nan, -7  # a row that is no number, and experts that are none
    for n in (8, 100):
        got = experts(x[:n], ids[:n], weights[:n], None, added.part(slice(0, n)))
        keep = [i for i in range(n) if i not in (3, 5)]
        assert (
            torch.equal(got[keep], whole[:n][keep]) and got[3].isnan().all() and got[5].isfinite().all()
        )


def test_a_captured_graph_runs_other_choices() -> None:
    spec, gen = EXPERTS["gated, a piece"], torch.Generator().manual_seed(1)
    experts = moe_triton.bind(spec)(moe_check.random_stacks(spec, 40, gen))
    for n_row in (1, 8, 100):
        x = torch.randn(n_row, spec.n_in, generator=gen).to(GPU)
        weights = torch.rand(n_row, spec.n_used, generator=gen).to(GPU)
        ids = torch.zeros(n_row, spec.n_used, dtype=torch.int32, device=GPU)
        experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, weights)
        for _ in range(3):
            ids.copy_(torch.rand(n_row, 40, generator=gen).argsort(-1)[:, : spec.n_used])
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, experts(x, ids, weights))


def _spec(name: str) -> Any:
    return next(spec for op, spec in survey.standard(GPU) if op.name == name)
