"""The queue, the cut of a prompt, and rows shared among prompts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspec.engine.queue import CUT_GAP, CUT_MIN, CUT_TAIL, Queue, cut_of, cuts_of
from pyspec.engine.round import share_rows
from pyspec.errors import QueueFull
from pyspec.slots.table import SlotTable


@dataclass
class Item:
    n_rows: int = 10
    wanted_slot: int = -1
    reusable: tuple[int, ...] = ()


def test_first_come_first_served_until_it_is_full() -> None:
    queue: Queue[Item] = Queue(2)
    a, b = Item(), Item()
    queue.push(a)
    queue.push(b)
    with pytest.raises(QueueFull, match="2 requests are waiting") as e:
        queue.push(Item())
    assert (e.value.status, e.value.retry_after_s) == (429, 1)
    table = SlotTable(2, 4, 16)
    assert queue.next(table) is a and queue.next(table) is b and queue.next(table) is None
    queue.push(Item())
    assert len(queue) == 1 and len(queue.drain()) == 1 and not len(queue)


def test_a_request_that_is_too_large_now_holds_the_line_for_itself() -> None:
    """Small ones do not overtake it for ever."""
    queue: Queue[Item] = Queue(8)
    table = SlotTable(3, 4, 16)
    table.acquire(table.slots[0], 40)
    large, small = Item(n_rows=33), Item(n_rows=5)
    queue.push(large)
    queue.push(small)
    assert queue.next(table) is None
    table.release(table.slots[0])
    assert queue.next(table) is large


def test_a_request_for_a_busy_slot_lets_the_others_pass() -> None:
    queue: Queue[Item] = Queue(8)
    table = SlotTable(2, 8, 16)
    table.acquire(table.slots[1], 10)
    pinned, free = Item(wanted_slot=1), Item()
    queue.push(pinned)
    queue.push(free)
    assert queue.next(table) is free
    assert queue.next(table) is None
    table.release(table.slots[1])
    assert queue.next(table) is pinned


@given(st.integers(1, 5000), st.sampled_from([16, 32, 64]))
def test_a_cut_lies_on_a_page_border_near_the_end(n: int, page: int) -> None:
    cut = cut_of(n, page)
    if n < CUT_MIN:
        assert cut == 0
    else:
        assert cut % page == 0 and n - page - CUT_TAIL < cut <= n - CUT_TAIL


@given(
    st.integers(1, 20_000),
    st.sampled_from([16, 32, 64]),
    st.integers(0, 20_000),
    st.sets(st.integers(0, 30_000), max_size=3),
    st.sampled_from([0, 1, 100, 4096]),
)
def test_cuts_lie_where_a_checkpoint_is_worth_its_forward(
    n: int, page: int, n_cached: int, special: set[int], every: int
) -> None:
    n_cached = min(n_cached, n - 1)
    cuts, end = cuts_of(n, page, n_cached, special, every), cut_of(n, page)
    assert all(c % page == 0 and n_cached < c < n for c in cuts)
    assert all(b - a >= CUT_GAP for a, b in zip((n_cached, *cuts), cuts, strict=False) if a)
    worth = n_cached + CUT_GAP if n_cached else 1
    assert any(0 <= end - c < CUT_GAP for c in cuts) == (worth <= end), "near the prompt's end"
    for p in special:
        if worth <= p // page * page <= end:
            assert any(0 <= c - p // page * page < CUT_GAP for c in cuts), "it is there, or another one soon after it"
    if every >= CUT_GAP:
        assert all(b - a < every + 3 * CUT_GAP for a, b in zip((worth, *cuts), (*cuts, end), strict=True))


def test_a_long_prompt_is_cut_where_it_forks_where_the_turn_begins_and_now_and_then() -> None:
    assert cuts_of(10_000, 32, 0, {5000, 9900}, 4096) == (4096, 4992, 8192, 9888, 9984)
    assert cuts_of(10_000, 32, 9000, {5000, 9900}, 4096) == (9888, 9984)
    assert cuts_of(10_000, 32, 0, {0, 9960}, 0) == (9952,), "too near the end's, which gives way"
    assert cuts_of(10_000, 32, 0, {4090, 9000, 9030}, 4096) == (4064, 8192, 9024, 9984)
    assert cuts_of(10_000, 32, 9960, {0}, 16) == (), "nothing is gained"


@given(st.integers(-50, 600), st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), max_size=8))
def test_rows_are_shared_oldest_first_and_never_beyond_a_cut(n_free: int, todo: list[tuple[int, int]]) -> None:
    given_ = share_rows(n_free, todo)
    assert len(given_) == len(todo) and sum(given_) <= max(n_free, 0)
    full = True
    for n, (left, cut) in zip(given_, todo, strict=True):
        want = min(left, cut or left)
        assert 0 <= n <= want
        assert full or n == 0, "nobody gets rows while an older one waits for some"
        full = full and n == want
