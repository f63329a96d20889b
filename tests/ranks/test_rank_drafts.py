"""Proposals of blocks over several ranks: each reads its part of the head, and the first one has no copy of the whole."""

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
from pyspec.device.lead import Command, Follower, HeadBest, Leader
from pyspec.draft.dflash import DFlash
from pyspec.engine.load import load as loading
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
    """A drafter's proposals, and the commands about them to other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[int]] = []
        self.told: list[HeadBest] = []
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
        ) -> tuple[Tensor, Tensor | None]:
            tokens, probs = find(drafter, block, n_seq, n_draft, given, tells=tells)
            assert tokens.dtype == torch.int64 and tokens.shape == (n_seq * n_draft,)
            self.found.append(tokens.tolist())
            return tokens, probs

        def count(
            drafter: DFlash, batch: Batch, out: Out, kept: Kept, n_draft: int
        ) -> DraftsAhead | None:
            drafts = ahead(drafter, batch, out, kept, n_draft)
            self.n_ahead += drafts is not None
            return drafts

        def listen(follower: Follower, command: Command) -> None:
            self.told += [command] if isinstance(command, HeadBest) else []
            obey(follower, command)

        monkeypatch.setattr(DFlash, "_tokens", watch)
        monkeypatch.setattr(DFlash, "draft_ahead", count)
        monkeypatch.setattr(Follower, "obey", listen)

    def of(
        self, r: RankRig, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Texts, drafts, and rows in commands to other ranks."""
        self.found, self.told = [], []
        heard = [r.submit(prompt, N, PLAIN) for prompt in prompts]
        r.run()
        r.ranks.settle()
        return [h.tokens for h in heard], self.found, [command.n_row for command in self.told]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return Proposals(monkeypatch)


def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: the first rank reads a whole head of its own."""
    for module in (planned_bytes, loading):
        monkeypatch.setattr(module, "heads_together", lambda d: False)


@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
def test_ranks_draft_what_the_first_one_drafted_alone(
    padded: bool, drafts: Proposals, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt for prompt, _ in demo_prompts()[:5]]  # one joins later
    with RankRig(DEMO, 2, np=4, padded=padded, **DFLASH) as r:
        texts, found, rows = drafts.of(r, prompts)
    assert texts == [text[:N] for _, text in demo_prompts()[:5]]
    assert rows == [len(tokens) for tokens in found] and len(rows) > 4
    assert (drafts.n_ahead > 0) == padded
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


def test_drafts_that_are_cut_by_their_probabilities_read_a_whole_head(drafts: Proposals) -> None:
    with RankRig(DEMO, 2, np=2, draft_p_min=0.3, **DFLASH) as r:
        texts, found, rows = drafts.of(r, [prompt for prompt, _ in demo_prompts()[:2]])
        assert texts == [text[:N] for _, text in demo_prompts()[:2]] and found and not rows
        assert not isinstance(r.loop.drafter.net.head, Gathered)  # type: ignore[union-attr]


def test_a_whole_head_is_planned_where_it_is_read() -> None:
    def bytes_of(tp: int, **settings: object) -> int:
        values = {"tp": tp, "device": "cpu", "draft_path": DEMO_DRAFT, **settings}
        return plan_memory(describe(DEMO, EngineSettings(**values))).draft_head  # type: ignore[arg-type]

    assert bytes_of(1) == bytes_of(2) == 0
    assert bytes_of(2, draft_p_min=0.3) == bytes_of(2, draft_path=None, spec_type="mtp") > 0


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

    with RankRig(DEMO, 2, np=1, **DFLASH) as r:
        heard = r.submit(demo_prompts()[0][0], N, PLAIN)
        while not heard.tokens:
            r.loop.step()
        spread = Collective.spread
        monkeypatch.setattr(
            Collective, "spread", lambda self, x: (_ for _ in ()).throw(RankLost("a cable"))
        )
        told_on = r.ranks.send
        r.loop.memory.leader._send = lambda command: None  # type: ignore[attr-defined]  # the others would wait for us
        with pytest.raises(RankLost, match="a cable"):
            for _ in range(N):
                r.loop.step()
        monkeypatch.setattr(Collective, "spread", spread)
        r.loop.memory.leader._send = told_on  # type: ignore[attr-defined]
