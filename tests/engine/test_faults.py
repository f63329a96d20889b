"""A kernel's guard that trips ends its request; a drafter that loses track costs drafts. Other requests continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import pytest
import torch
from draft_fakes import Oracle, text_after
from engine_rig import Rig, fake_rig
from known_texts import N_TEXT, known_texts
from test_isolation import NAN, speculating

from pyspec.cuda import faults
from pyspec.cuda.op import FaultPlace, guarded_ops
from pyspec.engine.loop.round import RowLimits
from pyspec.errors import DeviceError, OutOfBounds, SlotError
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.drafts import DraftRequest, Drafts

CPU = torch.device("cpu")
GUARDS = {op.name: op.guard for op in guarded_ops().values()}
LOST = [
    op for op, guard in GUARDS.items() if guard.lost
]  # no request is to blame: the engine is replaced
OF_REQUESTS = [op for op in GUARDS if op not in LOST]


def trip(op: str, place: int, index: int = 99, limit: int = 12) -> None:
    """The effect of a kernel's guard: the first one writes."""
    record = faults.record(CPU)
    if not record[0]:
        record.copy_(torch.tensor([1, GUARDS[op].number, place, index, limit], dtype=torch.int32))


@pytest.fixture(autouse=True)
def untripped() -> None:
    faults.record(CPU).zero_()


def tripping(r: Rig, op: str, slot: int, after: int) -> None:
    """In forward number `after` of the slot, once: trip a guard, and spoil the guarded values."""
    n = count(1)

    def bad(batch: Batch, forward: Callable[[], Out]) -> Out | None:
        at = next((i for i, seq in enumerate(batch.seqs) if seq.slot == slot), None)
        if at is None or next(n) < after:
            return None
        out = forward()
        last_row = batch.starts[at + 1] - 1
        places = {FaultPlace.SLOT: slot, FaultPlace.ROW: last_row, FaultPlace.SEQUENCE: at}
        trip(op, places[GUARDS[op].place])
        for layer in r.loop.memory.states.values():
            for t in layer.tensors():
                t[slot] = NAN
        return out

    r.strike(bad)


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize(
    "op", [op for op in OF_REQUESTS if op != "norms"]
)  # which does not know the slot of a row
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
@pytest.mark.parametrize("after", [1, 5])
def test_a_tripped_guard_ends_the_request_it_names(kind: str, op: str, after: int) -> None:
    path, r = speculating(kind, 3)
    texts = list(known_texts(path).items())[:3]
    heard = [r.submit(p, N_TEXT, slot=i) for i, (p, _) in enumerate(texts)]
    tripping(r, op, 1, after)
    r.run()
    error = heard[1].error
    assert isinstance(error, OutOfBounds) and error.slot == 1
    assert str(error) == f"kernel {op}, slot 1: index 99 is outside 0..11"
    assert heard[1].tokens == texts[1][1][: len(heard[1].tokens)]
    for i in (0, 2):
        assert heard[i].tokens == texts[i][1], (
            "its results of that round were right, and its state was folded once"
        )
    assert r.loop.stats.guard_trips == r.loop.stats.requests_failed == 1
    assert r.loop.table.slots[1].n_past == 0
    again = r.generate(texts[1][0], N_TEXT, slot=1)
    assert again.tokens == texts[1][1] and again.timings.cache_n == 0


def test_a_guard_may_trip_in_the_middle_of_a_prompt() -> None:
    path, r = speculating("mtp", 2)
    texts = [(p, t) for p, t in known_texts(path).items() if len(p) > 40][:2]
    r.loop.limits = RowLimits(16, 16)
    heard = [r.submit(p, N_TEXT, slot=i) for i, (p, _) in enumerate(texts)]
    tripping(r, "attend", 0, 2)
    r.run()
    assert isinstance(heard[0].error, OutOfBounds) and heard[0].tokens == []
    assert heard[1].tokens == texts[1][1]
    assert r.generate(texts[0][0], N_TEXT, slot=0).tokens == texts[0][1]


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("op", OF_REQUESTS)
def test_a_guard_that_names_nobody_ends_the_round_s_requests(op: str) -> None:
    path, r = speculating("mtp", 2)
    prompt, text = next(iter(known_texts(path).items()))
    heard = [r.submit(prompt, N_TEXT) for _ in range(2)]

    def bad(batch: Batch, forward: Callable[[], Out]) -> Out:
        trip(op, -1)
        return forward()

    r.strike(bad)
    r.run()
    assert all(isinstance(h.error, OutOfBounds) for h in heard) and r.loop.stats.guard_trips == 1
    assert r.generate(prompt, N_TEXT).tokens == text


