"""Prompts with pictures through whole forwards: llama.cpp's formulas, however the prompt is cut and whatever runs beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import DEVICE
from pictures import CLOSE, IMAGES, NO_PICTURES, PROMPTS, Seeing, SeenPrompt, bench, read_prompt
from rewrite import rewrite

from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.errors import EngineBug, OutOfBounds
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.kv_types import BF16, F8

CAUSAL = ("mistral3", "qwen35", "qwen3vl")
BOTH_WAYS = ("gemma3", "gemma4", "gemma4-e")
NAMES = (*CAUSAL, *BOTH_WAYS)
N_CHUNK = 157  # most rows of a forward of rings


def assert_right(got: torch.Tensor, p: SeenPrompt) -> None:
    off = (got.double() - torch.tensor(p.logits)).abs().max()
    assert off < CLOSE and got.argmax(-1).tolist() == p.tokens, off


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_formulas(name: str, prompt: str) -> None:
    own, p = bench(name), read_prompt(name, prompt)
    assert_right(own.answer(0, p, own.pieces(0, p, ())), p)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", CAUSAL)
def test_cuts_within_pictures_change_nothing(name: str, prompt: str) -> None:
    own, p = bench(name), read_prompt(name, prompt)
    image = p.spans[-1]
    cuts = (image.first - 1, image.first + 3, image.first + 4, image.end - 5, image.end + 1)
    cuts = tuple(sorted({x for x in cuts if 0 < x < len(p.ids)}))
    assert_right(own.answer(0, p, own.pieces(0, p, cuts)), p)


@pytest.mark.parametrize("name", NAMES)
def test_beside_texts_and_behind_refused_rows(name: str) -> None:
    """Seven slots: one reads pictures while six read and write text, whose logits stay what they are alone."""
    own, alone, p = bench(name, 7), bench(name), read_prompt(name, "two")
    rng = random.Random(name)
    texts = [rng.choices(range(40, 280), k=11 + 3 * i) for i in range(6)]
    want = [alone_logits(alone, text) for text in texts]
    cut = p.spans[0].end + 2  # no picture is cut
    for first, end in ((0, cut), (cut, len(p.ids))):
        parts = [text[: len(text) // 2] if not first else text[len(text) // 2 :] for text in texts]
        seqs = [own.rows(i if i < 3 else i + 1, NO_PICTURES, part) for i, part in enumerate(parts)]
        seqs.insert(3, own.rows(3, p, p.ids[first:end]))
        logits = own.see(p, *seqs)
    assert all((logits[i if i < 3 else i + 1] - x).abs().max() < CLOSE for i, x in enumerate(want))
    found = [logits[3]]
    for token in p.tokens[:-1]:  # each in a verify whose drafts are wrong
        wrong = own.rows(3, p, [token, 5, 6, 7], keep=False)
        out = own.target.forward(lay_out(own.table, [replace(wrong, n_out=4)], DEVICE))
        own.commit(wrong, 1)
        found.append(out.logits[0].cpu())
    assert_right(torch.stack(found), p)


def alone_logits(own: Seeing, text: list[int]) -> torch.Tensor:
    """Behind a text in the only slot, which is emptied again."""
    logits = own.see(NO_PICTURES, own.rows(0, NO_PICTURES, text))[-1]
    slot = own.table.slots[0]
    slot.tokens.clear()
    own.memory.reset(0)
    return logits


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_picture_that_goes_on_behind_a_forward_is_refused_for_its_slot(name: str) -> None:
    own, p = bench(name, 3), read_prompt(name, "late")
    image = p.spans[0]
    seq = own.rows(2, p, p.ids[: image.end - 1])
    with pytest.raises(OutOfBounds, match="slot 2 rows up to the end of a picture") as e:
        own.see(p, seq)
    assert e.value.slot == 2


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_the_rest_of_a_cached_picture_is_right_in_one_forward(name: str) -> None:
    """The rows that stay were computed with the whole; those behind them see it, too."""
    own, p = bench(name), read_prompt(name, "late")
    image = p.spans[0]
    own.see(p, own.rows(0, p, p.ids[: image.end]))
    del own.table.slots[0].tokens[image.first + 5 :]
    assert_right(own.answer(0, p, own.see(p, own.rows(0, p, p.ids[image.first + 5 :]))), p)


@pytest.mark.parametrize("name", NAMES)
def test_exact_forwards_have_the_same_bits_beside_any_rows(name: str) -> None:
    use(KernelContext(is_exact=True))
    own, many, p = bench(name), bench(name, 7), read_prompt(name, "side")
    want = own.answer(0, p, own.pieces(0, p, ()))
    text = many.rows(1, NO_PICTURES, [7] * 37)
    got = many.see(p, many.rows(0, p, p.ids), text)[:1]
    assert torch.equal(many.answer(0, p, got), want)
    assert_right(want, p)


@pytest.mark.parametrize("name", ("gemma3", "gemma4"))
def test_rings_and_packed_keys_see_whole_pictures(name: str) -> None:
    """A window of 8 and pictures that are longer, in rings of pages; keys of other types, of which heads of 16 have no whole blocks."""
    p = read_prompt(name, "two")
    whole = bench(name)
    want = whole.answer(0, p, whole.pieces(0, p, ()))
    rings = bench(name, n_chunk=N_CHUNK)
    assert rings.memory.rings and not whole.memory.rings
    cut = p.spans[0].end
    got = rings.answer(0, p, rings.pieces(0, p, (3, cut)))
    assert (got - want).abs().max() < CLOSE
    for kv, most in ((BF16, 0.5), (F8, 4.0)):
        a, b = (
            x.answer(0, p, x.pieces(0, p, (cut,)))
            for x in (bench(name, kv=kv), bench(name, kv=kv, n_chunk=N_CHUNK))
        )
        assert (a - b).abs().max() < CLOSE and 0 < (a - want).abs().max() < most


def test_rows_that_nobody_has_are_refused_for_their_slot() -> None:
    own, p = bench("qwen35", 2), read_prompt("qwen35", "one")
    seq = own.rows(1, p, p.ids)
    for rows in ({}, {h: x[:-1] for h, x in p.rows.items()}):
        with pytest.raises(OutOfBounds, match="slot 1 rows of a picture") as e:
            lay_out(own.table, [seq], DEVICE, pictures=rows)
        assert e.value.slot == 1
    with pytest.raises(EngineBug, match="without rows"):
        own.target.forward(lay_out(own.table, [seq], DEVICE))


@pytest.mark.parametrize(("n_embd", "seen"), [(1536, ""), (2560, ""), (3840, "near")])
def test_rows_of_pictures_are_causal_in_the_widths_of_gemma_4_e(
    tmp_path: Path, n_embd: int, seen: str
) -> None:
    wider = {"gemma4.embedding_length": n_embd}
    path = rewrite(IMAGES / "gemma4.gguf", tmp_path / "m.gguf", change=wider)
    with open_gguf(path) as file:
        assert read_config(file).sees_pictures == seen


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    """One with places for graphs of prompts of any length."""
    monkeypatch.setattr("pyspec.slots.arena.LEAST_PROMPT", 1)
    found = Arena(1, 20, torch.device(DEVICE))
    found.prompts |= {256}
    return found


@pytest.mark.parametrize("name", CAUSAL)
def test_a_graph_of_prompts_reads_the_pictures_that_lie_in_its_arena(name: str, arena: Arena) -> None:
    """The forward of one batch, as a graph has it, gives each prompt's logits, once that lies there: pictures behind others, of other places and
    sizes, and texts. They have the bits of the prompt's own forward."""
    own, whole, prompts = bench(name), bench(name), [read_prompt(name, p) for p in PROMPTS]
    (width,) = {rows.shape[1] for p in prompts for rows in p.rows.values()}
    arena.see(width)
    # on a card 256 rows are a library's, whose queries, keys and values have 16 bits
    close = CLOSE if torch.device(DEVICE).type == "cpu" else 5 * CLOSE

    def laid(p: SeenPrompt, ids: list[int]) -> Batch:
        own.table.slots[0].tokens.clear()
        own.memory.reset(0)
        return lay_out(own.table, [own.rows(0, p, ids)], DEVICE, arena=arena, pictures=p.rows)

    kept = laid(NO_PICTURES, [5] * 256)
    assert kept.prompt and kept.bucket == 256 and kept.pictures is not None
    addresses = [x.data_ptr() for x in (kept.pictures.is_row, kept.pictures.axes, kept.pictures.rows)]
    text = [x % 250 for x in range(90, 237)]
    want = alone_logits(whole, text)
    for p in (*prompts, *prompts[::-1]):
        batch = laid(p, p.ids)
        assert (
            batch.prompt
            and batch.pictures is not None
            and batch.pictures.sources.keys() == p.rows.keys()
        )
        assert addresses == [
            x.data_ptr() for x in (batch.pictures.is_row, batch.pictures.axes, batch.pictures.rows)
        ]
        assert int(batch.pictures.is_row.sum()) == sum(span.n_row for span in p.spans)
        direct = own.target.run(batch).logits
        laid(p, p.ids)
        held = replace(batch, pictures=kept.pictures)
        assert torch.equal(own.target.run(held).logits, direct)
        assert (direct[-1].cpu().double() - torch.tensor(p.logits)[0]).abs().max() < close
        held = replace(laid(NO_PICTURES, text), pictures=kept.pictures)
        assert (own.target.run(held).logits[-1].cpu() - want).abs().max() < close


def test_only_a_prompt_alone_lies_in_an_arena_with_its_pictures(arena: Arena) -> None:
    own, p = bench("qwen35", 2), read_prompt("qwen35", "one")

    def is_there(*seqs: Seq) -> bool:
        batch = lay_out(own.table, seqs, DEVICE, arena=arena, pictures=p.rows)
        return batch.bucket is not None

    whole = own.rows(0, p, p.ids)
    assert not is_there(whole), "it has no memory for them"
    arena = Arena(2, 20, torch.device(DEVICE))
    arena.see(p.rows[3].shape[1])
    assert not is_there(whole), "nobody has captured it"
    arena.prompts |= {256}
    assert is_there(whole)
    assert not is_there(whole, Seq(1, 0, [1])) and not is_there(replace(whole, mode=SeqMode.VERIFY))
    assert not is_there(replace(whole, n_past=1, tokens=whole.tokens[1:]))
    verify = lay_out(own.table, [Seq(1, 0, [1, 2])], DEVICE, arena=arena)
    assert verify.bucket == 2 and verify.pictures is None, "other graphs know nothing of pictures"
    with pytest.raises(EngineBug, match="without rows"):
        own.target.forward(lay_out(own.table, [whole], DEVICE, arena=arena))
