"""A short soak of conversations over the prefix cache (`tests/long_runs/soak.py --chats --minutes 20` for the long one)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_rig import FIXTURES, ROOT

sys.path.insert(0, str(ROOT / "tests" / "long_runs"))
import soak_chats
from soak import Tally
from soak_audit import audit

from pyspec import synth
from pyspec.engine.api import Engine
from pyspec.request import Request, SamplingParams
from pyspec.slots.cache import PrefixCache


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [None, pytest.param(FIXTURES / "nemotron_latent.gguf", marks=pytest.mark.slow)],
    ids=["qwen35", "nemotron"],
)
def test_conversations_with_cancels_keep_every_text_and_lose_nothing(model: object) -> None:
    well, line = soak_chats.soak_chats(0, 4, seed=3, model=model, n_request=60)  # type: ignore[arg-type]
    assert well, line
    assert "cancelled" in line and "; 0% of" not in line


@pytest.mark.slow
def test_conversations_keep_every_text_with_rounds_launched_ahead() -> None:
    well, line = soak_chats.soak_chats(0, 3, seed=5, ahead=True, n_request=60)
    assert well, line
    assert "rounds launched ahead" in line


@pytest.mark.slow
@pytest.mark.parametrize(("n_request", "later"), [(100, False), (100, True)])
def test_the_soak_sees_a_state_that_was_not_folded(
    n_request: int, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that cannot fail proves nothing: checkpoints at the end of requests are taken too early."""
    file = PrefixCache.file
    monkeypatch.setattr(
        PrefixCache,
        "file",
        lambda self, slot, draft, fold, **how: file(self, slot, draft, lambda slot: None, **how),
    )
    well, line = soak_chats.soak_chats(0, 4, seed=3, later=later, n_request=n_request)
    assert not well and line.startswith("FAILED") and ("asked again" in line) == later


def test_only_a_tie_of_experts_on_the_way_excuses_a_wrong_text() -> None:
    with Engine.load(
        FIXTURES / "nemotron_latent.gguf", None, np=1, kv_type="f32", device="cpu", warm_up=False
    ) as cold:
        choices, tally = soak_chats.Choices(cold), Tally()
        gaps = {seed: choices.along([seed, *range(30)]) for seed in range(3)}
        assert all(0 < gap < 1 for gap in gaps.values()) and len(set(gaps.values())) == 3
        soak_chats.judge([soak_chats.Wrong([0, *range(30)], "token 3 is 5")], choices, tally)
        assert len(tally.wrong) == 1 and "closest choice of experts" in tally.wrong[0]
        choices.along = lambda text: soak_chats.CLOSE / 2  # type: ignore[method-assign]
        soak_chats.judge([soak_chats.Wrong([0], "token 0 is 5")], choices, tally)
    assert len(tally.wrong) == 1 and tally.counts["parted where experts tie"] == 1


def test_an_end_that_is_banned_makes_no_near_tie_of_the_others_clear() -> None:
    """Tokens 5 and 6 are as good as each other, behind end token 9, which is banned for both."""

    def of(*top: tuple[int, float]) -> object:
        return SimpleNamespace(tokens=(5,), logprobs=[SimpleNamespace(top=top)])

    tied, clear = of((9, -0.1), (5, -8.0), (6, -8.001)), of((9, -0.1), (5, -8.0), (6, -9.5))
    assert soak_chats.verdict([1], [6], tied, 0.1, frozenset({9})) is None  # type: ignore[arg-type]
    wrong = soak_chats.verdict([1], [6], clear, 0.1, frozenset({9}))  # type: ignore[arg-type]
    assert wrong is not None and "better by 1.5" in wrong.what


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("spoiled", ["", "keys", "state"])
def test_what_is_kept_is_compared_with_what_another_engine_makes(spoiled: str, tmp_path: Path) -> None:
    path = synth.write("qwen35", tmp_path / "tiny.gguf", quant="f32", tiny=True)
    settings = {"device": "cpu", "kv_type": "f32", "ctx": 256, "page_size": 16, "warm_up": False}
    with (
        Engine.load(path, None, np=2, **settings) as engine,
        Engine.load(path, None, np=1, **settings) as other,
    ):
        for prompt in (range(40), [*range(30), *range(90, 120)]):
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            engine.run(Request(prompt=tuple(prompt), params=params, max_tokens=9))
        nodes = list(engine.loop.table.tree.nodes())
        kept = next(state.content.checkpoint for node in nodes for state in node.states.values())
        pool = list(engine.loop.memory.kv.values())[-1]
        if spoiled == "keys":
            pool.k[nodes[0].page * 16 + 3] *= 1.01
        elif spoiled == "state":
            kept.tensors[2] *= 1.01
        found = audit(engine, other)
    assert found.n_state >= 2 and found.n_row >= 80
    if not spoiled:
        assert not found.wrong and found.worst < 1e-4, found.wrong
    else:
        assert [w for w in found.wrong if (spoiled if spoiled == "keys" else "state 2") in w[1]], (
            found.wrong
        )
        assert 0.005 < found.worst < 0.02
