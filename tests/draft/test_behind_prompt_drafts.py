"""Drafts that are made while the device reads a prompt alone, of every drafter that makes some: those that the host asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import test_assistant
import test_dflash2
import test_draft_model
import test_dspark_streams
import test_eagle3
from engine_rig import Rig
from known_texts import joined, known_texts, tiny
from test_behind_prompt import Watched

from pyspec.engine.loop import behind_prompt

N_MOST = 3
MAKERS: dict[str, Callable[[int], Rig]] = {
    "eagle3": lambda np: test_eagle3.drafted("qwen3", own=True, np=np, n_draft_max=N_MOST),
    "dflash2": lambda np: test_dflash2.drafted("dflash2", np=np, n_draft_max=N_MOST),
    "dspark": lambda np: test_dflash2.drafted("dspark", np=np, n_draft_max=N_MOST),
    "dspark streams": lambda np: test_dspark_streams.drafted(np=np, n_draft_max=N_MOST),
    "assistant": lambda np: test_assistant.drafted(np=np, n_draft_max=N_MOST),
    "draft model": lambda np: test_draft_model.drafted(
        test_draft_model.LLAMA, test_draft_model.near(test_draft_model.LLAMA), np=np, n_draft_max=N_MOST
    ),
    "draft model with states": lambda np: test_draft_model.drafted(
        test_draft_model.QWEN35,
        test_draft_model.near(test_draft_model.QWEN35),
        np=np,
        n_draft_max=N_MOST,
    ),
}
TARGETS = {
    "eagle3": lambda: tiny("qwen3"),
    "dflash2": lambda: tiny("qwen35"),
    "dspark": lambda: tiny("qwen35"),
    "dspark streams": lambda: tiny("deepseek4"),
    "assistant": lambda: test_assistant.TARGET,
    "draft model": lambda: test_draft_model.LLAMA,
    "draft model with states": lambda: test_draft_model.QWEN35,
}


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [3, 5])
@pytest.mark.parametrize("kind", [*MAKERS])
def test_drafts_behind_a_lone_prompt_are_those_of_the_host(
    kind: str, np: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, drafts, counts = known_texts(TARGETS[kind]()), [], list[Counter[str]]()
    for on in (True, False):
        monkeypatch.setattr(behind_prompt, "ON", on)
        w = Watched(MAKERS[kind](np))
        heard = joined(w.r, [*texts, *texts], cancels=True)
        assert [h.tokens for h in heard] == [*texts.values()] * 2
        drafts.append(w.drafts)
        counts.append(w.behind)
    now, before = counts
    assert before["decodes, by the host"] > 2 and not before["decodes, ahead"]
    # records of recurrent layers can not follow a token that the host does not know
    assert (now["decodes, ahead"] > 2) == (kind != "draft model with states")
    whole = [
        {(i, at): d for i, own in each.items() for at, d in own.items() if len(d) == N_MOST}
        for each in drafts
    ]
    same = whole[0].keys() & whole[1].keys()
    assert len(same) > 20 and all(whole[0][x] == whole[1][x] for x in same)
