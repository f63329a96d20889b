"""Engines over several ranks: texts with every drafter, and the memory of the other ranks, against one rank alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, Rig, rig
from known_texts import demo_prompts
from rank_threads import RankRig

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda.rank import Rank
from pyspec.device.follow import Call, Follower
from pyspec.device.lead import Leader, TpGraphs, TpMemory, TpWorker
from pyspec.engine.load import ranks as ranks_module
from pyspec.engine.load.ranks import RankProcess
from pyspec.engine.loop.slot_image import SlotImager
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.errors import DeviceError, ModelError, RankLost
from pyspec.models.cuts import share_of
from pyspec.models.weights import cuts_of
from pyspec.request import SamplingParams
from pyspec.slots.memory import Checkpoint
from pyspec.synth import dims

N = 24
MTP = {"spec_type": "mtp", "n_draft_max": 3}
DRAFTERS: dict[str, dict[str, object]] = {
    "mtp": MTP,
    "mtp with a coarse head": {**MTP, "draft_head": "q4_0"},
    "dflash": {"draft_path": DEMO_DRAFT},
    "ngram": {"spec_type": "ngram", "ngram_match": 1, "n_draft_max": 4},
    "none": {"spec_type": "none"},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[RankRig]:
    """Four slots over two ranks; MTP drafts."""
    with RankRig(DEMO, 2, np=4, **MTP) as r:
        yield r


def texts(r: Rig, n_prompt: int) -> int:
    """All at once, compared with the trained answers. Returns how many drafted tokens were right."""
    prompts = demo_prompts()[:n_prompt]
    heard = [r.submit(prompt, N) for prompt, _ in prompts]
    r.run()
    assert [h.tokens[: len(text)] for h, (_, text) in zip(heard, prompts, strict=True)] == [
        text[:N] for _, text in prompts
    ]
    return sum(h.timings.draft_n_accepted for h in heard)


def test_text_over_two_ranks_is_that_of_one(shared: RankRig) -> None:
    assert texts(shared, 4) > 0, "some drafts are right; how many are asked for is a matter of time"
    texts(shared, 4)  # prompts that come again


def test_other_ranks_go_on_from_what_is_cached(shared: RankRig) -> None:
    prompt, text = demo_prompts()[6]
    shared.generate(prompt, N)
    again = shared.generate([*prompt, *text[:N]], 8)
    assert again.job.n_cached > len(prompt) and again.tokens[:7] == text[N:]


def test_ranks_have_the_first_ones_pages_and_states(shared: RankRig) -> None:
    """Together, the ranks have the model's memory: heads of the others stand where the first rank's do."""
    shared.generate(demo_prompts()[0][0], N)
    shared.ranks.settle()
    own, other = shared.loop.memory, shared.ranks.followers[1].memory
    assert own.kv.keys() == other.kv.keys() and own.states.keys() == other.states.keys()
    for mine, theirs in ((own.kv, other.kv), (own.states, other.states)):
        for i in mine:
            for a, b in zip(mine[i].tensors(), theirs[i].tensors(), strict=True):
                assert a.shape == b.shape
    for i, pool in own.kv.items():
        assert torch.equal(pool.k[:, 0, 0] != 0, other.kv[i].k[:, 0, 0] != 0), (
            "rows are written in the same pages"
        )


def test_states_that_go_here_go_there(shared: RankRig) -> None:
    follower, states = shared.ranks.followers[1], shared.loop.cache.states
    for prompt, _ in demo_prompts()[:3]:
        shared.generate(prompt, 3)
    held = [*states.tiers[0], *states.tiers[1], *states.starts]
    assert len(held) >= 3
    shared.ranks.settle()
    numbers = {s.content.checkpoint.elsewhere.number for s in held}
    assert numbers <= follower.kept.keys()
    for state in held:
        states.drop(state)
    del held, state
    gc.collect()
    shared.generate(demo_prompts()[5][0], 3)  # the next command reports that they went
    shared.ranks.settle()
    alive = {
        s.content.checkpoint.elsewhere.number for tier in (*states.tiers, states.starts) for s in tier
    }
    states_there = {n for n, kept in follower.kept.items() if isinstance(kept, Checkpoint)}
    assert states_there == alive and len(follower.kept) - len(alive) <= 2, "rounds end, too"
    assert not alive & numbers


@pytest.mark.slow
def test_an_image_holds_what_all_ranks_have(shared: RankRig) -> None:
    """Pages and states of both, the drafter's beside them: put back into an empty cache, the same text follows without reading again."""
    loop, (prompt, text) = shared.loop, demo_prompts()[4]
    heard = shared.generate(prompt, N)
    imager, slot = SlotImager(loop.worker, loop.cache), loop.table.slots[heard.job.slot.index]
    image = imager.take(slot.index)
    want = shared.generate([*prompt, *text[:N]], N)
    assert image.n_token == len(prompt) + N - 1 and want.job.n_cached == image.n_token
    for one in loop.table.slots:
        loop.table.erase(one)
    assert shared.generate([*prompt, *text[:N]], N).job.n_cached == 0
    for one in loop.table.slots:
        loop.table.erase(one)
    imager.put(2, image)
    again = shared.generate([*prompt, *text[:N]], N)
    assert (again.tokens, again.job.n_cached) == (want.tokens, image.n_token)
    taken = imager.take(again.job.slot.index)
    assert torch.equal(taken.content[0][: image.n_token], image.content[0])
    loop.cache.check(now=True)
    shared.ranks.settle()


