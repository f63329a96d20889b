"""An engine starts with any number of slots: all values computed from slots and drafts are checked, with fake forwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from draft_fakes import FakeDrafter
from engine_rig import DEMO, DEMO_DRAFT, Rig, fake_rig, rig

from pyspec.config import EngineSettings
from pyspec.device.capture import capture
from pyspec.draft.blocks import BlockLength
from pyspec.draft.chain import Chain, most_waiting
from pyspec.draft.dflash import DFlash, held_rows
from pyspec.draft.drafter import DraftPlan
from pyspec.engine.load import load as loading
from pyspec.engine.load import warmup
from pyspec.engine.load.warmup import (
    EVEN,
    PROBE_PROMPT,
    PROBE_TOKENS,
    check_drafter,
    rehearsed,
    warm_up,
)
from pyspec.engine.loop.round import RowLimits
from pyspec.engine.plan import describe, planned_bytes
from pyspec.engine.plan.longest import widened
from pyspec.gguf import open_gguf
from pyspec.request import SamplingParams
from pyspec.slots.arena import BUCKETS, WIDE, Arena, bucket_of, most_rows
from pyspec.slots.batch import Batch
from pyspec.slots.table import SlotTable
from pyspec.text.template import ChatTemplate

CPU = torch.device("cpu")
SLOTS = range(1, 34)
KINDS = ("none", "mtp", "dflash", "ngram")
BLOCK = 16  # rows of the blocks


# -- rounds of a warm-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_max", [0, 1, 2, 3, 5, 7, 8, 13, 15, 16, 64])
def test_a_warm_up_has_rounds_for_every_number_of_slots(n_max: int) -> None:
    for n_slot in (*range(1, 129), 131, 200, 255, 256):
        plan = rehearsed(n_slot, n_max)
        assert plan[0][0] == n_slot, "of all slots first"
        for busy, drafts in plan:
            assert 1 <= busy <= n_slot and drafts[0] == (0, 0)
            for live, each in drafts[1:]:
                assert 1 <= live <= busy and 1 <= each <= n_max, (n_slot, busy, drafts)
        # for each graph that rounds of all slots use, one round of the warm-up has that size
        rows = {
            bucket_of(busy + live * each, WIDE[-1]) for busy, drafts in plan for live, each in drafts
        }
        least, most = bucket_of(n_slot, WIDE[-1]), n_slot * (n_max + 1)
        wanted = {n for n in BUCKETS if least is not None and least <= n < min(most, EVEN)}
        assert wanted <= rows, f"-np {n_slot}, {n_max} drafts: no round of {sorted(wanted - rows)} rows"


# -- captures of a start -----------------------------------------------------------------------------------------------


class Recorder:
    """In place of graphs: records and checks batches."""

    by_single = False

    def __init__(self) -> None:
        self.batches: list[tuple[int | None, int]] = []

    def __call__(self, batch: Batch) -> None:
        assert batch.n_row > 0 and all(seq.width > 0 for seq in batch.seqs)
        self.batches.append((batch.bucket, batch.n_place))

    def seal(self) -> None:
        pass


def plan_of(kind: str, np: int, n_draft: int) -> DraftPlan:
    if kind == "mtp":
        return DraftPlan(kind=kind, n_draft=n_draft, observes="hidden", n_waiting=most_waiting(np))
    if kind == "dflash":
        return DraftPlan(
            kind=kind,
            n_draft=min(n_draft, BLOCK - 1),
            taps=(0,),
            block=BlockLength(BLOCK),
            n_held=held_rows(np),
        )
    return DraftPlan(kind=kind, n_draft=n_draft if kind == "ngram" else 0)


def drafter_of(kind: str, plan: DraftPlan, table: SlotTable) -> object:
    """A drafter that captures graphs, without its network."""
    np = len(table.slots)
    if kind == "mtp":
        chain = object.__new__(Chain)
        chain.table, chain.device, chain.plan, chain.most_waiting = table, CPU, plan, most_waiting(np)
        pages, chain.states = table.n_page // np, [None] * np
        chain.memory = SimpleNamespace(parts=(None,))  # type: ignore[assignment]
        chain.arenas = [
            Arena(np, pages, CPU, max(plan.n_draft + 1, chain.most_waiting)) for _ in range(3)
        ]
        chain._first, chain._late = Recorder(), Recorder()  # type: ignore[assignment]
        chain._steps = (Recorder(),)  # type: ignore[assignment]
        return chain
    if kind == "dflash":
        block = object.__new__(DFlash)
        block.table, block.device, block.plan = table, CPU, plan
        block.net = SimpleNamespace(c=SimpleNamespace(mask_id=1, block=BLOCK, n_embd=8))  # type: ignore[assignment]
        block.arena, block.block, block.inject = (
            Arena(np, table.n_page // np, CPU, BLOCK),
            Recorder(),
            Recorder(),
        )  # type: ignore[assignment]
        block._tokens = lambda rows, n_seq, n_draft, given: rows[: n_seq * n_draft]  # type: ignore[assignment,method-assign,return-value]
        return block
    return None


def captured(
    kind: str,
    np: int,
    n_draft: int,
    n_ctx: int,
    page_size: int = 32,
    batch: int = 2048,
    ubatch: int = 512,
) -> Recorder:
    """Capture as a load does: the table and the widths are those of a description."""
    plan = plan_of(kind, np, n_draft)
    overhang = max(plan.overhang, plan.n_draft + 1)
    table = SlotTable(np, np * -(-(n_ctx + overhang) // page_size), page_size)
    forward = Recorder()
    worker = SimpleNamespace(
        table=table,
        plan=plan,
        n_draft=plan.n_draft,
        device=CPU,
        arena=Arena(np, table.pages_for(n_ctx + overhang), CPU, plan.n_draft + 1),
        forward=forward,
        drafter=drafter_of(kind, plan, table),
        target=SimpleNamespace(most_captured_prompt=0),
        memory=SimpleNamespace(reset=lambda slot: None),
    )
    limits = RowLimits(decoding=ubatch, prompts=batch)
    capture(worker, limits.prompts, 0, limits.decoding)  # type: ignore[arg-type]
    table.check()
    return forward


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_captured_for_every_number_of_slots(kind: str) -> None:
    for np in (*SLOTS, 67, 129):
        n_draft = (3, 1, 7, 16)[np % 4]
        forward = captured(kind, np, n_draft, n_ctx=(97, 301, 1021, 333)[np % 4])
        width = plan_of(kind, np, n_draft).n_draft + 1
        rows = {bucket for bucket, _ in forward.batches if bucket is not None}
        assert {n for n in BUCKETS if n <= min(np * width, most_rows(np, width))} <= rows | {
            bucket_of(min(np, BUCKETS[-1]))
        }


@pytest.mark.sampled(most=3)
@pytest.mark.parametrize("n_ctx", [1, 5, 31, 33, 65])
def test_contexts_smaller_than_a_page_start(n_ctx: int) -> None:
    for page_size, batch, ubatch in ((16, 3, 1), (32, 31, 31), (64, 4097, 7), (16, 16, 16)):
        for kind in KINDS:
            captured(kind, 7, 5, n_ctx, page_size, batch, ubatch)


# -- a start ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No round of a warm-up is timed."""
    monkeypatch.setattr(warmup, "BUDGET_S", -1.0)
    yield


