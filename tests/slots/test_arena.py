"""Layouts in an arena are the plain ones plus padding, and a model can not tell the difference."""

import pytest
import torch
from harness import FIXTURES, Bench

from pyspec.slots.arena import BUCKETS, ROW64, SEQ32, WIDE, Arena, bucket_of, most_rows
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.table import SlotTable

CPU = torch.device("cpu")


def seated(n_slot: int) -> SlotTable:
    table = SlotTable(n_slot, 8 * n_slot, 16)
    for slot in table.slots:
        table.acquire(slot, 100)
    return table


def test_buckets_hold_every_row_count_up_to_the_largest() -> None:
    assert [bucket_of(n) for n in (1, 5, 7, 33, 128, 129)] == [1, 6, 8, 48, 128, None]
    assert [bucket_of(n, 256) for n in (128, 129, 192, 193, 256, 257)] == [128, 192, 192, 256, 256, None]
    sizes = {(8, 16): 128, (8, 17): 192, (64, 4): 256, (1, 1): 128, (64, 16): 1024, (100, 16): WIDE[-1]}
    assert {of: most_rows(*of) for of in sizes} == sizes


def test_many_rows_find_a_graph_where_they_are_verifies_and_none_where_a_prompt_is_among_them() -> None:
    arena = Arena(64, 4, CPU, 4)
    assert arena.n_row == 256
    assert [arena.bucket(w) for w in ([4] * 64, [4] * 33, [3, 4] * 25)] == [256, 192, 192]
    assert arena.bucket([4] * 40 + [5]) is None, "some rows of a prompt"
    assert arena.bucket([4] * 20 + [48]) == 128, "as ever, below"
    assert arena.bucket([4] * 65) is None and arena.bucket([128]) == 128 and arena.bucket([129]) is None


@pytest.mark.parametrize(
    "widths", [(1,), (3, 1, 5), (16, 16), (1, 1, 1, 1, 1, 1, 1, 1), (8, 2, 7), (2,) * 11]
)
def test_an_arena_holds_the_plain_layout_and_harmless_padding(widths: tuple[int, ...]) -> None:
    """With places for no more sequences than are worth a graph: eight, or one for each row, or all slots."""
    plain_table, table = seated(12), seated(12)
    arena, places = Arena(12, 8, CPU), {1: 1, 3: 8, 2: 8, 8: 8, 11: 12}[len(widths)]
    for first in (0, 9):  # the second layout overwrites the first
        seqs = [
            Seq(i, first + i, list(range(w)), SeqMode.KEEP if i % 2 == 0 else SeqMode.VERIFY, 1, 1)
            for i, w in enumerate(widths)
        ]
        plain, ours = lay_out(plain_table, seqs, CPU), lay_out(table, seqs, CPU, arena=arena)
        n, bucket = sum(widths), bucket_of(sum(widths))
        assert ours.bucket == bucket and ours.n_row == n
        for name in (*ROW64, "row_seq"):
            want, got = getattr(plain, name), getattr(ours, name)
            assert torch.equal(got[: len(want)], want) and len(got) == bucket, name
        assert set(ours.kv_rows[n:].tolist()) <= {table.null_row} and set(ours.row_seq[n:].tolist()) <= {
            -1
        }
        assert ours.seq_start.tolist() == plain.starts + [n] * (places - len(widths))
        assert ours.n_place == places
        assert len(ours.seq_slot) == len(ours.page_table) == places
        for name in SEQ32[:-1]:
            assert torch.equal(getattr(ours, name)[: len(widths)], getattr(plain, name)), name
        assert torch.equal(ours.page_table[: len(widths), : plain.page_table.shape[1]], plain.page_table)


def test_what_does_not_fit_an_arena_is_laid_out_plainly() -> None:
    table = SlotTable(1, 32, 16)
    table.acquire(table.slots[0], 300)
    arena = Arena(1, 4, CPU)
    assert lay_out(table, [Seq(0, 0, [0] * (BUCKETS[-1] + 1))], CPU, arena=arena).bucket is None
    assert lay_out(table, [Seq(0, 70, [0])], CPU, arena=arena).bucket is None, "five pages, four fit"


def test_a_model_gives_the_same_rows_from_an_arena() -> None:
    plain, padded = (Bench(FIXTURES / "qwen35.gguf", n_slot=3) for _ in range(2))
    arena = Arena(4, 16, CPU)
    for round_ in range(4):
        seqs = [
            plain.seq(s, [7 * s + round_ + i for i in range(1 + 2 * s)], keep=s == 0) for s in range(3)
        ]
        want = plain.forward(*seqs).logits
        got = padded.target.forward(lay_out(padded.table, seqs, CPU, arena=arena)).logits
        assert torch.allclose(got[: len(want)], want, atol=1e-4), (
            "padding moves the ends of vector loops, no more"
        )
        for bench in (plain, padded):
            for seq in seqs:
                bench.commit(seq, seq.width if seq.keep else 1 + round_ % seq.width)


def test_a_prompt_that_stands_alone_finds_a_graph_that_is_there() -> None:
    """Only such a prompt: not one behind tokens, beside others, with all of its logits, or longer than the longest."""
    table, arena = SlotTable(3, 32, 64), Arena(3, 16, CPU)

    def bucket(n: int, *more: Seq, **how: object) -> int | None:
        seq = Seq(0, **({"n_past": 0, "tokens": [1] * n, "mode": SeqMode.KEEP, "n_out": 1} | how))  # type: ignore[arg-type]
        batch = lay_out(table, [seq, *more], CPU, arena=arena)
        assert batch.prompt == (batch.bucket is not None)
        return batch.bucket

    assert bucket(300) is None, "nobody has captured it"
    arena.prompts |= {256, 320}
    assert [bucket(n) for n in (191, 192, 256, 257, 320, 321)] == [None, 256, 256, 320, 320, None]
    assert bucket(300, Seq(1, 0, [1], mode=SeqMode.KEEP, n_out=1)) is None
    for how in ({"n_past": 5}, {"mode": SeqMode.VERIFY}, {"n_out": 0}, {"n_out": 300}):
        assert bucket(300, **how) is None
    batch = lay_out(table, [Seq(2, 0, [1] * 300, mode=SeqMode.KEEP, n_out=1)], CPU, arena=arena)
    assert len(batch.tokens) == 320 and batch.row_seq.tolist() == [0] * 300 + [-1] * 20
    assert batch.out_rows.tolist() == [299] and batch.n_place == 1 and batch.n_row == 300
