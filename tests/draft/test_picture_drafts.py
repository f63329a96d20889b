"""Drafters beside prompts with pictures: each reads something for every row, drafts, and the text is the target's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import DEVICE
from picture_drafters import TAPPED, drafter_for
from pictures import IMAGES, PROMPTS, Seeing, SeenPrompt, bench, read_prompt

from pyspec.draft.chain import Chain
from pyspec.draft.drafter import Drafter
from pyspec.draft.suffix_drafts import SuffixDrafts
from pyspec.draft.suffix_text import PlainTexts
from pyspec.draft.token_map import placeholder
from pyspec.gguf import open_gguf
from pyspec.slots.batch import lay_out
from pyspec.slots.drafts import DraftRequest
from pyspec.slots.images import image_id
from pyspec.slots.table import Slot

N_DRAFT = 3
QWEN = IMAGES / "qwen35.gguf"


def made(kind: str, own: Seeing) -> Drafter:
    if kind == "mtp":
        return own.drafter(kind, n_draft=N_DRAFT)
    if kind == "draft-model":
        return own.drafter("draft", IMAGES / "mistral3.gguf", n_draft=N_DRAFT)
    if kind.startswith("draft-recurrent"):
        return own.drafter("draft", QWEN, n_draft=N_DRAFT)
    return own.drafter(kind.split("-")[0], drafter_for(QWEN, kind), n_draft=N_DRAFT)


def speak(own: Seeing, drafter: Drafter, p: SeenPrompt, cuts: tuple[int, ...], n: int) -> list[int]:
    """Greedy text behind a prompt, drafted and verified."""
    slot, found = own.table.slots[0], list[int]()
    drafter.begin(slot, None)

    def run(ids: list[int], *, keep: bool) -> torch.Tensor:
        seq = replace(own.rows(0, p, ids, keep=keep), n_out=1 if keep else len(ids))
        batch = lay_out(own.table, [seq], DEVICE, pictures=p.rows)
        out = own.target.forward(batch, drafter.plan.taps)
        drafter.absorb(batch, out)
        best = out.logits.argmax(-1).tolist()
        kept = 1
        while not keep and kept < len(ids) and ids[kept] == best[kept - 1]:
            kept += 1
        kept = len(ids) if keep else kept
        drafter.observe(batch, [kept], out)
        own.commit(seq, kept)
        found.extend(best[-1:] if keep else best[:kept])
        return out.logits

    for first, end in zip((0, *cuts), (*cuts, len(p.ids)), strict=True):
        run(p.ids[first:end], keep=True)
        del found[: len(found) - 1]
    while len(found) < n:
        drafts = drafter.draft([DraftRequest(slot, found[-1], N_DRAFT)])[0].tokens
        assert len(drafts) == N_DRAFT and all(0 <= token < own.target.n_vocab for token in drafts)
        run([found[-1], *drafts], keep=False)
    return found[:n]


KINDS = ("mtp", "draft-model", "draft-recurrent", *TAPPED)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_with_every_drafter(kind: str, prompt: str) -> None:
    own, p = bench("qwen35"), read_prompt("qwen35", prompt)
    drafter = made(kind, own)
    first = p.spans[0].first
    assert speak(own, drafter, p, (first + 5, first + 9), 12) == p.tokens


@pytest.mark.parametrize("cuts", [(), (9,), (5, 6, 24, 41), (2, 37, 38)])
def test_rows_of_mtp_are_those_of_one_shot_however_the_prompt_comes(cuts: tuple[int, ...]) -> None:
    """Keys and values of all its rows, which wait and are computed later, some of them with a picture's."""
    own, p = bench("qwen35", 2), read_prompt("qwen35", "side")
    drafter = own.drafter("mtp", n_draft=N_DRAFT)
    assert isinstance(drafter, Chain)
    speak(own, drafter, p, cuts, 1)
    drafter.checkpoint(own.table.slots[0])
    seq = replace(own.rows(1, p, p.ids), n_out=0)
    batch = lay_out(own.table, [seq], DEVICE, pictures=p.rows)
    hidden = own.target.forward(batch).hidden
    before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
    drafter.block.forward(lay_out(own.table, [seq], DEVICE, pictures=p.rows), before)
    page, n = own.table.page_size, len(p.ids)
    rows = [
        torch.tensor([slot.pages[i // page] * page + i % page for i in range(n)])
        for slot in own.table.slots
    ]
    for pool in drafter.memory.kv.values():
        for plane in (pool.k, pool.v):
            assert (plane[rows[0]] - plane[rows[1]]).abs().max() < 1e-5
    in_line = tuple(replace(image, nx=image.n_row, ny=1) for image in seq.images)
    other = lay_out(own.table, [replace(seq, images=in_line, shift=0)], DEVICE, pictures=p.rows)
    drafter.block.forward(other, before)  # one position a row would be seen
    pool = next(iter(drafter.memory.kv.values()))
    assert (pool.k[rows[0]] - pool.k[rows[1]]).abs().max() > 1e-2


def test_a_draft_model_reads_the_targets_placeholder_and_else_the_first_token() -> None:
    own = bench("qwen35")
    assert (
        own.file.fields.strings("tokenizer.ggml.tokens").index("<|image_pad|>")
        == made("draft-recurrent", own).plan.placeholder
    )
    for name in ("gemma3", "mistral3"):
        tokens = open_gguf(IMAGES / f"{name}.gguf").fields.strings("tokenizer.ggml.tokens")
        known = [x for x in ("<|image_pad|>", "<image_soft_token>", "[IMG]") if x in tokens]
        want = tokens.index(known[0]) if known else 1
        assert placeholder(open_gguf(IMAGES / f"{name}.gguf")) == want


@pytest.mark.parametrize("kind", [None, PlainTexts()])
def test_suffix_drafts_end_before_a_picture(kind: PlainTexts | None) -> None:
    """Its rows are symbols that occur: a match may go through a picture, and no draft has one."""
    drafts, slot = SuffixDrafts(8, kind=kind, least=0.0), Slot(0)
    shown = [image_id(70_000, i) for i in range(5)]
    prompt = [5, 6, 7, *shown, 8, 9, 10, 11, 12, 5, 6, 7, *shown, 8, 9]
    slot.tokens.extend(prompt)
    drafts.begin(slot, prompt)
    while drafts.advance(100):
        pass
    assert drafts.draft(slot, 10, 8).tokens[:2] == [11, 12]
    slot.tokens.extend([10, 11, 12, 5])
    assert drafts.draft(slot, 6, 8).tokens == [7]
    slot.tokens.extend([6])
    assert not drafts.draft(slot, 7, 8).tokens
    drafts.end(slot)
    more = [10, 11, 12, 5, 6, 7, 3]
    assert drafts.texts[0].continues([*prompt, *more])
    assert not drafts.texts[0].continues([*prompt[:3], image_id(70_001, 0), *prompt[4:], *more])
