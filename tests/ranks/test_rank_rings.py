"""Ranks keep rings of their heads' keys: the text is that of one rank with whole pages."""

from __future__ import annotations

import pytest
from engine_rig import FIXTURES
from rank_threads import RankRig
from test_rings import NGRAM, SMALL, all_at_once


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_text_over_two_ranks_is_that_of_whole_pages(padded: bool) -> None:
    path = FIXTURES / "gpt-oss.gguf"
    with RankRig(path, 2, padded=padded, np=3, **{**SMALL, **NGRAM}) as r:
        assert r.loop.worker.memory.rings
        for _ in range(2):
            all_at_once(r, path, n=5)
