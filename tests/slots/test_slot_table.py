"""Pages and slots under any sequence of calls, against a model that remembers what each page holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyspec.errors import OutOfBounds, RequestError
from pyspec.slots.table import Slot, SlotTable, common_prefix

N_SLOT, N_PAGE, SIZE = 3, 8, 16
index = st.integers(0, N_SLOT - 1)


class TableMachine(RuleBasedStateMachine):
    """Calls as the loop makes them. `written` is the pool: what was last written to each row, and by whose tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(N_SLOT, N_PAGE, SIZE)
        self.written: dict[int, int] = {}
        self.limit = [0] * N_SLOT
        self.n = 0

    def idle(self) -> list[Slot]:
        return [s for s in self.table.slots if not s.busy]

    def busy(self) -> list[Slot]:
        return [s for s in self.table.slots if s.busy]

    @precondition(lambda self: self.idle())
    @rule(n_tokens=st.integers(1, N_PAGE * SIZE), i=st.integers(0, 9), reuse=st.floats(0, 1), wanted=st.booleans())
    def admit(self, n_tokens: int, i: int, reuse: float, wanted: bool) -> None:
        if not self.table.can_admit(n_tokens):
            promised = sum(s.reserved for s in self.busy())
            assert promised + -(-n_tokens // SIZE) > N_PAGE, "refused although there is room"
            return
        slot = self.idle()[i % len(self.idle())]
        prompt = slot.tokens[: min(int(reuse * slot.n_past), n_tokens - 1)]
        picked = self.table.pick(prompt, slot.index if wanted else -1)
        assert picked is not None and not picked.busy and (not wanted or picked is slot)
        before = picked.generation
        self.table.trim(picked, min(common_prefix(picked.tokens, prompt), n_tokens))
        self.table.acquire(picked, n_tokens)
        assert picked.generation > before
        self.limit[picked.index] = n_tokens

    @precondition(lambda self: self.busy())
    @rule(i=st.integers(0, 9), n=st.integers(1, 40), kept=st.integers(0, 40))
    def forward(self, i: int, n: int, kept: int) -> None:
        """Write n rows, keep some: a request within its promise always gets its pages."""
        slot = self.busy()[i % len(self.busy())]
        n = min(n, self.limit[slot.index] - slot.n_past)
        if n <= 0:
            return
        self.table.grow(slot, slot.n_past + n)
        rows = self.table.rows(slot, slot.n_past, n)
        assert rows == [self.table.row(slot, slot.n_past + j) for j in range(n)]
        for j, row in enumerate(rows):
            self.n += 1
            self.written[row] = self.n
            if j < min(kept, n):
                slot.tokens.append(self.n)

    @precondition(lambda self: self.busy())
    @rule(i=st.integers(0, 9))
    def release(self, i: int) -> None:
        slot = self.busy()[i % len(self.busy())]
        tokens = list(slot.tokens)
        self.table.release(slot)
        assert slot.tokens == tokens, "what it holds stays for reuse"

    @rule(i=index, n=st.integers(-3, N_PAGE * SIZE + 3))
    def trim(self, i: int, n: int) -> None:
        slot = self.table.slots[i]
        if 0 <= n <= slot.n_past:
            self.table.trim(slot, n)
            assert slot.n_past == n and len(slot.pages) == -(-n // SIZE)
        else:
            with pytest.raises(OutOfBounds):
                self.table.trim(slot, n)

    @invariant()
    def every_page_is_in_one_place_and_every_token_in_its_row(self) -> None:
        self.table.check()
        for slot in self.table.slots:
            for pos, token in enumerate(slot.tokens):
                assert self.written[self.table.row(slot, pos)] == token, "somebody else wrote into a held row"

    @invariant()
    def busy_slots_hold_no_more_than_promised(self) -> None:
        assert sum(s.reserved for s in self.table.slots) <= N_PAGE
        for slot in self.busy():
            assert len(slot.pages) <= slot.reserved


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def filled(table: SlotTable, i: int, tokens: list[int]) -> Slot:
    slot = table.slots[i]
    table.acquire(slot, len(tokens))
    table.grow(slot, len(tokens))
    slot.tokens.extend(tokens)
    table.release(slot)
    return slot


def test_idle_slots_give_their_pages_oldest_first_and_busy_ones_never() -> None:
    table = SlotTable(4, 8, 16)
    old, young = filled(table, 0, [1] * 32), filled(table, 1, [2] * 32)
    busy = table.slots[2]
    table.acquire(busy, 32)
    table.grow(busy, 32)
    taker, generation = table.slots[3], old.generation
    table.acquire(taker, 64)
    table.grow(taker, 48)
    assert (old.n_past, young.n_past) == (0, 32) and old.generation > generation, (
        "whoever keeps state for it must notice"
    )
    table.grow(taker, 64)
    assert len(busy.pages) == 2 and len(taker.pages) == 4
    table.check()


def test_more_pages_than_there_are_is_out_of_bounds() -> None:
    table = SlotTable(2, 4, 16)
    table.acquire(table.slots[0], 64)
    table.grow(table.slots[0], 49)
    table.acquire(table.slots[1], 1)
    with pytest.raises(OutOfBounds, match=r"slot 1 page 1 is outside 0\.\.3") as e:
        table.grow(table.slots[1], 1)
    assert e.value.slot == 1
    table.check()


@pytest.mark.parametrize(("first", "n"), [(-1, 1), (0, 33), (32, 1), (31, 2), (2**31, 1), (-5, 10)])
def test_rows_outside_the_slots_pages_are_refused(first: int, n: int) -> None:
    table = SlotTable(1, 4, 16)
    table.acquire(table.slots[0], 32)
    table.grow(table.slots[0], 32)
    with pytest.raises(OutOfBounds):
        table.rows(table.slots[0], first, n)


def test_busy_slots_are_not_picked() -> None:
    table = SlotTable(2, 4, 16)
    table.acquire(table.slots[0], 1)
    assert table.pick([1], 0) is None and table.pick([1]) is table.slots[1]
    table.acquire(table.slots[1], 1)
    assert table.pick([1]) is None and not table.can_admit(1)
    with pytest.raises(RequestError, match=r"slot 2 does not exist; slots are 0\.\.1"):
        table.pick([1], 2)


def test_the_slot_with_the_longest_useful_prefix_is_picked() -> None:
    table = SlotTable(4, 16, 16)
    text = list(range(40))
    filled(table, 0, text[:20])
    filled(table, 1, text[:30])
    filled(table, 2, [99] * 5)
    assert table.pick(text) is table.slots[1]
    assert table.pick([*text[:3], *[7] * 50]) is table.slots[3], "three tokens are no reason to throw twenty away"
    assert table.pick([*text[:3], 7]) is table.slots[0], "but most of a short prompt is; the oldest of equals"
    filled(table, 3, [5] * 5)
    assert table.pick([1, 2, 3]) is table.slots[0], "the oldest"
    assert table.pick(text, 2) is table.slots[2]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_common_prefix_is_the_number_of_equal_leading_tokens(at: int) -> None:
    a = [1, 2, 3, 4, 5, 6]
    assert common_prefix(a, [*a[:at], 99, *a[at + 1 :]]) == at
    assert common_prefix(a, a[:at]) == common_prefix(a[:at], a) == at
