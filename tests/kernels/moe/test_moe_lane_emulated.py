"""Experts in the host's memory beside an emulated card: what `lane_split` hands over, what `lane_gate` adds, and both around real experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.lane import served_lane
from emulated.machine import needs_compiler
from machines import compiled
from torch import Tensor

from pyspec.cpu import build
from pyspec.cuda import faults
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import cpu as moe_cpu
from pyspec.cuda.ops.moe import host, lane
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.lane import HostLane
from pyspec.cuda.ops.moe.ref import NOTHING, Added, MoeSpec, Stacks
from pyspec.cuda.ops.repack import cuda as repack_cuda
from pyspec.cuda.ops.repack.ref import Repack, RepackSpec
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.errors import DeviceError
from pyspec.gguf import GGMLType as G

pytestmark = [
    needs_compiler,
    pytest.mark.sampled(1),
    pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler"),
]
N_EXPERT = 7
SPEC = MoeSpec(CPU, 3, 64, 96, "swiglu", G.Q8_0, G.Q8_0, n_expert=N_EXPERT, slots=3)
OFF = 1e-3  # as of experts on the card


@pytest.fixture
def served() -> Iterator[list[HostLane]]:
    """An emulated card with a lane."""
    with served_lane() as lanes, emulated_gpu(seed=2):
        yield lanes


def stacks(spec: MoeSpec = SPEC, n_expert: int = N_EXPERT) -> Stacks:
    return moe_check.random_stacks(replace(spec, slots=None), n_expert, torch.Generator().manual_seed(1))


def want(spec: MoeSpec, made: Stacks, *given: Any) -> Tensor:
    return moe_ref.bind(replace(spec, slots=None))(made)(*given)


def routed(n_row: int, n_used: int = 3, n_expert: int = N_EXPERT) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(n_row)
    ids = torch.rand(n_row, n_expert, generator=gen).argsort(-1)[:, :n_used].int().contiguous()
    return ids, torch.rand(n_row, n_used, generator=gen)


def test_the_ops_check_sees_wrong_sums_of_the_lane_and_of_groups(
    served: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec in (SPEC, replace(SPEC, slots=0), STREAMED["of gpt-oss"]):
        bound = host.bind(spec), moe_ref.bind(spec)
        assert moe_check.check(*bound, spec, n_rows=(1, 9)) is None
    split = lane.Split.__init__

    def wrong(self: lane.Split, *args: Any, **more: Any) -> None:
        split(self, *args, **more)
        self.job.weights[0, 0] *= 1.1

    with monkeypatch.context() as patch:
        patch.setattr(lane.Split, "__init__", wrong)
        assert "differ" in str(moe_check.check(*bound, spec, n_rows=(1, 9)))
    group = host.HostExperts.groups
    monkeypatch.setattr(host.HostExperts, "groups", lambda self: group(self)[:-1] or group(self))
    monkeypatch.setattr(host, "GROUP", 1)
    assert "come to the card" in str(moe_check.check(*bound, spec, n_rows=(1, 9)))


def off(got: Tensor, to: Tensor) -> float:
    return float(((got - to).norm(dim=-1) / to.norm(dim=-1).clamp_min(1e-9)).amax())


@pytest.mark.parametrize("slots", [0, 1, 3, N_EXPERT])
@pytest.mark.parametrize("n_row", [1, 2, 9, 70])
def test_rows_are_the_references_wherever_their_experts_are(
    served: list[HostLane], n_row: int, slots: int
) -> None:
    spec, gen = replace(SPEC, slots=slots), torch.Generator().manual_seed(5)
    made, (ids, weights) = stacks(), routed(n_row)
    x, residual, shared = (torch.randn(n_row, 64, generator=gen) for _ in "xrs")
    norm = Norm(0.5 + torch.rand(64, generator=gen), 1e-6)
    run = host.HostExperts(spec, made)
    around = Added(residual, shared, torch.rand(n_row, 1, generator=gen))
    for given in ((None, NOTHING), (norm, around)):
        assert off(run(x, ids, weights, *given), want(spec, made, x, ids, weights, *given)) < OFF
    misses = int((ids >= slots).sum())
    assert run.counts.tolist() == [2 * misses, 2 * (misses > 0)]
    assert not run.fault.any()


def test_more_rows_than_a_job_has_go_in_pieces(
    served: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "JOB_ROWS", 8)
    made, (ids, weights), x = stacks(), routed(21), torch.randn(21, 64)
    run = host.HostExperts(SPEC, made)
    assert run.begin(x, None, ids, weights) is None
    run.streams_from = 1000
    got = run(x, ids, weights, None, Added(x))
    assert off(got, want(SPEC, made, x, ids, weights, None, Added(x))) < OFF


def test_ids_outside_are_clamped_and_none_adds_nothing(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(9), torch.randn(9, 64)
    clean = host.HostExperts(SPEC, made)(x, ids, weights)
    ids[1], ids[2, 0], ids[3, 1], ids[4, 2] = -1, -1, 1 << 30, -(1 << 30)
    for slots in (0, 3):
        run = host.HostExperts(replace(SPEC, slots=slots), made)
        got = run(x, ids, weights)
        assert not got[1].any()
        clamped = torch.where(ids == -1, -1, ids.clamp(0, N_EXPERT - 1))
        assert off(got, want(SPEC, made, x, clamped, weights)) < OFF
        assert slots == 0 or torch.equal(got[[0, *range(5, 9)]], clean[[0, *range(5, 9)]])


def test_rows_of_no_sequence_are_left_out(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(6), torch.randn(6, 64)
    run = host.HostExperts(SPEC, made)
    row_seq = torch.tensor([0, 1, -1, 1, -1, -1]).int()
    ready = run.begin(x, None, ids, weights, row_seq)
    assert ready is not None and run.job.ids[2].tolist() == [-1, -1, -1]
    got = run(x, ids, weights, None, NOTHING, ready)
    assert not got[row_seq < 0].any()
    assert off(got[row_seq >= 0], want(SPEC, made, x, ids, weights)[row_seq >= 0]) < OFF
    assert int(run.counts[0]) == int((ids[row_seq >= 0] >= 3).sum())


def test_a_row_has_the_same_bits_alone_and_among_others(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(33), torch.randn(33, 64)
    run, norm = host.HostExperts(SPEC, made), Norm(torch.rand(64), 1e-6)
    whole = run(x, ids, weights, norm, Added(x))
    for first, n in ((0, 1), (7, 1), (7, 2), (3, 4), (20, 13)):
        part = slice(first, first + n)
        assert torch.equal(run(x[part], ids[part], weights[part], norm, Added(x[part])), whole[part])


def test_without_a_miss_there_is_no_job(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(5, n_expert=3), torch.randn(5, 64)
    run = host.HostExperts(SPEC, made)
    got = run(x, ids, weights)
    assert not run.job.head.any() and run.counts.tolist() == [0, 0]
    assert off(got, want(SPEC, made, x, ids, weights)) < OFF


def test_two_layers_and_two_shapes_take_turns(served: list[HostLane]) -> None:
    wide = replace(SPEC, n_in=96, n_used=2)
    made = [stacks(), moe_check.random_stacks(replace(SPEC, slots=None), N_EXPERT, torch.Generator())]
    runs = [host.HostExperts(SPEC, one) for one in made] + [host.HostExperts(wide, stacks(wide))]
    assert len(served) == 1 and runs[0].job is runs[1].job and runs[0].job is not runs[2].job
    (ids, weights), x = routed(4), torch.randn(4, 64)
    for _ in range(3):
        for run, one in zip(runs, made, strict=False):
            assert off(run(x, ids, weights), want(SPEC, one, x, ids, weights)) < OFF
    (ids, weights), x = routed(4, 2), torch.randn(4, 96)
    assert off(runs[2](x, ids, weights), want(wide, stacks(wide), x, ids, weights)) < OFF
    del run
    freed = runs.pop(1).layer.number
    assert host.HostExperts(SPEC, made[1]).layer.number == freed


def test_numbers_wrap_around(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(4), torch.randn(4, 64)
    run = host.HostExperts(replace(SPEC, slots=0), made)
    run.job.state[2] = -3
    found = [run(x, ids, weights) for _ in range(5)]
    assert run.job.head[16] == 2 and all(torch.equal(y, found[0]) for y in found)


def fill(run: host.HostExperts, slot: int, expert: int) -> None:
    """As between rounds."""
    assert run.slots is not None
    run.load(slot, expert)
    for leaves in (run.places == slot).nonzero().flatten().tolist():
        run.place(leaves, -1)
    run.place(expert, slot)
    run.slots.copy_(run.places)


def test_a_slot_that_is_filled_has_the_record_of_its_expert(served: list[HostLane]) -> None:
    made, (ids, weights), x = stacks(), routed(12), torch.randn(12, 64)
    run, first = host.HostExperts(SPEC, made), host.HostExperts(replace(SPEC, slots=N_EXPERT), made)
    for slot, expert in ((1, 6), (0, 4), (1, 5)):
        fill(run, slot, expert)
    assert run.places.tolist() == [-1, -1, 2, -1, 0, 1, -1] == run.slots.tolist()
    for name in ("inner", "down"):
        own, all = getattr(run.card, name).stack.records, getattr(first.card, name).stack.records
        assert torch.equal(own, all[[4, 5, 2]])
    assert off(run(x, ids, weights), want(SPEC, made, x, ids, weights)) < OFF
    assert int(run.counts[0]) == int((run.places[ids.long()] < 0).sum())


STREAMED = {
    "all missing": replace(SPEC, slots=0),
    "some in slots": SPEC,
    "none missing": replace(SPEC, slots=N_EXPERT),
    "of gpt-oss": MoeSpec(
        CPU, 2, 96, 64, "swiglu_oai", G.MXFP4, G.MXFP4, limit=7.0, biased=True, n_expert=7, slots=2
    ),
    "scaled": MoeSpec(CPU, 2, 128, 64, "relu2", G.NVFP4, G.NVFP4, scaled=True, n_expert=7, slots=1),
}


@pytest.mark.parametrize("name", STREAMED)
def test_many_rows_get_their_experts_group_by_group(
    served: list[HostLane], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = STREAMED[name]
    made, n_row = stacks(spec), 19
    monkeypatch.setattr(host, "GROUP", 2 * host.expert_bytes(made))
    (ids, weights), x = routed(n_row, spec.n_used), torch.randn(n_row, spec.n_in)
    run = host.HostExperts(spec, made)
    behind = host.HostExperts(spec, made)
    assert run.behind is not None and run.behind() is behind
    ids[2, 0], ids[3, 1] = -1, 1 << 30
    added, given = Added(torch.randn(n_row, spec.n_in)), (x, ids, weights)
    clamped = torch.where(ids == -1, -1, ids.clamp(0, N_EXPERT - 1))
    for own in (run, behind, run):
        got = own.streamed(*given, None, added)
        assert off(got, want(spec, made, x, clamped, weights, None, added)) < OFF
    assert off(run(*given, None, added), got) < OFF, "as the lane does"
    assert len(run.groups()) == -(-(N_EXPERT - spec.slots) // 2)


def test_a_group_that_did_not_come_is_not_taken_for_one_that_did(
    served: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory for it is short once."""
    made, (ids, weights), x = stacks(), routed(19), torch.randn(19, 64)
    run, parts, n = host.HostExperts(SPEC, made), host._Staging._parts, 0

    def failing(self: Any, *given: Any) -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal n
        n += 1
        if n == 1:
            raise torch.OutOfMemoryError("none is left")
        return parts(self, *given)

    monkeypatch.setattr(host._Staging, "_parts", failing)
    with pytest.raises(torch.OutOfMemoryError):
        run.streamed(x, ids, weights)
    assert off(run.streamed(x, ids, weights), want(SPEC, made, x, ids, weights)) < OFF and n > 2


