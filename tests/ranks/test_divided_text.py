"""Drafters that ranks divide: drafts as those of one rank, texts as plain ones, beside requests that join, end and are cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from block_drafters import dflash2_of, dspark_of
from engine_rig import DEMO, DEMO_DRAFT, Rig
from known_texts import demo_prompts, joined, known_texts
from rank_threads import RankRig
from torch import Tensor

from pyspec import synth
from pyspec.config import EngineSettings
from pyspec.cuda.collective import Collective
from pyspec.cuda.graph import Graphed
from pyspec.draft import dflash
from pyspec.draft.dflash import DFlash
from pyspec.draft.dflash_ranks import DFlashShare, DividedDFlash
from pyspec.engine.plan.describe import describe
from pyspec.engine.plan.memory_plan import MemoryPlan
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.gguf import open_gguf
from pyspec.synth import dims

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
        assert isinstance(r.loop.drafter, DividedDFlash)
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
            (self.other if isinstance(drafter, DFlashShare) else self.first).append(tokens.tolist())
            self.sure += [] if probs is None else [probs]
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
        divided = isinstance(r.loop.drafter, DividedDFlash)
        assert divided == (kind != "dspark-unsure" or not p_min)
        texts, drafts = found.of(r)
        r.ranks.settle()
        if divided and n_rank == 2:
            assert found.other == drafts and len(drafts) > 8
        sure = found.sure
    monkeypatch.setattr(dflash, "MOST_RANKS", 1)
    with ranked(kind, n_rank, **settings) as r:
        assert not isinstance(r.loop.drafter, DividedDFlash)
        assert found.of(r) == (texts, drafts)
    if p_min:
        assert sure and all(map(torch.allclose, sure, found.sure))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dflash2"])
def test_a_window_is_the_same_on_all_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(monkeypatch)

    def drafts(window: int) -> list[list[int]]:
        with ranked(kind, 2, np=2, padded=True) as r:
            r.loop.speculator.window = lambda slot: window  # type: ignore[method-assign]
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
        assert isinstance(drafter, DividedDFlash)
        monkeypatch.setattr(Graphed, "forget", lambda graphs: order.append(graphs))
        monkeypatch.setattr(Collective, "leave", lambda ranks: order.append("left"))
        r.loop.leave()
        assert order[-1] == "left"
        assert set(map(id, order[:-1])) == set(
            map(id, (r.loop.worker.forward, drafter.block, drafter.inject))
        )
