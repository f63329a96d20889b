"""A verify may have more rows than the first pass of a chained drafter has places for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pyspec.draft.chain import Chain
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.table import SlotTable


@pytest.mark.parametrize("width", [3, 4])
def test_a_verify_of_more_rows_is_not_drafted_behind_unread(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = SlotTable(3, 12, 16)
    chain = object.__new__(Chain)
    chain.table, chain.p_min, chain.device, chain.arenas = table, 0.0, torch.device("cpu"), [None] * 3
    chain.hidden = torch.zeros(9, 4)
    for slot in table.slots:
        table.acquire(slot, 40)
    monkeypatch.setattr(
        chain, "_state", lambda slot: SimpleNamespace(n_row=slot.n_past + 1, n_fold=0), raising=False
    )
    batch = lay_out(table, [Seq(i, 0, [1] * width, n_out=width) for i in range(3)], chain.device)

    def follow(*_: object) -> None:
        raise InterruptedError  # it goes on to lay out the first pass

    chain.ahead = SimpleNamespace(follow=follow)
    if width * 3 <= 9:
        with pytest.raises(InterruptedError):
            chain.draft_ahead(batch, None, None, 1)  # type: ignore[arg-type]
    else:
        assert chain.draft_ahead(batch, None, None, 1) is None  # type: ignore[arg-type]