def test_an_image_that_fails_on_the_first_rank_is_the_end_of_all(shared: RankRig) -> None:
    memory = shared.loop.memory
    assert isinstance(memory, TpMemory)
    told: list[Call] = []
    leader = Leader(told.append, memory.leader.ranks)  # type: ignore[arg-type]
    with pytest.raises(
        DeviceError, match="read_pages failed on the first rank, and the others wait in it: index"
    ):
        TpMemory(memory, leader).read_pages(shared.loop.table.page_size, [1 << 40])
    assert told == [("read_pages", ((1 << 40,),))]


def test_graphs_go_before_the_others_are_let_go(
    shared: RankRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for graphs with a sum: a program with such graphs did not end."""
    worker, left = shared.loop.worker, list[int]()
    assert isinstance(worker, TpWorker) and isinstance(worker.forward, TpGraphs)
    graphs = worker.forward._graphs
    graphs[1, 1, False, False] = (SimpleNamespace(), SimpleNamespace())  # type: ignore[assignment]
    monkeypatch.setattr(type(worker.target.ranks), "leave", lambda self: left.append(len(graphs)))
    worker.leave()
    assert left == [0]
    texts(shared, 1)  # on a CPU there are none, and everything continues


def test_what_does_not_divide_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(
        ModelError, match=r"deepseek2\.gguf: .*5 heads do not divide by 3; --tp 1 or 5 would"
    ):
        rig(FIXTURES / "deepseek2.gguf", tp=3)
    with pytest.raises(ModelError, match=r"2 groups of heads do not divide by 4; --tp 1 or 2 would do"):
        rig(FIXTURES / "deepseek4.gguf", tp=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_ahead_have_the_first_ranks_rows_on_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their positions are found by each rank's device; where only the first one has the drafts, the others get their tokens from it."""
    drafted: list[bool] = []
    obey = Follower.obey

    def watch(self: Follower, call: Call) -> None:
        if call[0] == "launch_behind":
            drafted.append(self.drafter is None and bool(call[1][1].behind.n_draft))
        obey(self, call)

    monkeypatch.setattr(Follower, "obey", watch)
    with RankRig(DEMO, 2, np=4, padded=True, **DRAFTERS[name]) as r:
        assert (texts(r, 8) > 0) == (name != "none")
        r.ranks.settle()
    received, own = sum(drafted), len(drafted) - sum(drafted)
    assert len(drafted) > N // 3 or name == "ngram", "an n-gram is looked up on the host"
    assert (received > 0) == name.startswith("mtp") and (own > 0 or name == "ngram")


def test_every_gpu_there_is_means_one_rank_on_a_cpu() -> None:
    assert describe(FIXTURES / "llama.gguf", EngineSettings(tp=0, device="cpu")).settings.tp == 1


def test_the_plan_of_ranks_adds_up_to_the_models() -> None:
    one, two = (
        describe(DEMO, EngineSettings(tp=n, device="cpu", spec_type="none", weights="dense"))
        for n in (1, 2)
    )
    a, b = plan_memory(one), plan_memory(two)
    assert 2 * b.kv == 2 * a.kv, "one key head: each rank has a copy"
    logits = (
        4 * one.config.n_vocab
    )  # kept where a short prompt ends; the plan counts them for every rank
    assert 2 * b.state == a.state + logits and b.draft_head == 0
    whole = sum(
        4 * t.n_elements
        for n, t in one.file.tensors.items()
        if n not in cuts_of(one.config.tensors(one.file))
    )
    assert abs(2 * b.weights - a.weights - whole) < 1e-3 * a.weights + 4 * 4096 * 384 * 2


def test_the_plan_of_three_ranks_has_copies_and_zeros() -> None:
    """One key head of attention and two of Gated DeltaNet, 1,024 inner values as 352 of three ranks."""
    one, three = (
        describe(DEMO, EngineSettings(tp=n, device="cpu", spec_type="none", weights="dense"))
        for n in (1, 3)
    )
    a, b = plan_memory(one), plan_memory(three)
    assert b.kv == a.kv
    logits = 4 * one.config.n_vocab
    assert 2 * (b.state - logits) == a.state - logits, "a key head of two on each rank"
    cuts, file = cuts_of(one.config.tensors(one.file)), one.file
    own = sum(
        4 * (share_of(t, cuts[x], Rank(0, 3)).info if x in cuts else t).n_elements
        for x, t in file.tensors.items()
    )
    assert abs(b.weights - own) < 1e-3 * a.weights + 4 * 4096 * 384 * 2


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_of_the_demo_over_ranks_that_do_not_divide_it(name: str, n: int) -> None:
    with RankRig(DEMO, n, np=3, **DRAFTERS[name]) as r:
        assert texts(r, 3) > 0 or name in ("none", "ngram")
        assert name != "dflash" or r.loop.worker.plan.is_divided


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_the_same_with_every_drafter(name: str) -> None:
    with RankRig(DEMO, 2, np=4, **DRAFTERS[name]) as r:
        assert (texts(r, 8) > 0) == (name != "none")


@pytest.mark.slow
def test_sampled_text_is_the_same_with_every_drafter() -> None:
    params = SamplingParams(temperature=0.9, seed=11, ignore_eos=True)
    prompts = [prompt for prompt, _ in demo_prompts()[:4]]
    found = []
    for drafter in ("none", "mtp", "dflash"):
        with RankRig(DEMO, 2, np=4, **DRAFTERS[drafter]) as r:
            heard = [r.submit(prompt, N, params) for prompt in prompts]
            r.run()
            found.append([h.tokens for h in heard])
    assert found[0] == found[1] == found[2]


WIDER = {"qwen35": {"n_k_head": 4, "n_v_head": 8}, "qwen35moe": {"n_k_head": 4, "n_v_head": 4}, "nemotron_h_moe": {"n_group": 4}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", WIDER)
def test_four_ranks_divide_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    """With two key heads of attention, which pairs of ranks share."""
    tiny = replace(dims.TINY[kind], **WIDER[kind])
    path = synth.write(tiny, tmp_path / "wide.gguf", quant="f32")
    prompts = [[1, 7, 3], list(range(5, 40)), [9] * 12]

    def run(r: Rig) -> list[list[int]]:
        heard = [r.submit(prompt, N) for prompt in prompts]
        r.run()
        return [h.tokens for h in heard]

    alone = run(rig(path, np=2, spec_type="mtp"))
    with (
        RankRig(path, 4, np=2, spec_type="mtp") as once,
        RankRig(path, 4, np=2, spec_type="mtp", padded=True) as ahead,
    ):
        assert run(once) == run(ahead) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "spec"),
    [
        ("qwen35", 2, "mtp"),
        ("qwen35moe", 2, "mtp"),
        ("nemotron_moe", 2, "mtp"),
        ("nemotron_latent", 2, "mtp"),
        ("nemotron_dense", 2, "ngram"),
        ("llama", 4, "ngram"),
        ("qwen3", 4, "none"),
        ("qwen35moe_fused_tied", 2, "none"),
        ("deepseek4", 2, "mtp"),
        ("deepseek4_pro", 4, "mtp"),
        ("qwen35", 3, "mtp"),
        ("nemotron_latent", 3, "mtp"),
        ("nemotron_latent", 4, "mtp"),
        ("llama", 3, "ngram"),
    ],
)
def test_text_of_every_architecture_is_that_of_one_rank(name: str, n: int, spec: str) -> None:
    path, settings = FIXTURES / f"{name}.gguf", {"np": 3, "spec_type": spec}
    if (own_file := FIXTURES / f"{name}_mtp.gguf").exists():
        settings |= {"draft_path": own_file, "n_draft_max": 3}
    gen = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 290, (k,), generator=gen).tolist() for k in (5, 17, 40, 9)]

    def run(r: Rig) -> list[list[int]]:
        heard = [r.submit(prompt, N) for prompt in prompts]
        r.run()
        return [h.tokens for h in heard]

    alone = run(rig(path, **settings))
    with RankRig(path, n, **settings) as once, RankRig(path, n, **settings, padded=True) as ahead:
        assert run(once) == run(ahead) == alone


