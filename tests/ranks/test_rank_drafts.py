"""Drafters over several ranks: DFlash is divided, or at least each rank reads its part of the head; others run whole on the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, plain_rig, rig
from known_texts import demo_prompts, known_texts
from rank_threads import RankRig
from torch import Tensor

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.ahead.ref import Kept
from pyspec.device.commands import AcceptRows, Command, HeadBest
from pyspec.device.follow import Follower
from pyspec.device.lead import Leader
from pyspec.draft import dflash
from pyspec.draft.dflash import DFlash
from pyspec.draft.dflash_ranks import DFlashShare, FindDrafts, MakeContext, RunBlocks
from pyspec.draft.drafter import TargetFile
from pyspec.draft.draws import Draws
from pyspec.engine.load import load as loading
from pyspec.engine.loop.slot_image import SlotImager
from pyspec.engine.plan import planned_bytes
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.errors import DeviceError, RankLost
from pyspec.models.gathered import Gathered
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftsAhead
from pyspec.synth import dims

N = 24
DFLASH: dict[str, object] = {"draft_path": DEMO_DRAFT, "n_draft_fixed": True}
PLAIN = replace(GREEDY, ignore_eos=False)


class Proposals:
    """A drafter's proposals on the first rank, and the commands about them to other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[int]] = []
        self.told: list[Command] = []
        self.n_ahead = 0
        find, obey, ahead = DFlash._tokens, Follower.obey, DFlash.draft_ahead

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
            if not isinstance(drafter, DFlashShare):
                self.found.append(tokens.tolist())
            return tokens, probs

        def count(
            drafter: DFlash, batch: Batch, out: Out, kept: Kept, n_draft: int
        ) -> DraftsAhead | None:
            drafts = ahead(drafter, batch, out, kept, n_draft)
            self.n_ahead += drafts is not None
            return drafts

        def listen(follower: Follower, command: Command) -> None:
            self.told.append(command)
            obey(follower, command)

        monkeypatch.setattr(DFlash, "_tokens", watch)
        monkeypatch.setattr(DFlash, "draft_ahead", count)
        monkeypatch.setattr(Follower, "obey", listen)

    def of(
        self, r: RankRig, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Texts, drafts, and numbers of tokens that other ranks find with the first one."""
        self.found, self.told = [], []
        heard = [r.submit(prompt, N, PLAIN) for prompt in prompts]
        r.run()
        r.ranks.settle()
        rows = [c.n_row for c in self.told if isinstance(c, HeadBest)]
        rows += [c.n_seq * c.n_draft for c in self.told if isinstance(c, FindDrafts)]
        return [h.tokens for h in heard], self.found, rows

    def n(self, kind: type[Command]) -> int:
        """Commands of this kind."""
        return sum(isinstance(c, kind) for c in self.told)


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
    assert drafts.n(RunBlocks) == drafts.n(FindDrafts) == len(rows)
    assert (drafts.n_ahead > 0) == padded == (drafts.n(AcceptRows) > 0)
    undivided(monkeypatch)
    with RankRig(DEMO, 2, np=4, padded=padded, **DFLASH) as r:
        assert drafts.of(r, prompts) == (texts, found, rows)
        assert drafts.n(HeadBest) == len(rows)
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
        assert any(isinstance(c, MakeContext) and c.n_held for c in drafts.told)
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
        assert not drafts.n(RunBlocks) and not isinstance(r.loop.drafter.net.head, Gathered)  # type: ignore[union-attr]


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
    settings: dict[str, object] = {
        "draft_path": path,
        "spec_type": "draft",
        "n_draft_fixed": True,
        "n_draft_max": 3,
    }
    with RankRig(path, 2, np=3, padded=padded, **settings) as r:
        heard = [r.submit(prompt, N, greedy) for prompt in prompts]
        r.run()
        r.ranks.settle()
        assert [h.tokens for h in heard] == texts
        assert all(
            h.timings.draft_n == h.timings.draft_n_accepted for h in heard if h.finish == "length"
        )
        assert sum(h.timings.draft_n for h in heard) > 30


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
    told: list[Command] = []

    class Broken:
        def own(self, rows: Tensor) -> Tensor:
            raise ValueError("no such matrix")

        def best(self, columns: Tensor) -> Tensor:
            raise AssertionError("there are no columns")

    class Ranks:
        error: Exception | None = None

        def spread(self, x: Tensor) -> None:
            if self.error is not None:
                raise self.error

    ranks = Ranks()
    leader = Leader(told.append, ranks)  # type: ignore[arg-type]
    with pytest.raises(
        DeviceError, match="HeadBest failed on the first rank, and the others wait in it: no such matrix"
    ):
        leader.best(Broken(), torch.zeros(3, 8))  # type: ignore[arg-type]
    ranks.error = RankLost("rank 1 of 2: its process ended")
    with pytest.raises(RankLost, match="rank 1 of 2"):
        leader.best(Broken(), torch.zeros(3, 8))  # type: ignore[arg-type]
    assert told == [HeadBest(3), HeadBest(3)]

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
        with pytest.raises(
            DeviceError, match=r"RunBlocks failed on the first rank, and .* no such block"
        ):
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
