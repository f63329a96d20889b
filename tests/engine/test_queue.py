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
    client: str = ""
    group: str = ""
    cost: int = 600


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
def test_rows_are_shared_shortest_first_and_never_beyond_a_cut(n_free: int, todo: list[tuple[int, int]]) -> None:
    given_ = share_rows(n_free, todo)
    wants = [min(left, cut or left) for left, cut in todo]
    assert len(given_) == len(todo) and all(0 <= n <= want for n, want in zip(given_, wants, strict=True))
    assert sum(given_) == min(max(n_free, 0), sum(wants)), "no row is left while somebody wants it"
    if todo and n_free > 0:
        assert given_[0] >= min(wants[0], n_free // 4), "the oldest goes on"
    for i in range(1, len(todo)):
        for j in range(1, len(todo)):
            if todo[j][0] < todo[i][0] and given_[i]:
                assert given_[j] == wants[j], "what has less left is served before"


# -- clients take turns --------------------------------------------------------------------------------------------


def seated(queue: Queue[Item], n: int) -> list[Item]:
    """Whom an empty slot takes, one after the other."""
    out = []
    for _ in range(n):
        item = queue.next(SlotTable(1, 64, 16))
        assert item is not None
        out.append(item)
    return out


def test_a_short_prompt_does_not_wait_for_a_hundred_long_ones() -> None:
    queue: Queue[Item] = Queue(200)
    for _ in range(100):
        queue.push(Item(cost=8000, client="a"))
    seated(queue, 3)
    short = Item(cost=20, client="a")
    queue.push(short)
    assert seated(queue, 1) == [short]


def test_long_prompts_are_not_put_off_for_ever_by_short_ones() -> None:
    queue: Queue[Item] = Queue(200)
    long = Item(cost=2000, client="a")
    queue.push(long)
    n = 0
    while True:
        queue.push(Item(cost=100, client="a"))
        n += 1
        if seated(queue, 1) == [long]:
            break
        assert n < 60
    assert n > 10


def test_clients_take_turns_however_much_one_asks() -> None:
    queue: Queue[Item] = Queue(400)
    for _ in range(200):
        queue.push(Item(cost=100, client="busy", group="one body"))
    seated(queue, 20)
    for _ in range(5):
        queue.push(Item(cost=100, client="other"))
    assert [item.client for item in seated(queue, 10)].count("other") == 5


def test_a_client_that_was_away_has_not_saved_up_turns() -> None:
    queue: Queue[Item] = Queue(400)
    queue.push(Item(client="b"))
    seated(queue, 1)
    for _ in range(100):
        queue.push(Item(client="a"))
    seated(queue, 50)
    for _ in range(20):
        queue.push(Item(client="b"))
    assert [item.client for item in seated(queue, 10)].count("b") in (5, 6)


def test_a_body_of_many_prompts_goes_behind_another_of_one() -> None:
    queue: Queue[Item] = Queue(400)
    for _ in range(64):
        queue.push(Item(cost=30, client="a", group="many"))
    queue.push(Item(cost=30, client="a", group="one"))
    assert "one" in [item.group for item in seated(queue, 3)]


def test_no_client_fills_the_queue_and_short_ones_find_room_longer() -> None:
    queue: Queue[Item] = Queue(8)
    for _ in range(6):
        queue.push(Item(client="a", cost=5000))
    with pytest.raises(QueueFull):
        queue.push(Item(client="a", cost=5000))
    queue.push(Item(client="b", cost=5000))
    queue.push(Item(client="c", cost=5000))
    with pytest.raises(QueueFull):
        queue.push(Item(client="d", cost=5000))
    queue.push(Item(client="d", cost=10))


def test_who_waits_for_a_slot_takes_no_place_of_others() -> None:
    queue: Queue[Item] = Queue(4)
    for _ in range(4):
        queue.push(Item(wanted_slot=0, client="a"))
    with pytest.raises(QueueFull):
        queue.push(Item(wanted_slot=0, client="b"))
    for _ in range(3):
        queue.push(Item(client="a"))
