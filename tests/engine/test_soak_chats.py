"""A short soak of conversations over the prefix cache (`tools/soak.py --chats --minutes 20` for the long one)."""

from __future__ import annotations

import sys

import pytest
from engine_rig import FIXTURES, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import soak_chats

from pyspec.slots.cache import PrefixCache


@pytest.mark.parametrize(
    "model", [None, pytest.param(FIXTURES / "nemotron_latent.gguf", marks=pytest.mark.slow)], ids=["qwen35", "nemotron"]
)
def test_conversations_with_cancels_keep_every_text_and_lose_nothing(model: object) -> None:
    well, line = soak_chats.soak_chats(5.0, 4, seed=3, model=model)  # type: ignore[arg-type]
    assert well, line
    assert "cancelled" in line and "; 0% of" not in line


def test_the_soak_sees_a_state_that_was_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that cannot fail proves nothing: checkpoints at the end of requests are taken too early."""
    keep = PrefixCache.keep
    monkeypatch.setattr(
        PrefixCache, "keep", lambda self, slot, draft, fold, **how: keep(self, slot, draft, print, **how)
    )
    well, line = soak_chats.soak_chats(30.0, 4, seed=3)
    assert not well and line.startswith("FAILED")