@pytest.mark.parametrize("op", LOST)
def test_a_guard_of_what_all_need_ends_the_engine_and_no_token_of_that_round_is_told(op: str) -> None:
    path, r = speculating("mtp", 3)
    texts = list(known_texts(path).items())[:3]
    heard = [r.submit(p, N_TEXT, slot=i) for i, (p, _) in enumerate(texts)]
    tripping(r, op, 1, 4)
    with pytest.raises(DeviceError, match=GUARDS[op].lost):
        r.run()
    assert all(h.error is None for h in heard), "who supervises the engine goes on with them in the next"
    assert any(h.tokens for h in heard)
    for h, (_, text) in zip(heard, texts, strict=True):
        assert h.tokens == text[: len(h.tokens)]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_guard_that_trips_while_drafting_costs_no_request(kind: str) -> None:
    path, r = speculating(kind, 2)
    texts = list(known_texts(path).items())[:2]
    drafter = r.loop.drafter
    assert drafter is not None
    draft = drafter.draft

    def bad(asks: Sequence[DraftRequest]) -> Sequence[Drafts]:
        trip("attend", 0)
        return draft(asks)

    drafter.draft = bad  # type: ignore[method-assign]
    heard = r.all([p for p, _ in texts], N_TEXT)
    assert [h.tokens for h in heard] == [t for _, t in texts]
    assert r.loop.stats.guard_trips > 2 and r.loop.stats.requests_failed == 0


def test_what_tripped_before_a_forward_is_not_its_own() -> None:
    r = fake_rig(1, None)
    trip("gdn", 0)
    assert r.generate([1, 2, 3], 8).tokens == text_after([1, 2, 3], 8)
    assert faults.read(CPU) is None


class Forgetful(Oracle):
    """Its third observation fails."""

    n_heard = 0

    def observe(self, batch: Batch, kept: Sequence[int], out: Out) -> None:
        self.n_heard += 1
        if self.n_heard == 3:
            raise SlotError("it did not listen")
        super().observe(batch, kept, out)


def test_a_drafter_that_did_not_listen_is_not_asked_again_for_these_requests() -> None:
    r = fake_rig(3, Forgetful(5))
    prompts = [[i, 2, 3] for i in range(3)]
    heard = [r.submit(p, 40, slot=i) for i, p in enumerate(prompts[:2])]
    r.steps(3)
    assert r.loop.speculator.lost_track == {0, 1} and r.loop.drafter.open == {}
    late = r.submit(prompts[2], 40, slot=2)
    r.run()
    for h, p in zip([*heard, late], prompts, strict=True):
        assert h.tokens == text_after(p, 40)
    assert [h.timings.draft_n for h in heard] == [10, 10], "the drafts of two rounds"
    assert late.timings.draft_n_accepted > 30, "others are drafted for as before"
    assert r.loop.speculator.lost_track == set() and r.loop.drafter.open == {}
    again = r.generate(prompts[0], 40, slot=0)
    assert again.timings.cache_n == 0 and again.timings.draft_n_accepted > 30


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_real_drafters_survive_a_lost_observation(kind: str) -> None:
    path, r = speculating(kind, 3)
    texts = list(known_texts(path).items())[:3]
    drafter, n = r.loop.drafter, 0
    assert drafter is not None
    observe = drafter.observe

    def bad(batch: Batch, kept: Sequence[int], out: Out) -> None:
        nonlocal n
        n += 1
        if n == 4:
            raise SlotError("no")
        observe(batch, kept, out)

    drafter.observe = bad  # type: ignore[method-assign]
    heard = [r.submit(p, N_TEXT, slot=i) for i, (p, _) in enumerate(texts[:2])]
    r.steps(4)
    assert r.loop.speculator.lost_track == {0, 1}
    heard.append(r.submit(texts[2][0], N_TEXT, slot=2))
    r.run()
    assert [h.tokens for h in heard] == [t for _, t in texts]
    assert heard[2].timings.draft_n > 0
    for i, (p, t) in enumerate(texts):
        again = r.generate(p, N_TEXT, slot=i)
        assert again.tokens == t and again.timings.draft_n > 0


def test_a_fault_names_its_slot() -> None:
    slots, starts = [4, 2, 7], [0, 3, 4, 9]
    for op, place, slot in (
        ("gdn", 2, 2), ("gdn", 1, -1), ("gdn", -1, -1),
        ("attend", 0, 4), ("attend", 2, 7), ("attend", 3, -1), ("attend", -1, -1),
        ("rope_kv", 0, 4), ("rope_kv", 2, 4), ("rope_kv", 3, 2), ("rope_kv", 8, 7), ("rope_kv", 9, -1), ("number 9", 1, 2),
    ):  # fmt: skip
        names = GUARDS[op].place if op in GUARDS else FaultPlace.SEQUENCE
        assert faults.Fault(op, place, 1, 1, names).slot(slots, starts) == slot, (op, place)
