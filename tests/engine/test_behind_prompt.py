"""Rounds behind a prompt that runs alone are launched while the device reads it, and texts stay what they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from draft_fakes import N_VOCAB
from engine_rig import FIXTURES, GREEDY, Heard, Rig, plain_rig, rig
from known_texts import tiny
from plans import fix_alone
from test_prompts_alone import MODELS, RandomPick

from pyspec.cuda.faults import Fault
from pyspec.engine.loop import behind_prompt
from pyspec.engine.loop.pending_round import PendingRound
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.request import SamplingParams
from pyspec.sample.choose import Chosen
from pyspec.slots.batch import Batch

SAMPLED = SamplingParams(temperature=0.9, seed=7, ignore_eos=True)
DEEPSEEK4, LLAMA = FIXTURES / "deepseek4.gguf", FIXTURES / "llama.gguf"
FIXED: dict[str, object] = {"n_draft_fixed": True}
KINDS: dict[str, Callable[[], tuple[Path, dict[str, object]]]] = {
    **{name: partial(lambda found: found, found) for name, found in MODELS.items() if name != "deepseek4 ngram"},
    "qwen35 dflash": lambda: (tiny("qwen35"), {"draft_path": tiny("qwen35", drafter=True), "n_draft_max": 5, **FIXED}),
    "llama draft model": lambda: (LLAMA, {"draft_path": LLAMA, "n_draft_max": 3, **FIXED}),
    "deepseek4 mtp": lambda: (DEEPSEEK4, {"draft_path": FIXTURES / "deepseek4_mtp.gguf", "n_draft_max": 2, **FIXED}),
}  # fmt: skip
AHEAD = {"qwen35 mtp", "qwen35 dflash", "llama draft model", "deepseek4 mtp", "nemotron plain"}


class OftenAlone(RandomPick):
    """Lets most whole prompts run alone, the oldest first."""

    def __call__(self, whole: Sequence[int], n_verify: int) -> int | None:
        able = [i for i, n in enumerate(whole) if n]
        if not able or not n_verify or self.rng.random() < 0.1:
            return None
        self.n += 1
        return able[0]


class Watched:
    """A rig as on a GPU: rounds ahead, counts and events later, results overwritten.

    behind  rounds that follow a prompt which ran alone, by what they are and whether they were launched ahead
    drafts  by request, the drafts of its rounds by position
    """

    def __init__(self, r: Rig, *, overwrites: bool = True, graph_of: object = None) -> None:
        r.run_ahead(defers=True)
        if not r.loop.lookahead.on:
            pytest.skip(
                "kernels of this device take no heads as narrow as this model's, so no round is ahead"
            )
        if overwrites:
            r.overwrite_results()
        fix_alone(r.loop, OftenAlone(), graph_of)
        self.behind: Counter[str] = Counter()
        self.drafts: dict[str, dict[int, list[int]]] = {}
        self.r, self._read, self._was_alone = r, r.loop.read, False
        r.loop.read = self.read  # type: ignore[method-assign]

    def read(self, pending: PendingRound, ahead: PendingRound | None) -> None:
        n_prompt = sum(w.seq.keep and not w.job.is_decoding for w in pending.work)
        if self._was_alone:
            kind = "decodes" if not n_prompt else "prompt" if len(pending.work) == 1 else "joint"
            self.behind[f"{kind}, {'ahead' if pending.is_behind else 'by the host'}"] += 1
        self._was_alone = n_prompt == len(pending.work) == 1 < len(self.r.loop.jobs)
        self._read(pending, ahead)
        for w in pending.work:
            if w.draft and w.slot.index not in pending.off:
                own = self.drafts.setdefault(w.job.id, {})
                own.setdefault(w.seq.n_past, list(w.draft))


def requests(np: int) -> list[tuple[list[int], int, dict[str, object]]]:
    """Prompts, lengths and settings: some continue a common header, some end by a token, the first one or a later one."""
    rng = random.Random(np)
    header = [rng.randrange(3, 60) for _ in range(40)]
    ends = frozenset(rng.sample(range(N_VOCAB), N_VOCAB // 12))
    by_token = {"params": replace(GREEDY, ignore_eos=False), "eog": ends}
    found = []
    for i in range(5 * np):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(2, 70))]
        prompt = header + prompt[:20] if i % 4 == 3 else prompt
        found.append((prompt, rng.randrange(1, 30), by_token if i % 3 == 0 else {}))
    return found


def churn(r: Rig, path: Path, asked: Sequence[tuple[list[int], int, dict[str, object]]]) -> list[Heard]:
    """Requests that join in bursts and leave, each with its text alone."""
    rng, np = random.Random(3), r.loop.n_slot
    cold = plain_rig(path)
    want = [cold.generate(prompt, n, **own).tokens for prompt, n, own in asked]  # type: ignore[arg-type]
    heard: list[Heard] = []
    for i, (prompt, n, own) in enumerate(asked):
        heard.append(r.submit(prompt, n, **own))  # type: ignore[arg-type]
        if i % 5 == 4:
            r.loop.cancel(heard[-2].job)
        for _ in range(rng.randrange(2, 12) if i % np == np - 2 else 0):
            r.loop.step()
            r.loop.cache.check(now=True)
    r.run()
    for h, tokens in zip(heard, want, strict=True):
        assert h.tokens == tokens or (h.finish == "cancelled" and h.tokens == tokens[: len(h.tokens)])
    return heard


@pytest.mark.sampled(1, most=3)
@pytest.mark.parametrize("np", [5, 3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*KINDS])
def test_rounds_behind_a_lone_prompt_are_ahead_and_texts_and_drafts_stay(
    name: str, np: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = KINDS[name]()
    counts, drafts = [], []
    for on in (True, False):
        monkeypatch.setattr(behind_prompt, "ON", on)
        w = Watched(rig(path, np=np, **settings))
        churn(w.r, path, requests(np))
        counts.append(w.behind)
        drafts.append(w.drafts)
    now, before = counts
    assert (
        not before["decodes, ahead"] and not before["prompt, ahead"] and before["decodes, by the host"]
    )
    assert np == 3 or now["prompt, ahead"], "another prompt needs nothing of the one before"
    assert bool(now["decodes, ahead"]) == (name in AHEAD), "drafts of the host need its tokens"
    # left to the host: behind answers of one token, before requests that can be seated, and forwards for all
    assert name not in AHEAD or 4 * now["decodes, by the host"] <= now["decodes, ahead"]
    if name in AHEAD and (n_most := settings.get("n_draft_max")):
        whole = [
            {(i, at): d for i, own in all_.items() for at, d in own.items() if len(d) == n_most}
            for all_ in drafts
        ]
        same = whole[0].keys() & whole[1].keys()
        assert len(same) > 20 and all(whole[0][x] == whole[1][x] for x in same), (
            "they are those that the host asks for"
        )


@pytest.mark.parametrize("kind", ["qwen35 mtp", "qwen35 dflash"])
def test_a_request_that_is_sampled_or_cancelled_ends_no_other(kind: str) -> None:
    """Drafts of sampled requests wait for the host, as in other rounds."""
    path, settings = KINDS[kind]()
    asked = requests(5)
    w = Watched(rig(path, np=5, **settings))
    churn(
        w.r, path, [(p, n, {"params": SAMPLED} if i % 2 else own) for i, (p, n, own) in enumerate(asked)]
    )
    assert w.behind["decodes, by the host"] and w.behind["prompt, ahead"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["qwen35 mtp", "qwen35 dflash", "nemotron plain"])
@pytest.mark.parametrize("what", ["guard", "choice", "cancel", "drafter"])
def test_a_failure_of_the_prompt_ends_its_request_alone(kind: str, what: str) -> None:
    """Found while the round behind it runs; a drafter that fails costs drafts."""
    path, settings = KINDS[kind]()
    asked = [(prompt, 25) for prompt, _, _ in requests(5)]
    cold = plain_rig(path)
    want = [cold.generate(prompt, n).tokens for prompt, n in asked]
    w = Watched(rig(path, np=3, **settings))
    wait, choose, loop = w.r.loop.wait, w.r.loop.choose, w.r.loop
    failed: set[str] = set()

    def hit(pending: PendingRound) -> bool:
        ahead = loop.lookahead.under_way
        if pending.is_settled and ahead is not None and not ahead.is_known and len(failed) < 4:
            failed.add(pending.work[0].job.id)
            return True
        return False

    def waited(pending: PendingRound) -> Fault | None:
        fault = wait(pending)
        if what == "guard" and hit(pending):
            return Fault("attend", 0, 5, 4)
        if what == "cancel" and hit(pending):
            loop.cancel(pending.work[0].job)
        return fault

    def chosen(pending: PendingRound) -> list[Chosen | None]:
        if what == "choice" and hit(pending):
            return [Chosen([], 0, error=SlotError("no choice"))]
        return choose(pending)

    loop.wait, loop.choose = waited, chosen  # type: ignore[method-assign]
    if what == "drafter" and loop.drafter is not None:
        drafter, observe = loop.drafter, loop.drafter.observe

        def observed(batch: Batch, kept: Sequence[int], out: Out) -> None:
            if len(batch.seqs) == 1 and batch.n_row > 9 and len(failed) < 2:
                failed.add(str(batch.seqs[0].slot))
                raise SlotError("it lost track")
            observe(batch, kept, out)

        drafter.observe = observed  # type: ignore[method-assign]
    heard = [w.r.submit(prompt, n) for prompt, n in asked]
    w.r.run()
    assert failed or (what == "drafter" and loop.drafter is None)
    for h, tokens in zip(heard, want, strict=True):
        if h.job.id not in failed:
            assert h.tokens == tokens
        elif what == "cancel":
            assert h.finish == "cancelled" and h.tokens == tokens[: len(h.tokens)]
        else:
            assert isinstance(h.error, SlotError) and h.tokens == tokens[: len(h.tokens)]
    assert w.behind["decodes, ahead"]


@pytest.mark.parametrize("kind", ["qwen35 mtp", "qwen35 dflash", "nemotron plain"])
def test_a_prompt_that_comes_again_starts_from_the_state_at_its_end(kind: str) -> None:
    """The state is copied while the next round runs, and that leaves it as it was."""
    path, settings = KINDS[kind]()
    cold, w = plain_rig(path), Watched(rig(path, np=3, **settings))
    others = [w.r.submit(range(5, 40 + i), 150) for i in range(2)]
    for prompt in (prompt[:40] for prompt, _, _ in requests(3)[:7:2]):
        want = cold.generate(prompt, 9).tokens
        for n_cached in (0, len(prompt) - 1):
            h = w.r.submit(prompt, 9)
            while not h.over:
                w.r.loop.step()
            assert (h.tokens, h.timings.cache_n) == (want, n_cached)
    assert w.behind["decodes, ahead"] > 2 and not any(h.over for h in others)
    w.r.run()
    assert [h.tokens for h in others] == [cold.generate(range(5, 40 + i), 150).tokens for i in range(2)]
