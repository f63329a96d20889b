"""Drafters over several ranks: drafts as those of one rank, texts as plain ones, whether ranks divide it, its head, or the first one has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from block_drafters import dflash2_of, dspark_of
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import demo_prompts, joined, known_texts
from rank_threads import RankRig, is_first
from torch import Tensor

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda.collective import Calls, Collective
from pyspec.cuda.graph import Graphed
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device.capture import capture
from pyspec.device.follow import Call, Follower
from pyspec.device.lead import Leader
from pyspec.draft import dflash
from pyspec.draft.dflash import DFlash
from pyspec.draft.drafter import TargetFile
from pyspec.draft.draws import Draws
from pyspec.engine.load import load as loading
from pyspec.engine.loop.slot_image import SlotImager
from pyspec.engine.plan import planned_bytes
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.memory_plan import MemoryPlan
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.engine.policy import plan as policy
from pyspec.errors import DeviceError, RankLost
from pyspec.gguf import open_gguf
from pyspec.models.gathered import Gathered
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftsAhead
from pyspec.synth import dims

N = 24
DFLASH: dict[str, object] = {"draft_path": DEMO_DRAFT, "n_draft_fixed": True}
PLAIN = replace(GREEDY, ignore_eos=False)


class Proposals:
    """A drafter's proposals on the first rank and on the others, and the calls that these got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[int]] = []
        self.of_others: list[list[int]] = []
        self.told: list[Call] = []
        self.n_ahead = 0
        # Passes over taps that waited: by whether they are the first rank's
        self.n_caught_up = {True: 0, False: 0}
        find, obey, ahead, late = DFlash._tokens, Follower.obey, DFlash.draft_ahead, DFlash.catch_up

        def watch(
            drafter: DFlash,
            block: Tensor,
            n_seq: int,
            n_draft: int,
            given: Tensor,
            *,
            tells: bool = False,
            draws: Draws | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            tokens, probs = find(drafter, block, n_seq, n_draft, given, tells=tells, draws=draws)
            assert tokens.dtype == torch.int64 and tokens.shape == (n_seq * n_draft,)
            (self.found if is_first() else self.of_others).append(tokens.tolist())
            return tokens, probs

        def count(
            drafter: DFlash, batch: Batch, out: Out, kept: Kept, n_draft: int
        ) -> DraftsAhead | None:
            drafts = ahead(drafter, batch, out, kept, n_draft)
            self.n_ahead += drafts is not None and is_first()
            return drafts

        def listen(follower: Follower, call: Call) -> None:
            self.told.append(call)
            obey(follower, call)

        def catch_up(drafter: DFlash) -> None:
            self.n_caught_up[is_first()] += drafter.n_held > 0
            late(drafter)

        monkeypatch.setattr(DFlash, "catch_up", catch_up)
        monkeypatch.setattr(DFlash, "_tokens", watch)
        monkeypatch.setattr(DFlash, "draft_ahead", count)
        monkeypatch.setattr(Follower, "obey", listen)

    def of(
        self, r: RankRig, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Texts, drafts, and numbers of tokens that other ranks find with the first one."""
        self.found, self.of_others, self.told = [], [], []
        heard = [r.submit(prompt, N, PLAIN) for prompt in prompts]
        r.run()
        r.ranks.settle()
        rows = [args[0] for name, args in self.told if name == "find_best"]
        rows += [len(tokens) for tokens in self.of_others]
        return [h.tokens for h in heard], self.found, rows

    def n(self, *named: str) -> int:
        """Calls of this name, and of this method of a drafter."""
        return sum((name, *args)[: len(named)] == named for name, args in self.told)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals(monkeypatch)


def undivided(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's layers are whole on the first rank."""
    monkeypatch.setattr(dflash, "MOST_RANKS", 1)


def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it reads a whole head of its own."""
    undivided(monkeypatch)
    for module in (planned_bytes, loading):
        monkeypatch.setattr(module, "heads_together", lambda d: False)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
def test_ranks_draft_what_the_first_one_drafted_alone(
    padded: bool, drafts: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt for prompt, _ in demo_prompts()[:5]]  # one joins later
    with RankRig(DEMO, 2, np=4, padded=padded, **DFLASH) as r:
        texts, found, rows = drafts.of(r, prompts)
    assert texts == [text[:N] for _, text in demo_prompts()[:5]]
    assert rows == [len(tokens) for tokens in found] and len(rows) > 4
    assert drafts.of_others == found and drafts.n("draft", "draft") == len(rows) - drafts.n_ahead
    assert (drafts.n_ahead > 0) == padded == (drafts.n("launch_behind") > 0)
    undivided(monkeypatch)
    with RankRig(DEMO, 2, np=4, padded=padded, **DFLASH) as r:
        assert drafts.of(r, prompts) == (texts, found, rows)
        assert drafts.n("find_best") == len(rows) and not drafts.n("draft")
    with_a_copy(monkeypatch)
    with RankRig(DEMO, 2, np=4, padded=padded, **DFLASH) as r:
        assert drafts.of(r, prompts) == (texts, found, [])


@pytest.mark.slow
def test_four_ranks_draft_what_the_first_one_drafted_alone(
    tmp_path: Path, drafts: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(dims.TINY["qwen35"], n_k_head=4, n_v_head=8)
    path = synth.write(tiny, tmp_path / "t.gguf", quant="f32")
    draft = synth.write(tiny, tmp_path / "d.gguf", quant="f32", drafter=True)
    settings: dict[str, object] = {"np": 2, "draft_path": draft, "n_draft_fixed": True}
    prompts = [[1, 7, 3], list(range(5, 40)), [9] * 12]
    with RankRig(path, 4, padded=True, **settings) as r:
        texts, found, rows = drafts.of(r, prompts)
    assert len(rows) == 3 * len(found) > 9, "three others are told of each"
    with_a_copy(monkeypatch)
    with RankRig(path, 4, padded=True, **settings) as r:
        assert drafts.of(r, prompts) == (texts, found, [])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_the_context_that_one_has(
    tp: int, tmp_path: Path, drafts: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of verified rows, of prompts, and of rounds without drafts, whose taps wait on the first rank. Ranks with the same key head have a copy each."""
    tiny = replace(dims.TINY["qwen35"], n_k_head=4, n_v_head=8)
    path = synth.write(tiny, tmp_path / "t.gguf", quant="f32")
    draft = synth.write(tiny, tmp_path / "d.gguf", quant="f32", drafter=True)
    settings: dict[str, object] = {"np": 2, "draft_path": draft, "n_draft_fixed": True}
    prompt = list(range(5, 40))

    def run(r: RankRig) -> list[int]:
        plain = r.submit(prompt, 9, PLAIN, n_draft_max=0)
        r.run()
        heard = r.submit([*prompt, *plain.tokens], 9, PLAIN)
        r.run()
        r.ranks.settle()
        assert heard.job.n_cached
        return [*plain.tokens, *heard.tokens]

    with RankRig(path, tp, **settings) as r:
        texts = run(r)
        assert drafts.n_caught_up[True] * (tp - 1) == drafts.n_caught_up[False] > 0
        shares = [r.loop.drafter, *(r.ranks.followers[i].drafter for i in range(1, tp))]
        pools = [share.net.memory.kv for share in shares]  # type: ignore[union-attr]
        d = describe(path, EngineSettings(tp=tp, device="cpu", kv_type="f32", ctx=256, **settings))  # type: ignore[arg-type]
        assert plan_memory(d).draft_kv == sum(
            t.nbytes for pool in pools[0].values() for t in pool.tensors()
        )
    undivided(monkeypatch)
    with RankRig(path, tp, **settings) as r:
        assert run(r) == texts
        for i, whole in r.loop.drafter.net.memory.kv.items():  # type: ignore[union-attr]
            for name in ("k", "v"):
                want = getattr(whole, name)
                heads = [getattr(pool[i], name) for pool in pools]
                each = max(1, tp // want.shape[1])  # ranks of one key head
                torch.testing.assert_close(torch.cat(heads[::each], 1), want, atol=1e-4, rtol=1e-4)
                assert all(torch.equal(a, heads[j // each * each]) for j, a in enumerate(heads))


@pytest.mark.parametrize(
    ("settings", "n"),
    [({}, 2), ({"draft_p_min": 0.3}, 1), ({"draft_head": "full"}, 2), ({"tp": 1}, 1), ({"tp": 3}, 3)],
)
def test_what_the_first_rank_needs_whole_is_not_divided(settings: dict[str, object], n: int) -> None:
    d = describe(DEMO, EngineSettings(device="cpu", draft_path=DEMO_DRAFT, tp=2))
    target = TargetFile(d.file, d.config, d.device)
    asked = replace(d.settings, **settings)  # type: ignore[arg-type]
    plan = dflash.plan(d.draft.file, target, asked)
    whole = dflash.plan(d.draft.file, target, replace(d.settings, tp=1))
    assert plan.n_rank == n
    assert plan.attention == tuple(shape.share(n) for shape in whole.attention)


def test_the_plan_of_ranks_has_a_share_of_the_drafter_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(tp=2, device="cpu", draft_path=DEMO_DRAFT, weights="dense")
    plan = plan_memory(describe(DEMO, settings))
    others = plan.of_others
    assert (others.draft_weights, others.draft_kv) == (plan.draft_weights, plan.draft_kv)
    undivided(monkeypatch)
    whole = plan_memory(describe(DEMO, settings))
    assert whole.of_others.draft_weights == whole.of_others.draft_kv == 0
    assert 0.5 * whole.draft_weights < plan.draft_weights < 0.7 * whole.draft_weights
    assert plan.draft_kv <= whole.draft_kv


def test_an_image_holds_the_context_of_all_ranks(drafts: Proposals) -> None:
    prompt, text = demo_prompts()[4]
    with RankRig(DEMO, 2, np=2, **DFLASH) as r:
        loop, heard = r.loop, r.generate(prompt, N)
        imager, index = SlotImager(loop.worker, loop.cache), heard.job.slot.index
        image = imager.take(index)
        drafts.found = []
        want = r.generate([*prompt, *text[:N]], 8)
        found, drafts.found = drafts.found, []
        for slot in loop.table.slots:
            loop.table.erase(slot)
        for pool in (loop.drafter.net.memory, r.ranks.followers[1].drafter.net.memory):  # type: ignore[union-attr]
            for t in (t for part in pool.paged for t in part.tensors()):
                t.fill_(3.0)
        imager.put(1, image)
        again = r.generate([*prompt, *text[:N]], 8)
        assert (again.tokens, again.job.n_cached) == (want.tokens, want.job.n_cached)
        assert found and drafts.found == found


def test_drafts_that_are_cut_by_their_probabilities_read_a_whole_head(drafts: Proposals) -> None:
    with RankRig(DEMO, 2, np=2, draft_p_min=0.3, **DFLASH) as r:
        texts, found, rows = drafts.of(r, [prompt for prompt, _ in demo_prompts()[:2]])
        assert texts == [text[:N] for _, text in demo_prompts()[:2]] and found and not rows
        assert not drafts.n("draft") and not isinstance(r.loop.drafter.net.head, Gathered)  # type: ignore[union-attr]


def test_a_whole_head_is_planned_where_it_is_read() -> None:
    def bytes_of(tp: int, **settings: object) -> int:
        values = {"tp": tp, "device": "cpu", "draft_path": DEMO_DRAFT, **settings}
        return plan_memory(describe(DEMO, EngineSettings(**values))).draft_head  # type: ignore[arg-type]

    assert bytes_of(1) == bytes_of(2) == 0
    assert bytes_of(2, draft_p_min=0.3) == bytes_of(2, draft_path=None, spec_type="mtp") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_draft_model_runs_whole_on_the_first_rank(name: str, padded: bool) -> None:
    """The target itself drafts, so every draft is right."""
    path, prompts = FIXTURES / f"{name}.gguf", list(known_texts(FIXTURES / f"{name}.gguf"))[:5]
    alone, greedy = plain_rig(path), replace(GREEDY, ignore_eos=False)
    texts = [alone.generate(prompt, N, greedy).tokens for prompt in prompts]
    settings: dict[str, object] = {"draft_path": path, "spec_type": "draft", "n_draft_fixed": True, "n_draft_max": 3}  # fmt: skip
    with RankRig(path, 2, np=3, padded=padded, **settings) as r:
        heard = [r.submit(prompt, N, greedy) for prompt in prompts]
        r.run()
        r.ranks.settle()
        assert [h.tokens for h in heard] == texts
        assert all(
            h.timings.draft_n == h.timings.draft_n_accepted for h in heard if h.finish == "length"
        )
        assert sum(h.timings.draft_n for h in heard) > 30


@pytest.mark.parametrize("kind", ["divided", "whole", "mtp", "none"])
def test_every_rank_captures_what_the_first_one_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first text, on slots whose pages only the first rank holds."""
    settings = DFLASH if kind in ("divided", "whole") else {"spec_type": kind, "n_draft_max": 3}
    if kind == "whole":
        undivided(monkeypatch)
    captured: list[bool] = []
    capture_blocks = DFlash.capture
    monkeypatch.setattr(DFlash, "capture", lambda d: (captured.append(is_first()), capture_blocks(d))[1])
    texts = demo_prompts()[:5]
    with RankRig(DEMO, 2, np=3, padded=True, **settings) as r:
        capture(r.loop.worker, 200)
        r.ranks.settle()
        heard = [r.submit(prompt, N, PLAIN) for prompt, _ in texts]
        r.run()
        r.ranks.settle()
        follower = r.ranks.followers[1]
        assert follower.forward._sealed and r.loop.worker.forward._sealed
        assert follower.forward._tapes.keys() == r.loop.worker.forward._tapes.keys()
    assert [h.tokens for h in heard] == [text[:N] for _, text in texts]
    assert sorted(captured) == {"divided": [False, True], "whole": [True]}.get(kind, [])


@pytest.mark.parametrize("n", [1, 2])
def test_taps_are_checked_with_the_same_head(n: int) -> None:
    prompt, text = demo_prompts()[0]

    def runs(r: RankRig) -> str | None:
        table = r.loop.table
        table.acquire(table.slots[0], 200)
        assert isinstance(r.loop.drafter, DFlash)
        return r.loop.drafter.check(r.loop.target, table.slots[0], [*prompt, *text])

    if n == 1:
        assert runs(rig(DEMO, np=1, **DFLASH)) is None  # type: ignore[arg-type]
        return
    with RankRig(DEMO, n, np=1, **DFLASH) as r:
        assert runs(r) is None


def test_what_fails_while_ranks_draft_is_the_end_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Call] = []

    class Broken:
        def own(self, rows: Tensor) -> Tensor:
            raise ValueError("no such matrix")

        def best(self, columns: Tensor) -> Tensor:
            raise AssertionError("there are no columns")

    class Ranks:
        error: Exception | None = None
        calls = Calls(torch.device("cpu"))

        def spread(self, x: Tensor) -> None:
            if self.error is not None:
                raise self.error

    ranks = Ranks()
    leader = Leader(told.append, ranks)  # type: ignore[arg-type]
    with pytest.raises(
        DeviceError,
        match="find_best failed on the first rank, and the others wait in it: no such matrix",
    ):
        leader.best(Broken(), torch.zeros(3, 8))  # type: ignore[arg-type]
    ranks.error = RankLost("rank 1 of 2: its process ended")
    with pytest.raises(RankLost, match="rank 1 of 2"):
        leader.best(Broken(), torch.zeros(3, 8))  # type: ignore[arg-type]
    assert told == [("find_best", (3,))] * 2

    def at_work(r: RankRig) -> RankRig:
        heard = r.submit(demo_prompts()[0][0], N, PLAIN)
        while not heard.tokens:
            r.loop.step()
        r.ranks.settle()
        r.loop.memory.leader._send = lambda command: None  # type: ignore[attr-defined]  # the others would wait for us
        return r

    def broken(batch: Batch) -> Tensor:
        raise ValueError("no such block")

    with RankRig(DEMO, 2, np=1, **DFLASH) as r:
        at_work(r).loop.drafter.block.fn = broken  # type: ignore[union-attr]
        with pytest.raises(DeviceError, match=r"draft failed on the first rank, and .* no such block"):
            for _ in range(N):
                r.loop.step()
    undivided(monkeypatch)
    with RankRig(DEMO, 2, np=1, **DFLASH) as r:
        at_work(r)
        spread = Collective.spread
        monkeypatch.setattr(
            Collective, "spread", lambda self, x: (_ for _ in ()).throw(RankLost("a cable"))
        )
        with pytest.raises(RankLost, match="a cable"):
            for _ in range(N):
                r.loop.step()
        monkeypatch.setattr(Collective, "spread", spread)


KINDS: dict[str, Callable[[Path, int], Path]] = {
    "dflash": lambda path, n_vocab: path,
    "dflash2": dflash2_of,
    "dspark": dspark_of,
    "dspark-unsure": lambda path, n_vocab: dspark_of(path, n_vocab, from_anchor=False, sure=False),
}


@cache
def pair() -> tuple[Path, Path, int]:
    """A target, its DFlash drafter, both random, which four ranks can divide, and the number of tokens."""
    tiny, folder = replace(dims.TINY["qwen35"], n_k_head=4, n_v_head=8), Path(mkdtemp(prefix="pyspec-"))
    target = synth.write(tiny, folder / "t.gguf", quant="f32")
    draft = synth.write(tiny, folder / "d.gguf", quant="f32", drafter=True)
    return target, draft, open_gguf(target).tensors["token_embd.weight"].shape[0]


@cache
def drafter(kind: str) -> Path:
    _, draft, n_vocab = pair()
    return KINDS[kind](draft, n_vocab)


def ranked(kind: str, n_rank: int, **settings: object) -> RankRig:
    given: dict[str, object] = {"draft_path": drafter(kind), "n_draft_fixed": True, "ubatch": 40}
    return RankRig(pair()[0], n_rank, **(given | settings))  # type: ignore[arg-type]


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("np", [3, 10])
@pytest.mark.parametrize("n_rank", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_plain_with_joins_and_cancels(kind: str, n_rank: int, np: int, padded: bool) -> None:
    texts = known_texts(pair()[0])
    with ranked(kind, n_rank, np=np, padded=padded) as r:
        assert r.loop.worker.plan.is_divided
        heard = joined(r, texts, cancels=True)
        r.ranks.settle()
    for h, text in zip(heard, texts.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 300


@pytest.mark.parametrize("np", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_texts_of_the_demo_with_drafts_that_are_right(np: int) -> None:
    texts = demo_prompts()[:9]
    settings: dict[str, object] = {"draft_path": DEMO_DRAFT, "ubatch": 40, "n_draft_fixed": True}
    with RankRig(DEMO, 2, np=np, padded=True, **settings) as r:
        heard = joined(r, [prompt for prompt, _ in texts], 24, cancels=True)
        r.ranks.settle()
    for h, (_, text) in zip(heard, texts, strict=True):
        assert h.tokens[: len(text)] == text[:24]  # a text may end before
    assert sum(h.timings.draft_n_accepted for h in heard) > 60


class Found:
    """Drafts and their probabilities on the first rank, in order; and those of another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[list[int]] = []
        self.other: list[list[int]] = []
        self.sure: list[Tensor] = []
        find = DFlash._tokens

        def watch(drafter: DFlash, *args: object, **how: object) -> tuple[Tensor, Tensor | None]:
            tokens, probs = find(drafter, *args, **how)  # type: ignore[arg-type]
            (self.first if is_first() else self.other).append(tokens.tolist())
            self.sure += [probs] if probs is not None and is_first() else []
            return tokens, probs

        monkeypatch.setattr(DFlash, "_tokens", watch)

    def of(self, r: Rig) -> tuple[list[list[int]], list[list[int]]]:
        """Texts, and drafts."""
        self.first, self.other, self.sure = [], [], []
        heard = [r.submit(prompt, 16) for prompt in list(known_texts(pair()[0]))[:4]]
        r.run()
        return [h.tokens for h in heard], self.first


@pytest.mark.sampled(2, most=1)
@pytest.mark.parametrize("p_min", [0.0, 0.05])
@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("n_rank", [2, 4])
@pytest.mark.parametrize("kind", ["dflash2", "dspark", "dspark-unsure"])
def test_ranks_draft_as_one(
    kind: str, n_rank: int, padded: bool, p_min: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, settings = Found(monkeypatch), {"np": 2, "padded": padded, "draft_p_min": p_min}
    with ranked(kind, n_rank, **settings) as r:
        divided = r.loop.worker.plan.is_divided
        assert divided == (kind != "dspark-unsure" or not p_min)
        texts, drafts = found.of(r)
        r.ranks.settle()
        if divided and n_rank == 2:
            assert found.other == drafts and len(drafts) > 8
        sure = found.sure
    monkeypatch.setattr(dflash, "MOST_RANKS", 1)
    with ranked(kind, n_rank, **settings) as r:
        assert not r.loop.worker.plan.is_divided
        assert found.of(r) == (texts, drafts)
    if p_min:
        assert sure and all(map(torch.allclose, sure, found.sure))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dflash2"])
def test_a_window_is_the_same_on_all_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(monkeypatch)

    def drafts(window: int) -> list[list[int]]:
        with ranked(kind, 2, np=2, padded=True) as r:
            monkeypatch.setattr(policy, "window", lambda n_past, n_trained: window)
            return found.of(r)[1]

    all_seen, last = drafts(0), drafts(3)
    assert all_seen != last
    monkeypatch.setattr(dflash, "MOST_RANKS", 1)
    assert drafts(3) == last


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_the_plan_has_a_share_on_each_rank_and_no_copy_of_the_head(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(**more: object) -> MemoryPlan:
        settings = EngineSettings(device="cpu", tp=2, draft_path=drafter(kind), weights="dense", **more)  # type: ignore[arg-type]
        return plan_memory(describe(pair()[0], settings))

    plan = planned()
    assert plan.of_others == plan and plan.draft_head == 0
    with ranked(kind, 2, np=2) as r:
        own = r.loop.drafter.net.memory.paged  # type: ignore[union-attr]
        n_byte = sum(t.nbytes for pool in own for t in pool.tensors())
    assert planned(np=2, ctx=256, kv_type="f32", n_draft_fixed=True, ubatch=40).draft_kv == n_byte
    monkeypatch.setattr(dflash, "MOST_RANKS", 1)
    whole = planned()
    assert whole.draft_head > 0 and plan.draft_weights < 0.9 * whole.draft_weights


def test_graphs_are_freed_before_the_ranks_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for those that hold its sums."""
    order: list[object] = []
    with ranked("dflash", 2) as r:
        drafter = r.loop.drafter
        assert isinstance(drafter, DFlash) and drafter.plan.is_divided
        monkeypatch.setattr(Graphed, "forget", lambda graphs: order.append(graphs))
        monkeypatch.setattr(Collective, "leave", lambda ranks: order.append("left"))
        r.loop.leave()
        assert order[-1] == "left"
        assert set(map(id, order[:-1])) == set(
            map(id, (r.loop.worker.forward, drafter.block, drafter.inject))
        )
