"""Shorter blocks where many slots draft: their lengths, their drafts, and a graph for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, rig
from harness import DEVICE, Bench
from known_texts import demo_prompts, tiny

from pyspec import synth
from pyspec.draft import dflash
from pyspec.draft.blocks import FEW_ROWS, FEW_ROWS_CPU, LEAST, BlockLength
from pyspec.draft.dflash import DFlash
from pyspec.slots.arena import bucket_of, places_of
from pyspec.slots.batch import lay_out
from pyspec.slots.drafts import DraftRequest

FEW = "FEW_ROWS_CPU" if DEVICE.type == "cpu" else "FEW_ROWS"


@pytest.mark.parametrize("few_rows", [FEW_ROWS, FEW_ROWS_CPU])
@pytest.mark.parametrize("trained", [2, 7, 8, 10, 16])
def test_a_block_holds_its_draft_and_is_the_trained_one_where_that_is_cheap(
    trained: int, few_rows: int
) -> None:
    block = BlockLength(trained, few_rows)
    for n_slot in (1, 4, 8, 9, 16, 17, 64):
        for n_draft in range(1, trained):
            rows = block.rows(n_slot, n_draft)
            assert n_draft < rows <= trained
            assert rows == trained or (n_slot * trained > few_rows and rows >= LEAST)
        whole = block.depths(n_slot, trained - 1)
        assert whole[-1] == trained - 1 and list(whole) == sorted(set(whole))
        lengths = [block.rows(n_slot, n) for n in range(1, trained)]
        assert len(set(lengths)) == len(whole) and [lengths[n - 1] for n in whole] == sorted(
            set(lengths)
        )
        assert block.forward_rows(n_slot, 1)[-1] == n_slot * block.rows(n_slot, 1)


def test_depths_are_where_blocks_become_longer() -> None:
    block = BlockLength(16)
    assert block.depths(32, 15) == (3, 7, 15)
    assert block.depths(32, 5) == (3, 5)
    assert block.depths(8, 15) == (15,)
    assert BlockLength(16, FEW_ROWS_CPU).depths(1, 15) == (3, 7, 15)
    assert BlockLength(8, FEW_ROWS_CPU).depths(1, 7) == (7,)


def drafts_of(draft: Path, n_draft: int, ran: list[int]) -> list[list[int]]:
    """Of three slots with contexts of different lengths; `ran` gets the rows of their forward."""
    bench = Bench(tiny("qwen35"), n_slot=3)
    drafter = bench.drafter("dflash", draft, n_draft=7)
    assert isinstance(drafter, DFlash)
    for slot, length in zip(bench.table.slots, (40, 3, 17), strict=True):
        drafter.begin(slot, None)
        seq = bench.seq(slot.index, [(7 * i + slot.index) % 251 for i in range(length)])
        batch = lay_out(bench.table, [seq], DEVICE)
        out = bench.target.forward(batch, drafter.plan.taps)
        drafter.absorb(batch, out)
        drafter.observe(batch, [length], out)
        bench.commit(seq, length)
    inner = drafter.block
    drafter.block = lambda batch: (ran.append(batch.n_row), inner(batch))[1]  # type: ignore[assignment, func-returns-value]
    found = drafter.draft([DraftRequest(slot, 10 + slot.index, n_draft) for slot in bench.table.slots])
    return [list(drafts.tokens) for drafts in found]


@pytest.mark.parametrize("n_draft", [1, 3, 4, 7])
def test_a_short_block_of_causal_layers_drafts_what_the_whole_one_does(
    n_draft: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = synth.drafter_of(synth.find("qwen35", tiny=True))
    dims = replace(dims, window=24, sliding=(True,) * len(dims.sliding))
    draft = synth.write(dims, tmp_path / "d.gguf", quant="f32", tiny=True, drafter=True)
    ran: list[int] = []
    monkeypatch.setattr(dflash, FEW, 128)
    whole = drafts_of(draft, n_draft, ran)
    monkeypatch.setattr(dflash, FEW, 0)
    assert drafts_of(draft, n_draft, ran) == whole and all(len(d) == n_draft for d in whole)
    assert ran[1] == 3 * max(LEAST, 1 << n_draft.bit_length()) <= ran[0]


@pytest.mark.slow
def test_texts_are_the_same_and_drafts_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's layers see the whole block: their drafts may differ, written keys may not."""
    prompts = [prompt for prompt, _ in demo_prompts()[:6]]
    params = replace(GREEDY, ignore_eos=False)
    plain = rig(DEMO)
    texts = [plain.generate(prompt, 60, params).tokens for prompt in prompts]
    kept = []
    for few_rows in (128, 0):
        monkeypatch.setattr(dflash, FEW, few_rows)
        r = rig(DEMO, draft_path=DEMO_DRAFT, n_draft_max=3, n_draft_fixed=True)
        results = [r.generate(prompt, 60, params) for prompt in prompts]
        assert [result.tokens for result in results] == texts
        kept.append(sum(sum(result.timings.accepted_per_pos) for result in results))
    assert kept[1] > 0.93 * kept[0] > 0


@pytest.mark.parametrize("n_slot", [1, 7, 12, 40])
def test_every_draft_has_a_graph(n_slot: int, files: Path) -> None:
    """For all slots and lengths of drafts: the warm-up has run a forward of that size, where one of the arena holds it."""
    bench = Bench(tiny("qwen35"), n_slot=n_slot)
    drafter = bench.drafter("dflash", files, n_draft=7)
    assert isinstance(drafter, DFlash)

    def graph(n: int, rows: int) -> tuple[int | None, int]:
        bucket = bucket_of(n * rows)
        return bucket, next((p for p in places_of(n_slot, bucket or 1) if p >= n), n_slot)

    shapes = drafter._shapes()
    captured = {graph(*shape) for shape in shapes[:-1]}
    needed = {graph(n, drafter.length.rows(n, k)) for n in range(1, n_slot + 1) for k in range(1, 8)}
    assert {key for key in needed if key[0] is not None} == captured and len(captured) == len(shapes) - 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dims = synth.drafter_of(synth.find("qwen35", tiny=True))
    return synth.write(
        dims, tmp_path_factory.mktemp("blocks") / "d.gguf", quant="f32", tiny=True, drafter=True
    )
