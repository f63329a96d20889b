"""Rounds behind a lone prompt whose rows are padded to those of a graph, as on a GPU, with results that the next forward of any shape spoils."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_rig import DEVICE, Rig, plain_rig, rig
from seen import IMAGES, N_TOKEN, look, seeing, seen
from seen import PROMPTS as SEEN
from test_behind_prompt import AHEAD, KINDS, Watched

from pyspec.draft.chain import Chain
from pyspec.draft.dflash import DFlash
from pyspec.engine.loop import admission, commit
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.engine.policy.queue import GPU_WORTH
from pyspec.models.target import Out
from pyspec.slots.arena import LEAST_PROMPT, Arena
from pyspec.slots.batch import Batch

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="its arenas stand in for a GPU's: test_on_gpu.py has the GPU's own"
)
CTX = 410
GRAPHS = {256, 320}
PROMPTS = (LEAST_PROMPT, 257), (257, 321)  # tokens of those that find one


def padded(r: Rig, width: int) -> Arena:
    """Give each caller an arena with padding, as on a GPU."""
    loop, n_slot = r.loop, r.loop.n_slot
    n_page = loop.table.pages_for(CTX + 64)

    def arena() -> Arena:
        return Arena(n_slot, n_page, torch.device("cpu"), width)

    loop.worker.arena = arena()
    loop.worker.arena.prompts |= GRAPHS
    if isinstance(loop.drafter, Chain | DFlash):
        loop.drafter.use_graphs(arena)
    return loop.worker.arena


def spoil_results(r: Rig) -> None:
    """Graphs of one kind share their memory: the next forward, of any shape, may write anything over the results of the last."""
    worker, last = r.loop.worker, list[torch.Tensor]()
    run = worker.forward

    @torch.inference_mode()
    def results(batch: Batch) -> Out:
        for t in last:
            t.fill_(float("nan"))
        out = run(batch)
        last[:] = [t for t in (out.logits, out.hidden, out.taps) if t is not None]
        return out

    worker.forward = results  # type: ignore[assignment]


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("np", [3, 5])
@pytest.mark.parametrize("name", sorted(AHEAD))
def test_texts_stay_behind_graphs_of_prompts(
    name: str, np: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some come again, and start from the state and the logits that were kept at their end while the next round ran."""
    for module in (admission, commit):
        monkeypatch.setattr(module, "worth_on", lambda _device: GPU_WORTH)
    path, settings = KINDS[name]()
    rng = random.Random(np)
    asked = []
    for i in range(10):
        n = rng.randrange(*PROMPTS[i % 2]) if i % 3 else rng.randrange(2, 60)
        asked.append(([rng.randrange(3, 60) for _ in range(n)], rng.randrange(20, 80)))
    asked += [(prompt, 7) for prompt, _ in asked[1::3]]
    cold = plain_rig(path, ctx=CTX)
    want = [cold.generate(prompt, n).tokens for prompt, n in asked]
    r = rig(path, np=np, ctx=CTX, **settings)
    r.call_by_call()
    arena, graphs, ahead = padded(r, int(str(settings.get("n_draft_max", 0))) + 1), set(), 0
    w = Watched(r, overwrites=False, graph_of=arena.prompt_bucket)
    spoil_results(r)
    read = r.loop.read

    def watch(pending, behind):  # type: ignore[no-untyped-def]
        nonlocal ahead
        if pending.launched.batch.prompt and len(r.loop.jobs) > 1:
            graphs.add(pending.launched.batch.bucket)
            ahead += behind is not None
        read(pending, behind)

    r.loop.read = watch  # type: ignore[method-assign]
    heard = []
    for i, (prompt, n) in enumerate(asked):
        heard.append(r.submit(prompt, n))
        for _ in range(rng.randrange(2, 9) if i % 2 else 0):
            r.loop.step()
            r.loop.cache.check(now=True)
    r.run()
    assert [h.tokens for h in heard] == want
    assert graphs == GRAPHS and ahead > 2 and w.behind["decodes, ahead"] > 1


@pytest.mark.parametrize(
    ("name", "drafter"), [("qwen35", "mtp"), ("qwen35", "none"), ("mistral3", "ngram")]
)
def test_prompts_with_pictures_find_graphs_and_rounds_behind_them(
    name: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They and texts take turns in the same places."""
    monkeypatch.setattr("pyspec.slots.arena.LEAST_PROMPT", 1)
    for module in (admission, commit):
        monkeypatch.setattr(module, "worth_on", lambda _device: GPU_WORTH)
    settings: dict[str, object] = {"spec_type": drafter, "n_draft_fixed": drafter != "none"}
    text = [3 + i % 50 for i in range(200)]
    want = rig(IMAGES / f"{name}.gguf", spec_type="none", ctx=CTX).generate(text, N_TOKEN).tokens
    r = seeing(name, np=3, ctx=CTX, prefix_cache=False, **settings)
    r.call_by_call()
    arena = padded(r, 1 + r.loop.controller.n_max)
    assert r.loop.pictures.encoder is not None
    arena.see(r.loop.pictures.encoder.projector.width)
    w = Watched(r, overwrites=False, graph_of=arena.prompt_bucket)
    r.loop.controller.rules = replace(r.loop.controller.rules, graphs_see=True)
    spoil_results(r)
    run, found = r.loop.worker.forward, {"picture": 0, "text": 0}

    def watch(batch: Batch) -> Out:
        if any(seq.images for seq in batch.seqs):
            found["picture"] += batch.prompt
            assert batch.prompt or len(batch.seqs) > 1
        elif batch.prompt:
            found["text"] += 1
        return run(batch)

    def read(pending: PendingRound, behind: PendingRound | None) -> None:
        if behind is not None and any(w.seq.images for w in behind.work):
            ahead.append(behind)
        w.read(pending, behind)

    r.loop.worker.forward = watch  # type: ignore[assignment]
    r.loop.read, ahead = read, list[PendingRound]()  # type: ignore[method-assign]
    beside = r.submit(text[:20], 350)
    for _ in range(2):
        heard = []
        for p in SEEN:
            heard.append((r.submit(text, N_TOKEN), want))
            heard.append((look(r, seen(name, p)), seen(name, p).tokens))
        while not all(h.over for h, _ in heard):
            r.loop.step()
        assert all(h.error is None and h.tokens == tokens for h, tokens in heard)
    assert not beside.over
    r.run()
    assert found["picture"] > 4 and found["text"] > 1 and not r.loop.worker.shown
    assert ahead or name != "mistral3", "one with pictures is launched behind a text"
