"""One slot's data never reaches another: NaN in idle slots, failures of one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from engine_rig import FIXTURES, GREEDY, Rig, rig
from known_texts import N_TEXT, known_texts, tiny

from pyspec.draft.chain import Chain
from pyspec.draft.dflash import DFlash
from pyspec.errors import SlotError
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory

QWEN35, NAN = FIXTURES / "qwen35.gguf", float("nan")


def speculating(kind: str, np: int) -> tuple[Path, Rig]:
    if kind == "mtp":
        return QWEN35, rig(
            QWEN35, np=np, spec_type="mtp", n_draft_max=3, n_draft_fixed=True, page_size=16
        )
    path = tiny("qwen35")
    return path, rig(
        path, np=np, draft_path=tiny("qwen35", drafter=True), n_draft_fixed=True, page_size=16
    )


def memories(r: Rig) -> list[Memory]:
    drafter = r.loop.drafter
    own = (
        drafter.block.memory
        if isinstance(drafter, Chain)
        else drafter.net.memory
        if isinstance(drafter, DFlash)
        else None
    )
    return [r.loop.memory] if own is None else [r.loop.memory, own]


def poison(r: Rig, keep: list[int]) -> None:
    """NaN in every KV row that no slot of `keep` holds, in all states of the other slots, and in every record."""
    size = r.loop.table.page_size
    held = {page * size + i for s in keep for page in r.loop.table.slots[s].pages for i in range(size)}
    rows = torch.tensor([i for i in range(r.loop.table.n_row) if i not in held])
    idle = torch.tensor([s.index for s in r.loop.table.slots if s.index not in keep])
    for memory in memories(r):
        for pool in memory.kv.values():
            pool.k[rows], pool.v[rows] = NAN, NAN
        for layer in memory.states.values():
            for t in layer.tensors():
                t[idle] = NAN


def untouched(r: Rig, slots: list[int]) -> bool:
    return all(
        bool(t[slots].isnan().all()) for layer in r.loop.memory.states.values() for t in layer.tensors()
    )


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_nan_in_idle_slots_and_free_pages_stays_there(kind: str) -> None:
    path, r = speculating(kind, 4)
    texts = list(known_texts(path).items())[:2]
    poison(r, [])
    heard = [r.submit(p, N_TEXT, slot=s) for (p, _), s in zip(texts, (1, 2), strict=True)]
    while not r.loop.is_idle:
        r.loop.step()
        poison(r, [s.index for s in r.loop.table.slots if s.busy])  # their freed pages, too
        assert untouched(r, [0, 3])
    for h, (_, text) in zip(heard, texts, strict=True):
        assert h.tokens == text
        assert h.timings.draft_n > 0
    used = {p for s in r.loop.table.slots for p in s.pages}
    size = r.loop.table.page_size
    free = torch.tensor(
        [p * size + i for p in range(r.loop.table.n_page) if p not in used for i in range(size)]
    )
    for memory in memories(r):
        assert all(bool(pool.k[free].isnan().all()) for pool in memory.kv.values()), (
            "a free page was written"
        )


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_poisoned_slot_is_as_good_as_new(kind: str) -> None:
    path, r = speculating(kind, 1)
    (prompt, text), (other, other_text) = list(known_texts(path).items())[:2]
    for p, want in ((prompt, text), (other, other_text), (prompt, text)):
        poison(r, [])
        r.loop.table.slots[0].tokens.clear()
        assert r.generate(p, N_TEXT, cache_prompt=False).tokens == want


def failing(r: Rig, slot: int, after: int, break_it: str) -> None:
    """From forward number `after` on, once: the slot's logits become NaN, or the forward refuses the slot."""
    n = count(1)

    def bad(batch: Batch, forward: Callable[[], Out]) -> Out | None:
        mine = next((i for i, seq in enumerate(batch.seqs) if seq.slot == slot and seq.n_out), None)
        if next(n) < after or mine is None:
            return None
        if break_it == "refuse":
            error = SlotError("the kernel found a bad index")
            error.slot = slot
            raise error
        out = forward()
        logits, at = out.logits.clone(), sum(seq.n_out for seq in batch.seqs[:mine])
        logits[at : at + batch.seqs[mine].n_out, 7] = {"nan": NAN, "inf": float("inf")}[break_it]
        return replace(out, logits=logits)

    r.strike(bad)


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("break_it", ["nan", "inf", "refuse"])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
@pytest.mark.parametrize("after", [1, 6])
def test_one_slots_failure_is_its_own(kind: str, break_it: str, after: int) -> None:
    path, r = speculating(kind, 3)
    texts = list(known_texts(path).items())[:3]
    heard = [r.submit(p, N_TEXT, slot=i) for i, (p, _) in enumerate(texts)]
    failing(r, 1, after, break_it)
    r.run()
    error = heard[1].error
    assert isinstance(error, SlotError), error
    assert heard[1].tokens == texts[1][1][: len(heard[1].tokens)]
    for i in (0, 2):
        assert heard[i].tokens == texts[i][1]
    assert r.loop.table.slots[1].n_past == 0, "nothing of a failed slot may be reused"
    again = r.generate(texts[1][0], N_TEXT, slot=1)
    assert again.tokens == texts[1][1] and again.timings.cache_n == 0


def test_a_failure_of_no_named_slot_ends_all_requests_and_the_engine_lives_on() -> None:
    path, r = speculating("mtp", 2)
    prompt, text = next(iter(known_texts(path).items()))
    heard = [r.submit(prompt, N_TEXT) for _ in range(2)]

    def bad(batch: Batch, forward: Callable[[], Out]) -> Out:
        raise SlotError("something, somewhere")

    r.strike(bad)
    r.run()
    assert all(isinstance(h.error, SlotError) for h in heard)
    assert r.generate(prompt, N_TEXT).tokens == text


def test_a_failing_drafter_costs_drafts_and_nothing_else() -> None:
    path, r = speculating("mtp", 2)
    texts = list(known_texts(path).items())[:2]
    drafter = r.loop.drafter
    assert isinstance(drafter, Chain)
    r.call_by_call()
    forward, n = drafter.block.forward, 0

    def bad(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        if n % 4 == 0:  # also in the middle of a chain
            raise SlotError("no")
        return forward(batch, hidden)

    drafter.block.forward = bad  # type: ignore[method-assign]
    heard = r.all([p for p, _ in texts], N_TEXT)
    assert [h.tokens for h in heard] == [t for _, t in texts]
    assert r.loop.stats.guard_trips > 2


@pytest.mark.parametrize("n_draft", [0, 5])
def test_banning_every_token_fails_one_request(n_draft: int) -> None:
    path, r = speculating("dflash", 2)
    (prompt, text), (other, _) = list(known_texts(path).items())[:2]
    ban = tuple((t, float("-inf")) for t in range(r.info.n_vocab))
    bad = r.submit(other, 5, replace(GREEDY, logit_bias=ban), n_draft_max=n_draft)
    good = r.submit(prompt, N_TEXT)
    r.run()
    assert isinstance(bad.error, SlotError) and good.tokens == text
