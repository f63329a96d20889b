"""A short soak of conversations over the prefix cache (`tools/soak.py --chats --minutes 20` for the long one)."""

from __future__ import annotations

import sys

import pytest
from engine_rig import FIXTURES, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import soak_chats
from soak import Tally

from pyspec.engine import Engine
from pyspec.slots.cache import PrefixCache


@pytest.mark.parametrize(
    "model", [None, pytest.param(FIXTURES / "nemotron_latent.gguf", marks=pytest.mark.slow)], ids=["qwen35", "nemotron"]
)
def test_conversations_with_cancels_keep_every_text_and_lose_nothing(model: object) -> None:
    well, line = soak_chats.soak_chats(5.0, 4, seed=3, model=model)  # type: ignore[arg-type]
    assert well, line
    assert "cancelled" in line and "; 0% of" not in line


def test_conversations_keep_every_text_with_rounds_launched_ahead() -> None:
    well, line = soak_chats.soak_chats(6.0, 3, seed=5, ahead=True)
    assert well, line
    assert "rounds launched ahead" in line


@pytest.mark.parametrize(("seconds", "later"), [(30.0, False), (6.0, True)])
def test_the_soak_sees_a_state_that_was_not_folded(
    seconds: float, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that cannot fail proves nothing: checkpoints at the end of requests are taken too early."""
    keep = PrefixCache.keep
    monkeypatch.setattr(
        PrefixCache, "keep", lambda self, slot, draft, fold, **how: keep(self, slot, draft, print, **how)
    )
    well, line = soak_chats.soak_chats(seconds, 4, seed=3, later=later)
    assert not well and line.startswith("FAILED") and ("asked again" in line) == later


def test_only_a_tie_of_experts_on_the_way_excuses_a_wrong_text() -> None:
    with Engine.load(FIXTURES / "nemotron_latent.gguf", None, np=1, kv_type="f32", device="cpu", warm_up=False) as cold:
        choices, tally = soak_chats.Choices(cold), Tally()
        gaps = {seed: choices.along([seed, *range(30)]) for seed in range(3)}
        assert all(0 < gap < 1 for gap in gaps.values()) and len(set(gaps.values())) == 3
        soak_chats.judge([soak_chats.Wrong([0, *range(30)], "token 3 is 5")], choices, tally)
        assert len(tally.wrong) == 1 and "closest choice of experts" in tally.wrong[0]
        choices.along = lambda text: soak_chats.CLOSE / 2  # type: ignore[method-assign]
        soak_chats.judge([soak_chats.Wrong([0], "token 0 is 5")], choices, tally)
    assert len(tally.wrong) == 1 and tally.counts["parted where experts tie"] == 1