def warmed(r: Rig, n_overhang: int) -> None:
    with torch.inference_mode():
        warm_up(r.loop, r.tokenizer, n_overhang, 0)
    assert r.loop.is_idle and not any(slot.pages for slot in r.loop.table.slots)
    r.loop.table.check()


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("n_draft", [0, 1, 3, 8, 15])
def test_every_number_of_slots_warms_up(at_once: None, n_draft: int) -> None:
    for np in SLOTS:
        drafter = FakeDrafter(n_draft) if n_draft else None
        warmed(fake_rig(np, drafter, ctx=(97, 301, 255)[np % 3]), 9)


@pytest.mark.parametrize(("np", "n_draft"), [(10, 0), (7, 5)])
def test_a_warm_up_runs_all_its_rounds(monkeypatch: pytest.MonkeyPatch, np: int, n_draft: int) -> None:
    monkeypatch.setattr(warmup, "BUDGET_S", 1e9)
    monkeypatch.setattr(warmup, "N_ROUND", 1)
    r = fake_rig(np, FakeDrafter(n_draft) if n_draft else None, ctx=331)
    seen: set[tuple[int, int] | None] = set()
    step: Callable[[], None] = r.loop.step
    monkeypatch.setattr(r.loop, "step", lambda: (seen.add(r.loop.controller.force), step())[1])
    warmed(r, 9)
    assert {one for _, drafts in rehearsed(np, n_draft) for one in drafts} <= seen


