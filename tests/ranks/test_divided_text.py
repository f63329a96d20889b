"""Texts with a drafter that ranks divide: as plain ones, beside requests that join, end and are cancelled at any moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from known_texts import joined, known_texts
from rank_threads import RankRig

from pyspec import synth
from pyspec.draft.dflash_ranks import DividedDFlash
from pyspec.synth import dims


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its drafter, random, which two and four ranks can divide."""
    tiny = replace(dims.TINY["qwen35"], n_k_head=4, n_v_head=8)
    folder = tmp_path_factory.mktemp("pair")
    target = synth.write(tiny, folder / "t.gguf", quant="f32")
    return target, synth.write(tiny, folder / "d.gguf", quant="f32", drafter=True)


@pytest.mark.parametrize("padded", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize(("n_rank", "np"), [(2, 3), (2, 10), (4, 3), (4, 10)])
def test_text_is_plain_with_joins_and_cancels(
    pair: tuple[Path, Path], n_rank: int, np: int, padded: bool
) -> None:
    path, draft = pair
    texts = known_texts(path)
    settings = {"draft_path": draft, "n_draft_fixed": True, "ubatch": 40}
    with RankRig(path, n_rank, np=np, padded=padded, **settings) as r:
        assert isinstance(r.loop.drafter, DividedDFlash)
        heard = joined(r, texts, cancels=True)
        r.ranks.settle()
    for h, text in zip(heard, texts.values(), strict=True):
        assert h.tokens == text, f"{h.job.id} in slot {h.slot}"
    assert sum(h.timings.draft_n for h in heard) > 300
