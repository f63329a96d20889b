"""Capturing graphs at load runs every batch size over empty slots and leaves nothing behind; padded batches draft alike."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_rig import FIXTURES, rig

from pyspec.config import EngineSettings
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import plan as attend_plan
from pyspec.cuda.ops.attend import shared as attend_shared
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.device.capture import _capture_prompts, capture
from pyspec.draft.drafter import GraphedDrafter
from pyspec.engine.plan import describe as describing
from pyspec.engine.plan import memory_plan as plan
from pyspec.engine.plan import planned_bytes
from pyspec.gguf import GGMLType, open_gguf
from pyspec.models.weight_bytes import repacked_bytes, weight_bytes
from pyspec.slots.arena import BUCKETS, Arena, bucket_of, graph_shapes, most_rows, places_of
from pyspec.synth import write


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_capturing_leaves_no_trace(tmp_path, kind) -> None:
    target = write("qwen35", tmp_path / "t.gguf", quant="f32", tiny=True)
    settings = {"np": 3, "n_draft_fixed": True, "spec_type": kind}
    if kind == "dflash":
        settings["draft_path"] = write(
            "qwen35", tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True
        )
    plain, captured = (rig(target, **settings) for _ in range(2))
    loop = captured.loop
    pages = -(-300 // loop.table.page_size)
    loop.worker.arena = Arena(3, pages, torch.device("cpu"))
    assert isinstance(loop.drafter, GraphedDrafter)
    loop.drafter.use_graphs(lambda: Arena(3, pages, torch.device("cpu")))
    capture(loop.worker, loop.limits.prompts)
    loop.table.check()
    assert all(slot.n_past == slot.n_fold == 0 and not slot.pages for slot in loop.table.slots)
    assert all(
        not layer.state.any() and not layer.conv[:, :3].any() for layer in loop.memory.states.values()
    )
    prompts = [list(range(5 + i, 30 + 3 * i)) for i in range(5)]
    for prompt in prompts:
        a, b = (engine.generate(prompt, 40) for engine in (captured, plain))
        assert a.tokens == b.tokens
        assert a.timings.accepted_per_pos == b.timings.accepted_per_pos, "the arena changed the drafts"
        assert a.timings.draft_n == b.timings.draft_n > 0


@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize(
    ("n_slot", "width"),
    [(1, 16), (2, 2), (3, 16), (5, 8), (8, 16), (13, 2), (32, 4), (33, 16), (64, 4), (100, 1)],
)
def test_every_batch_a_round_can_have_finds_its_graph(n_slot: int, width: int, singles: bool) -> None:
    """Each size in rows and in places for sequences has one graph, and every graph is used by a round."""
    if singles and width == 1:
        return  # without drafts there is one kind
    most = most_rows(n_slot, width)
    shapes = graph_shapes(n_slot, width, singles=singles, most=most)
    assert all(n_seq <= min(n_slot, n_row) and -(-n_row // n_seq) <= width for n_row, n_seq in shapes)

    def key(n_row: int, n_seq: int) -> tuple[int | None, int, bool]:
        bucket = bucket_of(n_row, most)
        assert bucket is not None
        return (
            bucket,
            next(n for n in places_of(n_slot, bucket) if n >= n_seq),
            singles and n_row == n_seq,
        )

    captured = {key(*shape) for shape in shapes}
    assert len(captured) == len(shapes)
    rounds = {key(r, n) for n in range(1, n_slot + 1) for r in range(n, min(n * width, most) + 1)}
    assert rounds == captured


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    ("kind", "np"),
    [("dflash", 1), ("dflash", 5), ("dflash", 8), ("dflash", 33), ("mtp", 5), ("eagle3", 5)],
)
def test_the_plan_has_the_rows_of_all_graphs(tmp_path, monkeypatch, kind, np) -> None:
    target = write("qwen35", tmp_path / "t.gguf", quant="f32", tiny=True)
    settings = {"np": np, "spec_type": kind, "n_draft_max": 3}
    if kind != "mtp":
        settings["draft_path"] = write(
            "qwen35", tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True, kind=kind
        )
    r, keys = rig(target, **settings), set()
    loop, planned = r.loop, EngineSettings(**settings, ctx=256)
    monkeypatch.setattr(describing, "pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(planned_bytes, "workspace_bytes", lambda sizes, cuda: sizes)
    d = describing.describe(target, planned)
    sizes = planned_bytes._workspace(d, planned_bytes._needs(d))
    inner = loop.worker.forward
    loop.worker.arena = Arena(np, loop.table.pages_for(300), torch.device("cpu"), 4)

    def watch(batch):
        if batch.bucket is not None:
            keys.add((batch.bucket, batch.n_place, inner.by_single and batch.single))
        return inner(batch)

    watch.seal = inner.seal
    loop.worker.forward = watch
    capture(loop.worker, loop.limits.prompts)
    assert sizes.graph_rows == sum(bucket for bucket, _, _ in keys) > 0
    rows = np * max(4, loop.drafter.needs.overhang)
    assert sizes.large_rows == (rows if rows > BUCKETS[-1] or kind == "dflash" else 0), (
        "logits that no graph holds are planned, too"
    )
    assert sizes.n_held == (len(loop.drafter.held) if kind == "dflash" else 0)
    assert (sizes.n_held > 0) == inner.by_single == (kind == "dflash" and np <= 32)


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_partial_sums_of_attention_are_planned_for_target_and_drafter_and_taken(
    tmp_path, monkeypatch, kind
) -> None:
    target = write("qwen35", tmp_path / "t.gguf", quant="f32", tiny=True)
    draft = (
        write("qwen35", tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True)
        if kind == "dflash"
        else None
    )
    settings, asked = EngineSettings(np=3, ctx=256, spec_type=kind, draft_path=draft), []

    def bytes_of(spec, n_seq, n_key, n_row) -> int:
        asked.append((spec.n_head, n_seq, n_key, n_row))
        return 1000 * len(asked)

    monkeypatch.setattr(plan, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(describing, "pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(attend_cuda, "workspace_bytes", lambda *args: 0)
    d = describing.describe(target, settings)
    without = planned_bytes.plan_memory(d)
    monkeypatch.setattr(attend_cuda, "workspace_bytes", bytes_of)
    assert planned_bytes.plan_memory(d).workspace - without.workspace == 1000 * len(asked)
    assert len(asked) == (2 if kind == "dflash" else 1)
    assert all(
        n_seq == 3 and n_key > 256 and n_row > d.draft.n_draft for _, n_seq, n_key, n_row in asked
    )
    space = attend_shared.Workspace(torch.device("cpu"))
    monkeypatch.setattr(attend_cuda, "workspace", lambda device: space)
    attend_plan.reserve(torch.device("cuda"), 4000)
    first = space.buffers[-1]
    assert first.numel() == 1000 and space.take(999) is first and len(space.buffers) == 1


@pytest.mark.parametrize(("n_key", "n_row"), [(2048, 1), (2048, 8), (131_072, 8)])
def test_partial_sums_in_triton_are_planned_and_never_more(n_key: int, n_row: int, monkeypatch) -> None:
    """In rounds of all slots; prompts and longer contexts run in several steps. If Triton was chosen, or is requested."""
    spec, n_seq = AttendSpec(torch.device("cuda", 0), 24, 4, 256, 1.0), 8
    monkeypatch.setattr(attend_triton, "limits", lambda spec: None)
    own = next(impl for impl in attend.impls if impl.name == "triton")
    monkeypatch.setattr(attend_cuda, "workspace_bytes", lambda *args: 7)
    monkeypatch.setattr(attend, "_decided", {})
    attend.decided[replace(spec, scale=0.5)] = own
    planned = attend_plan.workspace_bytes(spec, n_seq, n_key, n_row) // 4
    attend.decided[replace(spec, scale=0.5)] = attend.reference
    assert attend_plan.workspace_bytes(spec, n_seq, n_key, n_row) == 7
    n_split = attend_triton.n_splits(n_key)
    assert planned <= attend_triton.MOST_FLOATS
    for columns in attend_triton.fitting(spec):
        size = attend_triton.tile_floats(spec, columns, n_split)
        rounds, prompt = (n * 6 // columns + n_seq for n in (n_seq * n_row, 4000))
        for n_tile in (rounds, prompt):
            assert min(n_tile, attend_triton.at_once(size, planned)) * size <= planned
        if n_key < 4096:
            assert attend_triton.at_once(size, planned) >= rounds, (
                "rounds of short contexts are one launch"
            )


def test_no_graph_is_captured_after_warm_up(monkeypatch) -> None:
    ran, captured = [], []
    graphed = Graphed(lambda batch: ran.append(batch.bucket))

    def capture_one(key, batch) -> None:
        captured.append(key)
        graphed._graphs[key] = SimpleNamespace(replay=lambda: None), "replayed"

    def batch(bucket: int) -> SimpleNamespace:
        return SimpleNamespace(
            bucket=bucket,
            n_place=1,
            single=False,
            prompt=False,
            tokens=SimpleNamespace(device=torch.device("cuda")),
        )

    monkeypatch.setattr(graphed, "_capture", capture_one)
    for bucket in (2, 2, 4):
        graphed(batch(bucket))
    graphed.seal()
    for bucket in (4, 4, 8, 8):  # the first has been seen once, the second never
        graphed(batch(bucket))
    assert captured == [(2, 1, False, False)] and ran == [2, 4, 4, 4, 8, 8]
    assert graphed(batch(2)) == "replayed"


def test_what_a_load_took_is_told_apart_from_what_was_there(monkeypatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(plan, "memory_snapshot", lambda device: (10 * gib, 6 * gib, 5 * gib))
    told = plan.growth((2 * gib, gib, gib), torch.device("cuda"))
    assert told == "8.00 GiB (tensors 4.00 GiB, kept for tensors 1.00 GiB, others 3.00 GiB)"


def test_the_plan_has_matrices_as_kernels_stream_them(tmp_path) -> None:
    """Six-bit scales of Q4_K become bytes there."""
    file = open_gguf(write("qwen35moe", tmp_path / "m.gguf", quant="q4_k", tiny=True))
    stacks = [t for t in file.tensors.values() if t.type is GGMLType.Q4_K]
    grown = [repacked_bytes(t) / t.n_bytes for t in stacks]
    assert any(len(t.shape) == 3 for t in stacks) and min(grown) == pytest.approx(2368 / 2304)
    more = weight_bytes(file, None, repacked=True) - weight_bytes(file, None)
    assert (
        more == sum(repacked_bytes(t) - t.n_bytes for t in file.tensors.values() if len(t.shape) > 1) > 0
    )
    assert weight_bytes(file, torch.float16, repacked=True) == weight_bytes(file, torch.float16)


@pytest.mark.parametrize("ranks", [None, object()])
def test_a_prompts_graph_that_fails_ends_a_load_over_ranks_alone(ranks: object) -> None:
    """The other ranks wait in that forward, so that going on would leave them there."""

    def fail(batch: object) -> None:
        raise RuntimeError("no capture")

    r = rig(FIXTURES / "llama.gguf", np=1, ctx=1024, spec_type="none")
    arena = Arena(1, 64, torch.device("cpu"))
    worker = SimpleNamespace(
        target=SimpleNamespace(ranks=ranks), table=r.loop.table, device=torch.device("cpu"), forward=fail
    )
    if ranks is None:
        _capture_prompts(worker, arena, 512)
        assert not arena.prompts
    else:
        with pytest.raises(RuntimeError, match="no capture"):
            _capture_prompts(worker, arena, 512)
