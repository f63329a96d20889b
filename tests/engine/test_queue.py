"""The queue, the cut of a prompt, and rows shared among prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from engine_rig import fake_rig
from hypothesis import given
from hypothesis import strategies as st

from pyspec.engine.loop.round import share_rows
from pyspec.engine.policy.evict import LeftTexts, evict_for
from pyspec.engine.policy.queue import (
    CUT_GAP,
    CUT_TAIL,
    LAPS,
    MOST_AWAY,
    Queue,
    cut_of,
    cuts_of,
    worth_on,
)
from pyspec.errors import QueueFull
from pyspec.slots.prefix import NOBODY, Known, Owner
from pyspec.slots.table import SlotTable


@dataclass
class Item:
    n_rows: int = 10
    wanted_slot: int = -1
    reusable: tuple[int, ...] = ()
    owner: Owner = NOBODY
    client: str = ""
    group: str = ""
    cost: int = 600
    n_left: int = 0
    charged: int = 0
    work: int = 0
    n_to_read: int = 0


def test_first_come_first_served() -> None:
    queue: Queue[Item] = Queue(2)
    a, b = Item(), Item()
    queue.push(a)
    queue.push(b)
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
    if n < CUT_GAP:
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
            assert any(0 <= c - p // page * page < CUT_GAP for c in cuts), (
                "it is there, or another one soon after it"
            )
    if every >= CUT_GAP:
        assert all(
            b - a < every + 3 * CUT_GAP for a, b in zip((worth, *cuts), (*cuts, end), strict=True)
        )


def test_a_long_prompt_is_cut_where_it_forks_where_the_turn_begins_and_now_and_then() -> None:
    assert cuts_of(10_000, 32, 0, {5000, 9900}, 4096) == (4096, 4992, 8192, 9888, 9984)
    assert cuts_of(10_000, 32, 9000, {5000, 9900}, 4096) == (9888, 9984)
    assert cuts_of(10_000, 32, 0, {0, 9960}, 0) == (9952,), "too near the end's, which gives way"
    assert cuts_of(10_000, 32, 0, {4090, 9000, 9030}, 4096) == (4064, 8192, 9024, 9984)
    assert cuts_of(10_000, 32, 9960, {0}, 16) == (), "nothing is gained"


def test_what_takes_no_longer_than_a_cut_is_not_cut() -> None:
    worth = worth_on("cuda")
    assert worth_on("cpu") == CUT_GAP and cuts_of(300, 32, 0, set(), 0, worth_on("cpu")) == (288,)
    assert cuts_of(300, 32, 0, {160}, 0, worth) == () and cut_of(300, 32, worth) == 0
    assert cuts_of(3000, 32, 2600, {2700}, 0, worth) == (), "what is cached is not read"
    assert (
        cuts_of(3000, 32, 2400, {2700}, 0, worth) == cuts_of(3000, 32, 2400, {2700}, 0) == (2688, 2976)
    )


@given(st.integers(-50, 600), st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), max_size=8))
def test_rows_are_shared_shortest_first_and_never_beyond_a_cut(
    n_free: int, todo: list[tuple[int, int]]
) -> None:
    given_ = share_rows(n_free, todo)
    wants = [min(left, cut or left) for left, cut in todo]
    assert len(given_) == len(todo) and all(
        0 <= n <= want for n, want in zip(given_, wants, strict=True)
    )
    assert sum(given_) == min(max(n_free, 0), sum(wants)), "no row is left while somebody wants it"
    if todo and n_free > 0:
        assert given_[0] >= min(wants[0], n_free // 4), "the oldest goes on"
    for i in range(1, len(todo)):
        for j in range(1, len(todo)):
            if todo[j][0] < todo[i][0] and given_[i]:
                assert given_[j] == wants[j], "what has less left is served before"


# -- clients take turns --------------------------------------------------------------------------------------------


def seated(queue: Queue[Item], n: int) -> list[Item]:
    """The requests that an empty slot takes, one after the other."""
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


@pytest.mark.parametrize(("asked", "others"), [(7, 1531), (31, 100_000), (1, 513)])
def test_a_short_answer_does_not_wait_for_forty_long_ones(asked: int, others: int) -> None:
    """As if one address had forty unread streams, and asked for a few tokens beside them."""
    queue, table = Queue[Item](128), SlotTable(1, 4, 16)
    for _ in range(40):
        queue.push(Item(cost=19, n_left=others))
    queue.next(table)
    short = Item(cost=23, n_left=asked)
    queue.push(short)
    assert queue.next(table) is short


def test_long_answers_are_not_put_off_for_ever_by_short_ones() -> None:
    queue, table = Queue[Item](128), SlotTable(1, 4, 16)
    long = Item(cost=19, n_left=100_000)
    queue.push(long)
    n_passed = 0
    while n_passed < 100:
        queue.push(Item(cost=19, n_left=11))
        if queue.next(table) is long:
            break
        n_passed += 1
    assert 3 < n_passed < 40


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


def test_a_request_with_its_own_text_in_the_cache_goes_first() -> None:
    queue: Queue[Item] = Queue(200)
    for _ in range(23):
        queue.push(Item(cost=109, n_left=60), Known(64))
    seated(queue, 5)
    cached, shared = Item(cost=297, n_left=60), Item(cost=109, n_left=60)
    queue.push(shared, Known(64, 0))
    queue.push(cached, Known(283, 219))
    assert seated(queue, 1) == [cached]
    assert all(item is not shared for item in seated(queue, 18)), (
        "what all requests have in the cache puts none forward"
    )


@pytest.mark.parametrize("n_wait", [3, 10, 31])
@pytest.mark.parametrize("new", [Item(cost=109, n_left=60), Item(cost=500), Item(cost=8000)])
@pytest.mark.parametrize(("other", "known"), [((6000, 160), (5991, 5000)), ((1020, 40), (1000, 1000))])
def test_a_request_without_a_cache_is_passed_for_a_few_laps_only(
    n_wait: int, new: Item, other: tuple[int, int], known: tuple[int, int]
) -> None:
    queue: Queue[Item] = Queue(200)
    queue.push(new)
    for _ in range(n_wait - 1):
        queue.push(Item(cost=other[0], n_left=other[1]), Known(*known))
    n_passed = 0
    while seated(queue, 1)[0] is not new:
        n_passed += 1
        assert n_passed < (LAPS + 2) * n_wait
        queue.push(Item(cost=other[0], n_left=other[1]), Known(*known))
    assert n_passed >= n_wait - 1


def test_a_suspended_request_passes_those_that_are_cached() -> None:
    queue: Queue[Item] = Queue(20)
    back = Item(cost=5000)
    queue.push(Item(cost=900, n_left=100), Known(890, 890))
    queue.put_back(back)
    assert seated(queue, 1) == [back]


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


@dataclass(frozen=True)
class Habit:
    """What a client asks for. n_cached: tokens of its prompts that are in the cache; limit: of its answers, which have `n_answer` tokens."""

    n_prompt: int
    n_answer: int
    n_cached: int = 0
    limit: int = 0

    def item(self, client: str) -> Item:
        return Item(cost=self.n_prompt, n_left=self.limit or self.n_answer, client=client)


class Shop:
    """Fake clients that always wait, `n` requests each, at a few slots that read 50 tokens or write one in a round."""

    def __init__(self, n_slot: int, habits: dict[str, Habit], n: int = 3) -> None:
        self.habits, self.n_slot, self.n = habits, n_slot, n
        self.queue: Queue[Item] = Queue(1000)
        self.slots: list[tuple[Item, int, int]] = []  # request, tokens to read, tokens to write
        self.queue.running = lambda: [item for item, _, _ in self.slots]
        self.work: Counter[str] = Counter()
        self.table = SlotTable(1, 64, 16)

    def round(self, active: set[str]) -> None:
        for client in active:
            n_wait = sum(item.client == client for item in self.queue.waiting())
            for _ in range(self.n - n_wait):
                habit = self.habits[client]
                self.queue.push(habit.item(client), Known(habit.n_cached, habit.n_cached))
        while len(self.slots) < self.n_slot and (item := self.queue.next(self.table)) is not None:
            habit = self.habits[item.client]
            n_read = item.n_to_read = max(1, habit.n_prompt - habit.n_cached)
            self.queue.seated(item)
            self.slots.append((item, n_read, habit.n_answer))
        for i, (item, read, write) in enumerate(self.slots):
            n = min(read, 50) if read else 1
            item.work += n
            item.n_left -= not read
            self.work[item.client] += n
            self.slots[i] = (item, read - n, write) if read else (item, 0, write - 1)
        for gone in [s for s in self.slots if not s[1] and not s[2]]:
            self.slots.remove(gone)
            self.queue.leave(gone[0])


HABITS = {
    "long answers to short prompts": (Habit(20, 900), Habit(900, 20)),
    "answers without a limit": (Habit(20, 1300, limit=100_000), Habit(300, 30)),
    "answers far below their limit": (Habit(40, 15, limit=50_000), Habit(40, 400)),
    "prompts from the cache": (Habit(9000, 60, n_cached=8900), Habit(300, 60)),
    "the same": (Habit(70, 90), Habit(70, 90)),
}


@pytest.mark.parametrize("n_slot", [1, 3, 5])
@pytest.mark.parametrize("kind", HABITS)
def test_clients_that_always_wait_get_the_same_work(kind: str, n_slot: int) -> None:
    """Uncached rows and tokens of answers together, in any expectation."""
    one, other = HABITS[kind]
    shop = Shop(n_slot, {"a": one, "b": other, "c": other})
    for _ in range(9000):
        shop.round({"a", "b", "c"})
    most = max(h.n_prompt - h.n_cached + h.n_answer for h in (one, other))
    assert max(shop.work.values()) - min(shop.work.values()) <= 2 * n_slot * most, shop.work
    assert min(shop.work.values()) > 0.6 * max(shop.work.values())


def test_a_request_counts_what_it_took_once_it_has_ended() -> None:
    queue: Queue[Item] = Queue(20)
    a = Item(cost=100, n_left=9000, client="a")
    queue.push(a)
    seated(queue, 1)
    assert a.charged == 100 + 512, "until more is known"
    a.n_to_read = 30
    queue.seated(a)
    assert a.charged == 30 + 512
    queue.running = lambda: [a]
    a.n_to_read, a.work = 0, 30 + 700
    queue.push(Item(client="b"))
    queue.first(SlotTable(1, 64, 16))
    assert a.charged == 730 and queue._given["a"] == 730, "it took more than that"
    queue.running = tuple
    a.work = 760
    queue.leave(a)
    assert queue._given["a"] == 760


def test_a_client_that_pauses_is_not_forgiven() -> None:
    """It leaves when all it asked for is done, as batches do, and comes back: the other one has caught up first."""
    habit = Habit(50, 200)
    shop = Shop(3, {"batch": habit, "chat": habit})
    for _ in range(900):
        shop.round({"batch"})
    before = shop.work.copy()
    for i in range(6000):
        shop.round({"chat", "batch"} if i % 100 < 50 else {"chat"})
    gained = {c: shop.work[c] - before[c] for c in shop.work}
    assert gained["chat"] >= 0.9 * gained["batch"]


@pytest.mark.parametrize("n_slot", [1, 3])
@pytest.mark.parametrize("answer", [1, 40, 600])
def test_clients_that_come_once_do_not_starve_those_that_were_served_before(
    n_slot: int, answer: int
) -> None:
    """20 places are full, and a new client comes whenever one is free: all are seated within a bounded number of turns."""
    queue, table = Queue[Item](20), SlotTable(1, 64, 16)
    running: list[Item] = []
    queue.running = lambda: running
    came: dict[int, tuple[int, Item]] = {}  # with the item itself, so that no other one gets its id

    def turn(t: int, client: str) -> Item:
        item = Item(cost=20, n_left=answer, client=client)
        came[id(item)] = t, item
        queue.push(item)
        first = queue.next(table)
        assert first is not None
        first.n_to_read = 20
        queue.seated(first)
        running.append(first)
        if len(running) > n_slot:
            gone = running.pop(0)
            gone.work, gone.n_to_read = 20 + answer, 0
            queue.leave(gone)
        return first

    for t in range(200):  # they come again and again, alone
        turn(t, f"old {t % 10}")
    for i in range(19):
        queue.push(Item(cost=20, n_left=answer, client=f"old {i % 10}"))
    old, late = list(queue.waiting()), 0
    for t in range(200, 1000):
        seat = turn(t, f"once {t}")
        old = [item for item in old if item is not seat]
        late = max(late, t - came.get(id(seat), (200, seat))[0])
    assert not old, f"{len(old)} still wait after 800 turns"
    assert late <= 120, "of those that come once, too"


def test_absent_clients_are_remembered_within_a_bound() -> None:
    queue: Queue[Item] = Queue(10_000)
    for i in range(3000):
        item = Item(cost=10 + i % 7, client=f"c{i}")
        queue.push(item)
        seated(queue, 1)
        item.work = 10 + i % 7
        queue.leave(item)
    queue.push(Item(client="new"))
    assert len(queue._given) <= MOST_AWAY + 2


def fill(waiting: list[Item], item: Item, limit: int) -> Item | None:
    """Admit one; the evicted one is removed."""
    gone = evict_for(item, waiting, limit)
    if gone is not None:
        waiting[:] = [other for other in waiting if other is not gone]
    waiting.append(item)
    return gone


def test_a_client_alone_has_all_places_and_short_ones_find_room_longer() -> None:
    waiting: list[Item] = []
    for _ in range(8):
        assert fill(waiting, Item(client="a", cost=5000), 8) is None
    with pytest.raises(QueueFull, match="8 requests are waiting") as e:
        evict_for(Item(client="a", cost=5000), waiting, 8)
    assert (e.value.status, e.value.retry_after_s) == (429, 1)
    for _ in range(4):
        assert fill(waiting, Item(client="a", cost=10), 8) is None
    with pytest.raises(QueueFull):
        evict_for(Item(client="a", cost=10), waiting, 8)


def test_conversations_that_go_on_have_places_of_their_own() -> None:
    waiting: list[Item] = []
    asked = 0

    def goes_on() -> bool:
        nonlocal asked
        asked += 1
        return True

    for n, (cost, more) in enumerate([(5000, goes_on)] * 8 + [(10, goes_on)] * 4 + [(10, goes_on)] * 4):
        assert evict_for(Item(client="a", cost=cost), waiting, 8, more) is None
        waiting.append(Item(client="a", cost=cost))
        assert asked == max(0, n - 11), "only if it decides"
    for cost in (10, 5000):
        with pytest.raises(QueueFull):
            evict_for(Item(client="a", cost=cost), waiting, 8, goes_on)
    assert evict_for(Item(client="b"), waiting, 8) is waiting[-1]
    with pytest.raises(QueueFull):
        evict_for(Item(client="a", wanted_slot=0), [Item(client="a", wanted_slot=0)] * 8, 8, goes_on)


def test_left_texts_are_as_many_as_a_cache_holds() -> None:
    texts = LeftTexts(100)
    for key, n in ((1, 50), (2, 40), (1, 60)):
        texts.leave(key, n)
    assert texts.goes_on([5, 1])
    assert texts.goes_on([2, 9])
    assert not texts.goes_on([5])
    assert not texts.goes_on([])
    texts.leave(3, 30)
    assert not texts.goes_on([2]) and texts.goes_on([1])
    texts.leave(4, 101)
    assert not any(texts.goes_on([key]) for key in (1, 2, 3, 4)), "it is larger than the cache"
    texts.leave(5, 100)
    assert texts.goes_on([5])


def test_who_has_most_gives_up_its_newest_to_one_who_has_fewer() -> None:
    waiting: list[Item] = []
    for client in "aaaaabbb":
        fill(waiting, Item(client=client), 8)
    newest = [w for w in waiting if w.client == "a"][-1]
    assert fill(waiting, Item(client="c"), 8) is newest
    assert sorted(w.client for w in waiting) == [*"aaaabbbc"]
    with pytest.raises(QueueFull):
        evict_for(Item(client="b"), waiting, 8)  # 4 and 4 would only swap the largest client


@pytest.mark.parametrize("n_hostile", [1, 2, 4, 7])
def test_however_many_addresses_keep_the_queue_full_a_newcomer_has_a_share(n_hostile: int) -> None:
    """All ask again at once, after every refusal and eviction."""
    limit, waiting, refused = 16, [], 0
    for i in range(400):
        clients = [f"bad {(i + j) % n_hostile}" for j in range(n_hostile)]
        for client in [*clients, "good"] if i % 20 == 10 else clients:
            try:
                fill(waiting, Item(client=client), limit)
            except QueueFull:
                refused += client == "good"
        assert len(waiting) <= limit
    share = limit // (n_hostile + 1)
    count = Counter(w.client for w in waiting)
    assert count["good"] >= share and refused == 20 - count["good"]
    assert max(count.values()) <= share + 2


def test_who_waits_for_a_slot_takes_no_place_of_others() -> None:
    waiting: list[Item] = []
    for _ in range(4):
        fill(waiting, Item(wanted_slot=0, client="a"), 4)
    with pytest.raises(QueueFull):
        evict_for(Item(wanted_slot=1, client="a"), waiting, 4)
    for _ in range(4):
        assert fill(waiting, Item(client="a"), 4) is None
    gone = fill(waiting, Item(wanted_slot=1, client="b"), 4)
    assert gone is not None and gone.wanted_slot == 0


# -- in the loop ---------------------------------------------------------------------------------------------------


def test_what_requests_took_is_what_the_loop_gave_them() -> None:
    """Cached prompts, answers, and requests that are cancelled or wait: each counts its uncached rows and its tokens."""
    r = fake_rig(3, page_size=7, ctx=200, n_page=90)
    r.submit([1] * 41, 9, client="e")
    r.run()
    heard = [
        r.submit([1] * 41 + [9] * 20, 12, client="a"),
        r.submit([2] * 50, 90, client="b"),
        r.submit([3] * 11, 100, client="c"),
        r.submit([4] * 70, 90, client="d"),
    ]
    r.steps(4)
    assert [h.job.charged for h in heard] == [20 + 12, 50 + 90, 11 + 100, 0], "what they will take"
    r.loop.cancel(heard[1].job)
    r.loop.cancel(r.submit([5] * 30, 20, client="f").job)
    r.run()
    for h in heard:
        t = h.done.timings
        assert h.job.charged == t.prompt_n + t.predicted_n, h.job.client
    assert heard[0].done.timings.prompt_n == 20 and heard[1].job.charged < 50 + 90


def test_groups_that_have_ended_are_forgotten_though_their_client_stays() -> None:
    queue: Queue[Item] = Queue(8)
    for i in range(100):
        first, second = Item(group=f"{i}"), Item(group=f"{i}")
        queue.push(first)
        queue.push(second)
        queue.remove(first)
        queue.remove(second)
    assert len(queue._groups) == 1