@pytest.mark.parametrize("act", ["swiglu", "geglu"])
def test_a_feed_forward_without_experts_is_one_expert(served: list[HostLane], act: str) -> None:
    spec = replace(SPEC, n_used=1, act=act, n_expert=1, slots=0)
    made, x = stacks(spec, 1), torch.randn(19, 64)
    of = torch.zeros(19, 1, dtype=torch.int32), torch.ones(19, 1)
    run, added = host.HostExperts(spec, made), Added(torch.randn(19, 64))
    right = want(spec, made, x, *of, None, added)
    assert off(run(x, *of, None, added), right) < OFF and run.counts.tolist() == [19, 1]
    assert off(run.streamed(x, *of, None, added), right) < OFF and len(run.groups()) == 1


@pytest.mark.parametrize("name", ["some in slots", "of gpt-oss"])
def test_a_kernel_packs_groups_and_slots_as_torch_does(
    served: list[HostLane], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = STREAMED[name]
    made, (ids, weights), x = stacks(spec), routed(19, spec.n_used), torch.randn(19, spec.n_in)
    monkeypatch.setattr(host, "GROUP", 2 * host.expert_bytes(made))
    packed: list[G] = []

    def packs(device: torch.device, type: G) -> Repack:
        packed.append(type)
        return repack_cuda.bind(RepackSpec(device, type))

    found = []
    for own in (host._packs, packs):
        monkeypatch.setattr(host, "_packs", own)
        run = host.HostExperts(spec, made)
        run.streamed(x, ids, weights)  # the first group makes the launch, later ones are put
        fill(run, 0, N_EXPERT - 1)
        found.append((run.streamed(x, ids, weights), run(x, ids, weights)))
    assert packed and all(torch.equal(*of) for of in zip(*found, strict=True))
    asked = {(op.name, of.type) for op, of in host.also(spec)}
    assert asked == {("repack", type) for type in (spec.up, spec.down)}


def test_gates_and_ups_that_lie_together_come_together(
    served: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspec.models.stacks import halves

    made, (ids, weights), x = stacks(), routed(19), torch.randn(19, 64)
    assert made.gate is not None
    both = replace(made.up, data=torch.cat((made.gate.data, made.up.data), 1), n_out=2 * 96)
    fused = Stacks(*halves(both), made.down)
    assert host.is_fused(fused) and not host.is_fused(made)
    monkeypatch.setattr(host, "GROUP", 3 * host.expert_bytes(made))
    apart, together = (host.HostExperts(SPEC, s).streamed(x, ids, weights) for s in (made, fused))
    assert torch.equal(apart, together)
    assert torch.equal(*(host.HostExperts(SPEC, s)(x, ids, weights) for s in (made, fused)))


def test_a_host_that_does_not_answer_is_a_fault_and_nobody_waits_again(
    served: list[HostLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLane, "serve", lambda self: 0)
    monkeypatch.setattr(lane, "LIMIT", 20_000)
    made, (ids, weights), x = stacks(), routed(9), torch.randn(9, 64)
    run = host.HostExperts(SPEC, made)
    got = run(x, ids, weights, None, Added(x))
    hits = torch.where(ids < 3, ids, -1)
    assert off(got, want(SPEC, made, x, hits, weights, None, Added(x))) < OFF, "what is there is right"
    with pytest.raises(DeviceError, match="did not compute"):
        faults.read(CPU)
    monkeypatch.setattr(lane, "LIMIT", 1 << 60)
    run(x, ids, weights)  # it would wait for ever
    with pytest.raises(DeviceError):
        faults.read(CPU)


def test_what_goes_to_the_host_is_what_it_needs(served: list[HostLane]) -> None:
    """Misses and their weights, and the normed rows that have one; the number when all is there."""
    made, (ids, weights), x = stacks(), routed(9), torch.randn(9, 64)
    ids[4] = torch.tensor([2, 0, 1])  # all on the card
    run, norm = host.HostExperts(SPEC, made), Norm(torch.rand(64), 1e-5)
    run.job.x.fill_(7.0)
    split = run.begin(x, norm, ids, weights)
    assert split is not None and split.hits is not None
    misses = ids >= 3
    assert torch.equal(run.job.ids[:9], torch.where(misses, ids, -1))
    assert torch.equal(split.hits, torch.where(misses, -1, ids))
    assert torch.equal(run.job.weights[:9][misses], weights[misses])
    assert split.missed.tolist() == misses.sum(-1).tolist()
    rows = misses.any(-1)
    assert torch.allclose(run.job.x[:9][rows], norm(x)[rows], rtol=1e-5, atol=1e-6)
    assert bool((run.job.x[4] == 7.0).all()) and bool((run.job.x[9:] == 7.0).all())
    head = [1, run.layer.number, 9, int(misses.sum())]
    assert run.job.head[:4].tolist() == head and run.job.head[16] == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernels_compile_for_every_architecture(arch: str) -> None:
    found = compiled("moe_lane", arch)
    assert all(found[name].spill_bytes == 0 for name in ("lane_split", "lane_gate"))
    assert all(found[name].registers <= 64 for name in ("lane_split", "lane_gate"))


def test_limits_and_the_rows_from_which_on_experts_come() -> None:
    card = replace(SPEC, device=torch.device("cuda", 0))
    assert host.limits(SPEC) == "runs on NVIDIA GPUs only"
    assert "only" in str(host.limits(replace(card, slots=None)))
    assert "33 experts" in str(host.limits(replace(card, n_used=33, slots=0)))
    assert host.limits(replace(card, slots=0)) is None
    assert "of its own" in str(host.limits(replace(card, slots=0, pieces=1)))
    of_35b = MoeSpec(CPU, 8, 2048, 512, "swiglu", G.Q4_K, G.Q4_K, slots=0)
    n_byte = 3 * 2048 * 512 * 9 // 16
    assert 200 < host.streams_from(of_35b, 256, n_byte) < 250  # spec: 225 rows
    assert host.streams_from(of_35b, 1, n_byte) == lane.JOB_ROWS
    assert moe_cpu.TOLERANCE < OFF