def test_what_a_warm_up_reserves_is_there_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release after it frees pieces of other sizes, and the reserved piece with them."""
    done: list[object] = []
    monkeypatch.setattr(loading, "warm_up", lambda loop, tokenizer, n, n_bytes: done.append(n_bytes))
    monkeypatch.setattr(loading.temporary, "release", lambda device: done.append("given back"))
    monkeypatch.setattr(loading, "hold", lambda device, n_bytes: done.append(n_bytes))
    for name, n_bytes in (("device_checkpoints", 30), ("start_bytes", 4)):
        monkeypatch.setattr(loading, name, lambda d, n_bytes=n_bytes: n_bytes)
    loop = SimpleNamespace(pictures=SimpleNamespace(warm_up=lambda: done.append("pictures")))
    settings = SimpleNamespace(check_tap_shift=False)
    d = SimpleNamespace(
        device=CPU, is_cuda=True, n_ctx=300, settings=settings, tokenizer=None, n_overhang=0
    )
    loading._warm_up(loop, d, SimpleNamespace(activations=500))  # type: ignore[arg-type]
    assert done == [534, "given back", 534, "pictures"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_drafter_is_checked_on_the_text_that_requests_get(
    monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    r, given = rig(DEMO, np=3, ctx=301, draft_path=DEMO_DRAFT), []
    monkeypatch.setattr(warmup, "BUDGET_S", 1e3)
    monkeypatch.setattr(
        DFlash, "check", lambda self, target, slot, tokens: given.append((slot.n_past, tokens))
    )
    with open_gguf(DEMO) as file:
        template = ChatTemplate.from_metadata(file.metadata) if is_chat else None
    asked = r.generate([5, 6, 7], 9).tokens
    worker, said = r.loop.worker, [{"role": "user", "content": PROBE_PROMPT}]
    check_drafter(worker, 1.0, r.tokenizer, template, r.info.n_overhang)
    worker.table.check()
    assert not any(slot.pages or slot.busy for slot in worker.table.slots)
    prompt = r.tokenizer.encode(PROBE_PROMPT if template is None else template.render(said))
    answer = r.generate(prompt, PROBE_TOKENS, SamplingParams(temperature=0.0)).tokens
    assert given == [(0, [*prompt, *(t for t in answer if t not in r.tokenizer.eog)])]
    assert r.generate([5, 6, 7], 9).tokens == asked
    check_drafter(worker, 1e5, r.tokenizer, template, r.info.n_overhang)
    assert len(given) == 1, "forwards of 100 s are too slow for a check"


@pytest.mark.slow
@pytest.mark.sampled(most=9)
@pytest.mark.parametrize("n_ctx", [0, 71, 501])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("np", [5, 10, 23, 33])
def test_a_load_starts_and_answers(at_once: None, np: int, kind: str, n_ctx: int) -> None:
    draft = DEMO_DRAFT if kind == "dflash" else None
    r = rig(
        DEMO, np=np, ctx=n_ctx, spec_type=kind, draft_path=draft, warm_up=True, check_tap_shift=False
    )
    warmed(r, r.info.n_overhang)
    assert len(r.generate([1, 2, 3], 9).tokens) == 9


def test_plans_of_every_number_of_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Described as on a GPU: widths, pages, graphs and bytes."""
    caplog.set_level(logging.CRITICAL)
    first = describe.describe(DEMO, EngineSettings(ctx=301), describe.AssumedGpu(80 << 30))
    for np in (*SLOTS, 100, 255, 256):
        for kind in ("none", "mtp", "ngram"):
            for n_ctx, n_max in ((97, 1), (1023, 7), (0, 16)):
                asked = describe.replace(
                    first, settings=EngineSettings(np=np, ctx=n_ctx, spec_type=kind, n_draft_max=n_max)
                )
                d = (
                    describe.resized(asked, np, n_ctx or 2048)
                    if n_ctx
                    else widened(describe.replace(asked, n_ctx=2048))
                )
                plan = planned_bytes.plan_memory(d)
                assert plan.total == sum(n for _, n in plan.by_purpose) > 0
                assert d.n_page * d.settings.page_size >= np * d.n_ctx


def test_batches_of_prompts_share_rows_at_odd_sizes() -> None:
    """-b and -ub smaller than the slots, or odd: every round has rows for decoding slots, and prompts end."""
    for np, ubatch in ((7, 1), (7, 5), (3, 31), (10, 33)):
        r = fake_rig(np, ctx=211, ubatch=ubatch)
        heard = [r.submit([3 + i] * (17 + 5 * i), 5) for i in range(np + 2)]
        r.run()
        assert all(len(h.tokens) == 5 for h in heard)
