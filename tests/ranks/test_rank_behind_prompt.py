"""Over ranks, too, the round behind a prompt that runs alone is launched while the device reads it."""

from __future__ import annotations

import random

import pytest
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, Heard
from known_texts import demo_prompts
from plans import fix_lengths
from rank_threads import RankRig
from test_behind_prompt import Watched

from pyspec.device.follow import Call, Follower
from pyspec.draft.dflash import DFlash
from pyspec.engine.loop import admission, behind_prompt, commit
from pyspec.engine.policy.queue import GPU_WORTH

DRAFTERS: dict[str, dict[str, object]] = {
    "dflash": {"draft_path": DEMO_DRAFT, "n_draft_max": 4, "n_draft_fixed": True},
    "mtp": {"spec_type": "mtp", "n_draft_max": 3, "n_draft_fixed": True},
    "none": {"spec_type": "none"},
}


def run(r: RankRig) -> Watched:
    """Requests that join and leave, with the trained answers; one of each five is cancelled."""
    w, rng, texts = Watched(r, overwrites=False), random.Random(5), demo_prompts()
    heard: list[tuple[Heard, list[int]]] = []
    for i in range(6 * r.loop.n_slot):
        prompt, text = texts[i % len(texts)]
        n = rng.randrange(2, min(60, len(text)))
        heard.append((r.submit(prompt, n, GREEDY, cache_prompt=i % 3 > 0), [*text[:n]]))
        if i % 5 == 4:
            r.loop.cancel(heard[-2][0].job)
        for _ in range(rng.randrange(2, 5)):
            r.loop.step()
    r.run()
    r.ranks.settle()
    for h, text in heard:
        assert h.tokens == text or (h.finish == "cancelled" and h.tokens == text[: len(h.tokens)])
    return w


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [3, 5])
@pytest.mark.parametrize("kind", [*DRAFTERS])
def test_rounds_behind_a_lone_prompt_are_ahead(
    kind: str, np: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Call] = []
    obey = Follower.obey
    monkeypatch.setattr(Follower, "obey", lambda f, c: (told.append(c), obey(f, c))[1])
    with RankRig(DEMO, 2, np=np, padded=True, **DRAFTERS[kind]) as r:
        now = run(r).behind
    behind = [args[1].behind for name, args in told if name == "launch_behind"]
    known = [b.known for b in behind if b.known]
    assert now["decodes, ahead"] >= 4 * now["decodes, by the host"] and now["decodes, ahead"] > 2
    assert len(known) == now["decodes, ahead"]
    assert all(tokens.count(-1) == 1 for tokens in known)
    monkeypatch.setattr(behind_prompt, "ON", False)
    with RankRig(DEMO, 2, np=np, padded=True, **DRAFTERS[kind]) as r:
        before = run(r).behind
    assert before["decodes, by the host"] > 2 and not before["decodes, ahead"] + before["prompt, ahead"]


def test_held_taps_become_context_before_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without drafts leave their taps to the next draft, which may be one behind a prompt."""
    made: list[int] = []
    inject = DFlash._inject
    monkeypatch.setattr(DFlash, "_inject", lambda d, b: (made.append(b.n_row), inject(d, b))[1])
    with RankRig(DEMO, 2, np=3, padded=True, **DRAFTERS["dflash"]) as r:
        rounds = iter(range(10**6))
        fix_lengths(r.loop, lambda caps: [cap * (n % 3 > 0) for n in (next(rounds),) for _, cap in caps])
        w = run(r)
    assert w.behind["decodes, ahead"] > 2 and made


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", [*DRAFTERS])
def test_texts_stay_behind_graphs_of_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with the padding of a graph, on every rank."""
    for module in (admission, commit):
        monkeypatch.setattr(module, "worth_on", lambda _device: GPU_WORTH)
    rng, ended = random.Random(3), demo_prompts()
    asked = [[rng.randrange(3, 500) for _ in range(n)] + list(ended[0][0]) for n in (193, 230, 290, 201)]
    found = []
    for on in (True, False):
        monkeypatch.setattr(behind_prompt, "ON", on)
        with RankRig(DEMO, 2, np=3, ctx=410, padded=True, **DRAFTERS[kind]) as r:
            arena, w = r.loop.worker.arena, Watched(r, overwrites=False)
            assert arena is not None
            for one in (arena, r.ranks.followers[1].arena):
                one.prompts |= {256, 320}
            heard = []
            for i, prompt in enumerate([*asked, *asked[::-1]]):
                heard.append(r.submit(prompt, 25 + 7 * (i % 3), GREEDY, cache_prompt=i % 2 > 0))
                for _ in range(4 * (i % 2)):
                    r.loop.step()
            r.run()
            r.ranks.settle()
        assert (w.behind["decodes, ahead"] > 1) == on, w.behind
        found.append([h.tokens for h in heard])
    assert found[0] == found[1]