def test_the_one_that_is_gone_is_named_and_not_those_that_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks that lost it report sooner on a busy machine: a rank that aborts writes down where it was first."""

    class Process(SimpleNamespace):
        def flaw(self, now: float) -> str:
            return str(self.error or "") or self.end

    def rank(index: int, **what: object) -> Process:
        idle = SimpleNamespace(poll=lambda: None, kill=lambda: None)
        return Process(
            **{"index": index, "state": "loaded", "error": None, "end": "", "process": idle, **what}
        )

    watched = ranks_module._Watched(1, ())
    watched.processes = [rank(1, error=RankLost("rank 1 of 3 has lost the others")), rank(2)]  # type: ignore[list-item]
    assert watched.look() is None and watched._is_blind
    watched.processes[1].end = "its process ended: signal 6"  # type: ignore[attr-defined]
    assert str(watched.look()) == "rank 2 of 3: its process ended: signal 6" == watched.why()
    watched.closing = True

    alone = ranks_module._Watched(1, ())
    alone.processes = [rank(1, error=RankLost("a cable"))]  # type: ignore[list-item]
    monkeypatch.setattr(ranks_module, "BLIND_S", 0.0)
    assert alone.why() == "rank 1 of 2: a cable", "nobody else is found"
    alone.closing = True


def test_a_rank_has_time_to_start_and_is_late_once_it_has_spoken() -> None:
    """Imports take long on a busy machine; afterwards a thread only sends heartbeats."""
    rank = RankProcess.__new__(RankProcess)
    rank.error, rank.is_over, rank.received, rank.has_spoken = None, False, 0.0, False
    rank.process = SimpleNamespace(poll=lambda: None, pid=os.getpid())  # type: ignore[assignment]
    assert rank.flaw(60.0) == "" and "silent for 130.0 s" in rank.flaw(130.0)
    rank.has_spoken = True
    assert rank.flaw(15.0) == "" and "silent for 25.0 s" in rank.flaw(25.0)
