"""The layout of a forward: rows, positions, pages, ranges; refused before anything changes."""

from __future__ import annotations

import random

import pytest
import torch

from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.errors import OutOfBounds
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.memory import Memory
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

CPU = torch.device("cpu")


def table_with(lengths: list[int], n_page: int = 24, size: int = 16) -> SlotTable:
    table = SlotTable(len(lengths), n_page, size)
    rng = random.Random(0)
    rng.shuffle(table._free)  # pages of a slot are not neighbours
    for slot, n in zip(table.slots, lengths, strict=True):
        table.acquire(slot, n + 20)
        table.grow(slot, n)
        slot.tokens.extend([0] * n)
    return table


@pytest.mark.parametrize("see_block", [False, True])
def test_every_row_knows_its_token_place_and_range(see_block: bool) -> None:
    table = table_with([0, 15, 16, 33])
    seqs = [
        Seq(3, 33, [7], n_out=1),
        Seq(0, 0, list(range(20))),
        Seq(1, 15, [4, 5, 6], n_out=3),
        Seq(2, 16, [8], mode=SeqMode.KEEP),
    ]
    batch = lay_out(table, seqs, CPU, see_block=see_block)
    assert list(batch.starts) == [0, 1, 21, 24, 25] and batch.n_row == 25
    row = 0
    for s, seq in enumerate(seqs):
        end = seq.n_past + seq.width
        assert batch.max_hi[s] == end
        for i, token in enumerate(seq.tokens):
            pos = seq.n_past + i
            assert batch.tokens[row] == token and batch.positions[row] == pos
            assert batch.kv_rows[row] == table.row(table.slots[seq.slot], pos)
            page = batch.page_table[s, pos // 16]
            assert batch.kv_rows[row] == page * 16 + pos % 16
            assert (batch.lo[row], batch.hi[row]) == (0, end if see_block else pos + 1)
            row += 1
    assert batch.out_rows.tolist() == [0, 21, 22, 23]
    assert len(set(batch.kv_rows.tolist())) == 25, "two rows never share a place"


def test_no_row_is_padding() -> None:
    table = table_with([5, 5, 5])
    batch = lay_out(table, [Seq(i, 5, [1] * n) for i, n in enumerate((1, 9, 4))], CPU)
    assert batch.n_row == 14 == batch.tokens.numel() == batch.kv_rows.numel()


@pytest.mark.parametrize(
    "bad",
    [
        Seq(0, 5, [1, 2], n_out=3),
        Seq(0, 5, [1, 2], n_out=-1),
        Seq(0, -1, [1, 2]),
        Seq(0, 5, [1] * 1000),
        Seq(0, 2**31, [1]),
    ],
)
def test_a_sequence_out_of_bounds_is_refused_before_anything_changes(bad: Seq) -> None:
    table = table_with([5, 40])
    before = [(list(s.pages), list(s.tokens), s.generation) for s in table.slots]
    with pytest.raises(OutOfBounds) as e:
        lay_out(table, [bad], CPU)
    assert e.value.slot == 0
    assert before == [(s.pages, s.tokens, s.generation) for s in table.slots]
    table.check()


SHAPE = GdnShape(1, 2, 8, 4, 32)


def test_a_restored_checkpoint_is_the_state_that_was_saved() -> None:
    """P2: immutable; two slots may continue from one and diverge."""
    memory = Memory(
        [{"state": StateLayer(SHAPE, 3, 4, CPU)}, {}, {"state": StateLayer(SHAPE, 3, 4, CPU)}], 4
    )
    for layer in memory.states.values():
        for t in layer.tensors():
            t.normal_()
    saved = memory.checkpoint(1, 17)
    want = [(x.state[1].clone(), x.conv[1, :3].clone()) for x in memory.states.values()]
    others = [x.state[[0]].clone() for x in memory.states.values()]
    for slot in (1, 2, 1):
        for layer in memory.states.values():
            layer.state[slot].fill_(float("nan"))
            layer.conv[slot].fill_(float("nan"))
        memory.restore(slot, saved)
        for layer, (state, conv) in zip(memory.states.values(), want, strict=True):
            assert torch.equal(layer.state[slot], state) and torch.equal(layer.conv[slot, :3], conv)
            layer.state[slot].add_(1)  # the slot continues; the saved state does not change
    assert saved.n_past == 17
    assert all(torch.equal(x.state[[0]], o) for x, o in zip(memory.states.values(), others, strict=True))


def test_a_reset_clears_one_slot() -> None:
    memory = Memory([{"state": StateLayer(SHAPE, 2, 4, CPU)}], 4)
    layer = memory.states[0]
    for t in layer.tensors():
        t.fill_(float("nan"))
    memory.reset(0)
    assert not layer.state[0].any() and not layer.conv[0].any()
    assert layer.state[1].isnan().all() and layer.conv[1].isnan().all()
