"""The scheduler of several models: random events against its invariants, and the races that other servers had, by name."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

import numpy as np
import pytest

from pyspec.errors import DeviceError, DoesNotFit, PyspecError, QueueFull, Unavailable
from pyspec.server.models.schedule import (
    MOST_BEFORE,
    MOST_PARKED,
    PATIENCE_S,
    YOUNG_S,
    Action,
    AskNeed,
    Bytes,
    Changed,
    Grant,
    ModelRow,
    Park,
    Refuse,
    Schedule,
    Start,
    Stop,
    Wake,
    rank,
)

GB = 1 << 30


class Watched(Schedule):
    """Checks each model that begins before one that waited longer."""

    n_passed = 0

    def _admit(self, head: ModelRow, before: Sequence[ModelRow], now: float) -> bool:
        is_done = super()._admit(head, before, now)
        if is_done and head.state in ("loading", "waking") and before:
            assert self.may_pass(head, before, now), "one before it waits for it"
            self.n_passed += 1
        return is_done

    def may_pass(self, late: ModelRow, before: Sequence[ModelRow], now: float) -> bool:
        """Whether a model fits beside all loaded ones, and all earlier ones still fit as if this one were not there, for any set of ended ones."""

        def takes(held: Bytes, *, counts: bool = True) -> np.ndarray:
            return np.array([*(held.get(place, 0) for place in self.budget), counts])

        room = np.array([*self.budget.values(), self.most or 99])
        new, able = takes(late.on_its_way.held), [takes(row.on_its_way.held) for row in before]
        free, busy = room - new, []
        for row in (row for row in self.rows.values() if row.is_resident and row is not late):
            free = free - takes(row.held, counts=row.state != "parked")
            if row.state != "stopping" and row not in before and not row.is_evictable(now):
                busy.append(takes(row.later, counts=row.state not in ("parked", "parking")))
                if row.pinned:
                    room = room - busy.pop()
        is_free = (free >= 0).all() and len(busy) + len(before) <= MOST_BEFORE
        for i, head in enumerate(able):
            for keep in product((0, 1), repeat=len(busy) + i):
                left = room - head - sum(map(np.multiply, keep, [*busy, *able[:i]]))
                is_free = is_free and not ((left >= 0).all() and (left < new).any())
        return bool(is_free)


@dataclass
class World:
    """A table with engines that take their time: what the actions begin ends later."""

    table: Watched
    needs: dict[str, dict[str, int]]
    now: float = 0.0
    load_s: Callable[[], float] = lambda: 1.0
    fails: Callable[[str], bool] = lambda name: False
    rests: dict[str, dict[str, int]] = field(default_factory=dict)
    due: list[tuple[float, int, Callable[[], list[Action]]]] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)
    refused: dict[int, PyspecError] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    up: Counter[str] = field(default_factory=Counter)  # engines by model
    stopped: list[tuple[str, int]] = field(default_factory=list)  # with the claims that they had
    started: list[tuple[str, float]] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    n_stop: Counter[str] = field(default_factory=Counter)
    n: int = 0

    def ask(self, name: str, idle_s: float | None = None) -> int:
        self.n += 1
        ticket = self.n
        self.owner[ticket] = name
        self.do(self.table.request(name, ticket, self.now, idle_s))
        return ticket

    def end(self, ticket: int) -> None:
        self.do(self.table.end(ticket, self.now))

    def later(self, delay: float, event: Callable[[], list[Action]]) -> None:
        self.n += 1
        self.due.append((self.now + delay, self.n, event))

    def do(self, actions: list[Action]) -> None:
        table = self.table
        for one in actions:
            if isinstance(one, AskNeed):
                self.later(0.1, lambda name=one.name: self.planned(name))
            elif isinstance(one, Start):
                self.up[one.name] += 1
                self.started.append((one.name, self.now))
                self.later(self.load_s(), lambda name=one.name: self.loaded(name))
            elif isinstance(one, Park | Wake):
                assert not table.rows[one.name].claims, "something runs"
                is_park, n = isinstance(one, Park), self.n_stop[one.name]
                (self.parked if is_park else self.woken).append(one.name)
                self.later(0.3, lambda name=one.name, is_park=is_park, n=n: self.moved(name, is_park, n))
            elif isinstance(one, Stop):
                self.n_stop[one.name] += 1
                self.stopped.append((one.name, len(table.rows[one.name].claims)))
                self.later(0.2, lambda name=one.name: self.gone(name))
            elif isinstance(one, Grant):
                assert table.rows[self.owner[one.ticket]].state in ("loaded", "draining")
                self.granted.append(one.ticket)
            elif isinstance(one, Refuse):
                assert one.ticket not in self.granted[-50:]
                self.refused[one.ticket] = one.error
            else:
                assert isinstance(one, Changed)
        self.check()

    def planned(self, name: str) -> list[Action]:
        return self.table.planned(name, self.needs[name], self.now, self.rests.get(name))

    def moved(self, name: str, is_park: bool, n: int) -> list[Action]:
        """A park or a wake is over: it may be that of an engine that was stopped meanwhile."""
        if n != self.n_stop[name]:
            return []
        if self.fails(name):
            return self.table.died(name, DeviceError("planted"), self.now)
        return (self.table.parked if is_park else self.table.loaded)(name, self.now)

    def loaded(self, name: str) -> list[Action]:
        if self.table.rows[name].state != "loading":
            return []
        if self.fails(name):
            self.up[name] -= 1
            return self.table.failed(name, DeviceError("planted"), self.now)
        return self.table.loaded(name, self.now)

    def gone(self, name: str) -> list[Action]:
        self.up[name] -= 1
        return self.table.gone(name, self.now)

    def check(self) -> None:
        table = self.table
        for place, n in table.used().items():
            assert n <= table.budget[place], "more memory than there is"

        def is_parked(row: ModelRow) -> bool:
            return row.state == "parked" or (row.state == "stopping" and row.last == row.rest)

        active = [row for row in table.rows.values() if row.is_resident and not is_parked(row)]
        assert not table.most or len(active) <= table.most
        idle = [row for row in table.rows.values() if row.since == inf]
        assert sum(row.state in ("parking", "parked") for row in idle) <= MOST_PARKED
        sums = dict.fromkeys(table.budget, 0)
        for row in table.rows.values():  # the books, counted anew
            for place in sums:
                need, rest = (of.get(row.name, {}).get(place, 0) for of in (self.needs, self.rests))
                most = max(need, rest)
                takes = {"unloaded": 0, "parked": rest, "parking": most, "waking": most}
                sums[place] += {**takes, "stopping": most}.get(row.state, need)
        assert all(n <= sums[place] for place, n in table.used().items())
        if all(row.state != "stopping" for row in table.rows.values()):
            assert table.used() == sums
        assert max(self.up.values(), default=0) <= 1, "a model is loaded twice"
        for row in table.rows.values():
            assert row.is_resident == bool(self.up[row.name])
            assert not row.waiting or row.state != "loaded", "a loaded model lets nobody wait"
            assert not row.claims or row.state not in ("parking", "parked", "waking")
            assert row.state not in ("parking", "parked") or row.rest is not None

        queue = [rows for rows in table._queue() if rows[1]]
        assert not any(table.may_pass(*rows, self.now) for rows in queue), "it delays nobody, and waits"

    def run(self, until: float, step: float = 0.1) -> None:
        """Let time pass; what is due happens."""
        while self.now < until:
            self.now += step
            while self.due and (first := min(self.due))[0] <= self.now:
                self.due.remove(first)
                self.do(first[2]())
            self.do(self.table.tick(self.now))


def world(budget: int, *models: tuple[str, int], most: int = 4, **more: dict) -> World:
    table = Watched({"host": budget}, most=most)
    table.rows = {name: ModelRow(name, **more.get(name, {})) for name, _ in models}
    return World(table, {name: {"host": n} for name, n in models})


def card_world(card: int, host: int, *models: tuple[str, int]) -> World:
    """Models on a card; parked, each keeps its bytes in host memory and 1 on the card."""
    table = Watched({"cuda:0": card, "host": host})
    table.rows = {name: ModelRow(name) for name, _ in models}
    needs = {name: {"cuda:0": n, "host": 1} for name, n in models}
    return World(table, needs, rests={name: {"cuda:0": 1, "host": 1 + n} for name, n in models})


def used_once(w: World, *names: str) -> None:
    for name in names:
        ticket = w.ask(name)
        w.run(w.now + 4)
        assert ticket in w.granted
        w.end(ticket)


def states(w: World) -> dict[str, str]:
    return {name: row.state for name, row in w.table.rows.items()}


def loaded_in(w: World) -> set[str]:
    return {name for name, row in w.table.rows.items() if row.state == "loaded"}


def random_events(n_event: int, seed: int) -> World:
    """Requests, ends, leaving clients, failures, deaths, calls and time, in any order; `World.check` holds the invariants at each step."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(7)]
    needs = {n: {"host": rng.randint(1, 4), "cuda:0": rng.randint(0, 30)} for n in names}
    needs["m6"] = {"host": 3, "cuda:0": 99}  # it never fits
    table = Watched({"host": 12, "cuda:0": 48}, most=rng.choice([0, 2, 3]), queue=20, wait_s=120.0)
    table.rows = {
        n: ModelRow(n, pinned=n == "m0", idle_s=rng.choice([-1, 0, 5]), stop_s=2.0) for n in names
    }
    w = World(
        table, needs, load_s=lambda: rng.choice([0.1, 0.5, 3.0]), fails=lambda name: rng.random() < 0.1,
        rests={n: {"host": needs[n]["host"] + rng.randint(0, 3), "cuda:0": rng.randint(0, 2)} for n in ("m1", "m2", "m3", "m6")},
    )  # fmt: skip
    running: list[int] = []
    for i in range(n_event):
        kind = rng.random()
        if kind < 0.35:
            name = rng.choice(names)
            running.append(w.ask(name, rng.choice([None, None, None, 0.0, 3.0, -1.0])))
        elif kind < 0.65 and running:
            w.end(running.pop(rng.randrange(len(running))))
        elif kind < 0.68:
            w.do(table.unload(rng.choice(names), w.now))
        elif kind < 0.70:
            w.do(table.park(rng.choice(names), w.now))
        elif kind < 0.71:
            w.do(table.load(rng.choice(names), w.now))
        elif kind < 0.72:
            w.do(table.died(rng.choice(names), DeviceError("planted"), w.now))
        else:
            w.run(w.now + rng.choice([0.1, 0.3, 1.0]), 0.25)
        running = [t for t in running if t not in w.refused]
        if i % 500 == 499:  # every waiter ends in bounded time, once all others have
            waiting = [t for row in table.rows.values() for t in row.waiting]
            for ticket in [t for t in running if t not in waiting]:
                w.end(ticket)
            for _ in range(60):
                w.run(w.now + 2.0, 0.5)
                for row in table.rows.values():
                    for ticket in list(row.claims):
                        w.end(ticket)
            assert not table.n_waiting
            running = []
            w.granted, w.refused = w.granted[-50:], {}
    return w


def test_random_events_keep_the_invariants() -> None:
    worlds = [random_events(1500, seed) for seed in range(4)]
    assert all(len(w.started) > 50 and w.stopped for w in worlds)
    assert sum(len(w.parked) for w in worlds) > 100 and sum(len(w.woken) for w in worlds) > 30
    assert sum(w.table.n_passed for w in worlds) > 10


@pytest.mark.slow
def test_a_hundred_thousand_random_events() -> None:
    for seed in range(10):
        random_events(10_000, 100 + seed)


def test_a_parked_model_that_was_to_wake_and_is_not_wanted_is_one_of_four() -> None:
    """Another was parked for it, and then five stayed."""
    w = card_world(14, 100, *((f"m{i}", 8) for i in range(5)))
    used_once(w, *(f"m{i}" for i in range(5)))
    w.end(w.ask("m0"))
    w.run(w.now + 2)
    assert states(w) == {"m0": "unloaded", **dict.fromkeys(("m1", "m2", "m3", "m4"), "parked")}


def test_nothing_that_runs_is_evicted() -> None:
    """A is killed while it answers, because B came (llama.cpp 21678)."""
    w = world(50 * GB, ("a", 29 * GB), ("b", 40 * GB))
    a = w.ask("a")
    w.run(5)
    assert a in w.granted
    b = w.ask("b")
    w.run(25)
    assert loaded_in(w) == {"a"} and b not in w.granted
    w.end(a)
    w.run(30)
    assert loaded_in(w) == {"b"} and b in w.granted and w.stopped == [("a", 0)]


def test_two_waiters_do_not_share_a_victim() -> None:
    """Two waiters choose one victim, and one of them hangs (llama.cpp 28443)."""
    w = world(10, ("a", 10), ("b", 10), ("c", 10))
    w.end(w.ask("a"))
    w.run(3)
    b, c = w.ask("b"), w.ask("c")
    w.run(6)
    assert b in w.granted and c not in w.granted
    w.end(b)
    w.run(9)
    assert c in w.granted


def test_a_model_is_not_evicted_before_its_first_request() -> None:
    """The model is gone before the request that loaded it was sent (llama.cpp 28698)."""
    w = world(10, ("a", 10), ("b", 10))
    a = w.ask("a")
    w.run(0.5)
    b = w.ask("b")
    w.run(8)
    assert w.granted == [a]
    w.end(a)
    w.run(12)
    assert w.granted == [a, b]


def test_a_model_without_a_request_stays_for_a_moment() -> None:
    w = world(10, ("a", 10), ("b", 10))
    w.do(w.table.load("a", w.now))
    w.run(1.5)
    assert loaded_in(w) == {"a"}
    at = w.table.rows["a"].loaded_at
    w.ask("b")
    w.run(at + YOUNG_S - 0.2)
    assert loaded_in(w) == {"a"}
    w.run(at + YOUNG_S + 3)
    assert loaded_in(w) == {"b"}


def test_a_request_to_a_draining_model_waits_for_its_next_load() -> None:
    w = world(10, ("a", 10))
    first = w.ask("a")
    w.run(2)
    w.do(w.table.unload("a", w.now))
    second = w.ask("a")
    assert w.table.rows["a"].state == "draining" and second not in w.granted
    w.end(first)
    w.run(6)
    assert second in w.granted and len(w.started) == 2


def test_an_unload_ends_requests_after_its_time() -> None:
    w = world(10, ("a", 10), a={"stop_s": 3.0})
    w.ask("a")
    w.run(2)
    w.do(w.table.unload("a", w.now))
    w.run(4.5)
    assert not w.stopped
    w.run(6)
    assert w.stopped == [("a", 1)]


def test_an_unload_while_loading_ends_what_waits() -> None:
    w = world(10, ("a", 10), ("b", 10))
    a = w.ask("a")
    w.run(0.5)
    w.do(w.table.unload("a", w.now))
    assert isinstance(w.refused[a], Unavailable)
    b = w.ask("b")
    w.run(4)
    assert b in w.granted


def test_a_busy_model_is_drained_for_one_that_waits_long() -> None:
    w = world(10, ("a", 10), ("b", 10))
    first = w.ask("a")
    w.run(2)
    b = w.ask("b")
    w.run(2 + PATIENCE_S - 1)
    passing = w.ask("a")
    assert passing in w.granted
    w.run(2 + PATIENCE_S + 1)
    late = w.ask("a")
    assert late not in w.granted and w.table.rows["a"].state == "draining"
    w.end(first)
    w.run(w.now + 5)
    assert b not in w.granted, "its requests end by themselves"
    w.end(passing)
    w.run(w.now + 5)
    assert b in w.granted and late not in w.granted


def test_a_drain_ends_when_nobody_waits_for_it() -> None:
    w = world(10, ("a", 10), ("b", 10))
    w.ask("a")
    w.run(2)
    b = w.ask("b")
    w.run(2 + PATIENCE_S + 1)
    late = w.ask("a")
    w.end(b)  # its client has left
    assert late in w.granted and not w.stopped


def test_a_client_that_leaves_costs_no_model_its_place() -> None:
    w = world(10, ("a", 10), ("b", 10))
    a = w.ask("a")
    w.run(2)
    w.end(w.ask("b"))
    w.end(a)
    w.run(9)
    assert loaded_in(w) == {"a"} and not w.stopped


def test_the_oldest_waiting_model_is_next() -> None:
    w = world(10, ("a", 10), ("b", 10), ("c", 10))
    a = w.ask("a")
    w.run(2)
    b, c, b2 = w.ask("b"), w.ask("c"), w.ask("b")
    w.end(a)
    w.run(5)
    assert w.granted == [a, b, b2]
    w.end(b)
    w.end(b2)
    w.run(9)
    assert w.granted[3:] == [c]


def test_a_model_passes_where_it_takes_no_room_of_one_that_waits() -> None:
    """It waited behind a model whose room busy ones held, though it fitted beside them all."""
    w = world(80, ("a", 50), ("b", 40), ("c", 20), ("e", 10), ("d", 15), ("f", 90), most=0)
    a = w.ask("a")
    w.run(2)
    b, c, e, d, f = (w.ask(name) for name in "bcedf")
    w.run(5)
    assert w.granted == [a, c, e] and w.table.n_passed == 2 and f in w.refused
    w.end(a)  # those that passed run on
    w.run(8)
    assert w.granted == [a, c, e, b] and d not in w.granted
    w.end(c)
    w.run(11)
    assert w.granted[4:] == [d]


def test_a_model_waits_for_the_ends_of_those_only_that_came_before_it() -> None:
    """However many pass it and never end."""
    for seed in range(60):
        rng = random.Random(seed)
        models = [(f"m{i}", rng.randint(1, 40)) for i in range(8)]
        w = world(80, *models, ("first", rng.randint(40, 80)), most=rng.choice([0, 4, 5]))
        before = [w.ask(name) for name, _ in models[:3]]
        w.run(2)
        first = w.ask("first")
        for name, _ in models[3:]:
            w.run(w.now + 0.3)
            w.ask(name)
        for ticket in before:
            w.end(ticket)
        w.run(w.now + 4)
        assert first in w.granted


def test_least_recently_used_models_leave_and_no_more_than_needed() -> None:
    w = world(10, ("a", 5), ("b", 2), ("c", 2), ("d", 4))
    used_once(w, *"abc")
    w.run(w.now + 1)
    w.end(w.ask("a"))
    w.ask("d")
    w.run(w.now + 3)
    assert loaded_in(w) == {"a", "d"}
    w = world(10, ("a", 5), ("b", 2), ("c", 2), ("d", 4))
    used_once(w, *"bac")
    w.ask("d")
    w.run(w.now + 3)
    assert loaded_in(w) == {"b", "c", "d"}, "a alone gives enough"


def test_the_number_of_models_has_a_limit() -> None:
    w = world(100, ("a", 1), ("b", 1), ("c", 1), most=2)
    used_once(w, *"abc")
    assert loaded_in(w) == {"b", "c"}


def test_pinned_models_stay_and_what_never_fits_is_refused_with_numbers() -> None:
    w = world(10 * GB, ("a", 7 * GB), ("b", 5 * GB), ("c", 2 * GB), a={"pinned": True, "idle_s": 0.0})
    a = w.ask("a")
    w.run(3)
    w.end(a)
    b, c = w.ask("b"), w.ask("c")
    w.run(6)
    assert loaded_in(w) == {"a", "c"} and c in w.granted
    assert isinstance(w.refused[b], DoesNotFit)
    assert "5.00 GiB of host" in str(w.refused[b]) and "7.00 GiB of which pinned" in str(w.refused[b])


def test_a_failed_load_fails_its_requests_and_leaves_the_others() -> None:
    w = world(10, ("a", 5), ("b", 5))
    w.fails = lambda name: name == "b"
    w.ask("a")
    w.run(2)
    first, second = w.ask("b"), w.ask("b")
    w.run(3.5)
    assert {first, second} <= w.refused.keys() and loaded_in(w) == {"a"}
    assert w.ask("b") in w.refused, "at once, with the same reason"
    w.run(6)
    w.fails = lambda name: False
    again = w.ask("b")
    w.run(9)
    assert again in w.granted


def test_a_call_to_load_is_tried_at_once_after_a_failure() -> None:
    w = world(10, ("a", 5))
    w.fails = lambda name: True
    w.ask("a")
    w.run(1.5)
    assert w.table.rows["a"].failed
    w.fails = lambda name: False
    w.do(w.table.load("a", w.now))
    w.run(3)
    assert loaded_in(w) == {"a"} and w.table.rows["a"].failed is None


def test_a_plan_that_takes_long_holds_up_nobody_and_is_told_to_those_that_give_up() -> None:
    """A model may be downloaded for its plan."""
    w = world(10, ("a", 5), ("b", 5))
    w.table.wait_s, w.planned = (
        20.0,
        lambda name: w.table.planned(name, w.needs[name], w.now) if name == "b" else [],
    )  # type: ignore[method-assign]
    a, b = w.ask("a"), w.ask("b")
    w.run(21)
    assert w.granted == [b] and "still on its way" in str(w.refused[a])


def test_a_load_that_is_asked_for_during_a_drain_follows_it() -> None:
    w = world(10, ("a", 10), ("b", 10))
    a = w.ask("a")
    w.run(2)
    w.do(w.table.unload("a", w.now))
    w.do(w.table.load("a", w.now))
    assert w.table.rows["a"].state == "draining"
    w.end(a)
    w.run(5)
    assert loaded_in(w) == {"a"} and w.up["a"] == 1 and len(w.started) == 2
    assert w.table.rows["a"].asked is None


def test_the_queue_and_the_wait_have_limits() -> None:
    w = world(10, ("a", 10), ("b", 10))
    w.table.queue, w.table.wait_s = 2, 20.0
    w.ask("a")
    w.run(2)
    one, two, three = (w.ask("b") for _ in range(3))
    assert isinstance(w.refused[three], QueueFull)
    w.run(21)
    assert not {one, two} & w.refused.keys()
    w.run(23)
    assert isinstance(w.refused[one], Unavailable) and isinstance(w.refused[two], Unavailable)


def test_idle_models_leave_after_their_time() -> None:
    w = world(10, ("a", 5), ("b", 5), a={"idle_s": 4.0})
    a, b = w.ask("a"), w.ask("b", idle_s=0.0)
    w.run(10)
    assert loaded_in(w) == {"a", "b"}
    w.end(b)
    w.end(a)
    w.run(12)
    assert loaded_in(w) == {"a"}
    w.run(15)
    assert loaded_in(w) == set() and w.table.rows["a"].since == inf


def test_an_engine_that_stops_for_good_is_loaded_again_for_the_next_request() -> None:
    w = world(10, ("a", 5))
    a = w.ask("a")
    w.run(2)
    w.do(w.table.died("a", DeviceError("planted"), w.now))
    again = w.ask("a")
    w.end(a)
    w.run(5)
    assert again in w.granted and len(w.started) == 2


def test_a_model_that_leaves_is_parked_and_wakes() -> None:
    w = card_world(24, 100, ("a", 20), ("b", 18))
    used_once(w, "a", "b", "a", "b")
    assert states(w) == {"a": "parked", "b": "loaded"} and not w.stopped
    assert w.parked == ["a", "b", "a"] and w.woken == ["a", "b"] and len(w.started) == 2
    assert w.table.rows["a"].wake_s < w.table.rows["a"].load_s
    assert w.table.used() == {"cuda:0": 19, "host": 22}


def test_without_room_in_the_host_a_model_is_unloaded() -> None:
    w = card_world(24, 12, ("a", 20), ("b", 18))
    used_once(w, "a", "b")
    assert states(w) == {"a": "unloaded", "b": "loaded"} and not w.parked


def test_what_a_parked_model_keeps_of_the_card_counts() -> None:
    w = card_world(20, 100, ("a", 19), ("b", 20))
    used_once(w, "a", "b")
    assert states(w) == {"a": "unloaded", "b": "loaded"}, "b fits alone only"


def test_the_parked_model_that_was_used_longest_ago_makes_room() -> None:
    w = card_world(24, 46, ("a", 20), ("b", 20), ("c", 20), ("d", 20))
    used_once(w, "a", "b", "c")
    assert states(w) == {"a": "parked", "b": "parked", "c": "loaded", "d": "unloaded"}
    used_once(w, "d")
    assert states(w) == {"a": "unloaded", "b": "parked", "c": "parked", "d": "loaded"}
    assert w.stopped == [("a", 0)]


def test_no_more_than_a_few_are_parked() -> None:
    w = card_world(30, 1000, *((name, 20) for name in "abcdefg"))
    used_once(w, *"abcdefg")
    assert sorted(states(w).values()) == ["loaded"] + ["parked"] * MOST_PARKED + ["unloaded"] * 2
    assert states(w)["a"] == states(w)["b"] == "unloaded"


def test_parked_models_are_the_first_to_leave() -> None:
    w = card_world(60, 30, ("a", 10), ("b", 10), ("c", 30), ("d", 10))
    used_once(w, "a", "b", "c")
    w.do(w.table.park("b", w.now))
    w.run(w.now + 1)
    w.table.budget["host"] = 14  # b keeps 11 of it
    used_once(w, "d")
    assert loaded_in(w) == {"a", "c", "d"}
    w.needs["e"] = {"cuda:0": 1, "host": 11}
    w.table.rows["e"] = ModelRow("e")
    used_once(w, "e")
    assert states(w)["b"] == "unloaded" and states(w)["a"] == states(w)["c"] == "loaded"


def test_idle_models_are_parked_and_a_call_unloads_them() -> None:
    w = card_world(24, 100, ("a", 20))
    w.table.rows["a"].idle_s = 2.0
    used_once(w, "a")
    w.run(w.now + 4)
    assert states(w) == {"a": "parked"}
    w.run(w.now + 60)
    assert states(w) == {"a": "parked"} and not w.table.is_timed
    w.do(w.table.unload("a", w.now))
    w.run(w.now + 1)
    assert states(w) == {"a": "unloaded"} and not any(w.table.used().values())


def test_a_call_to_park_waits_for_what_runs() -> None:
    w = card_world(24, 100, ("a", 20))
    ticket = w.ask("a")
    w.run(3)
    w.do(w.table.park("a", w.now))
    w.run(5)
    assert states(w) == {"a": "draining"}
    w.end(ticket)
    w.run(7)
    assert states(w) == {"a": "parked"}
    again = w.ask("a")
    w.run(8)
    assert again in w.granted and len(w.started) == 1


def test_a_request_while_a_model_is_being_parked_wakes_it() -> None:
    w = card_world(24, 100, ("a", 20))
    used_once(w, "a")
    w.do(w.table.park("a", w.now))
    assert states(w) == {"a": "parking"}
    ticket = w.ask("a")
    w.run(w.now + 2)
    assert ticket in w.granted and w.woken == ["a"]


@pytest.mark.parametrize("state", ["parking", "parked", "waking"])
def test_an_engine_that_ends_while_it_is_parked_is_loaded_again(state: str) -> None:
    w = card_world(24, 100, ("a", 20))
    used_once(w, "a")
    w.do(w.table.park("a", w.now))
    ticket = 0
    if state != "parking":
        w.run(w.now + 1)
    if state == "waking":
        ticket = w.ask("a")
    assert states(w) == {"a": state}
    w.do(w.table.died("a", DeviceError("killed"), w.now))
    ticket = ticket or w.ask("a")
    w.run(w.now + 4)
    assert ticket in w.granted and states(w) == {"a": "loaded"} and len(w.started) == 2


def test_an_unload_ends_a_park_and_a_wake() -> None:
    for state in ("parking", "parked", "waking"):
        w = card_world(24, 100, ("a", 20))
        used_once(w, "a")
        w.do(w.table.park("a", w.now))
        if state != "parking":
            w.run(w.now + 1)
        ticket = w.ask("a") if state == "waking" else 0
        w.do(w.table.unload("a", w.now))
        w.run(w.now + 2)
        assert states(w) == {"a": "unloaded"} and not w.table.n_waiting
        assert not ticket or isinstance(w.refused[ticket], Unavailable)


def test_the_order_of_victims() -> None:
    def row(name: str, *, age_s: float, n: int = 1, **more: object) -> ModelRow:
        return ModelRow(name, need={"host": n}, state="loaded", used=1000.0 - age_s, **more)  # type: ignore[arg-type]

    def first(*rows: ModelRow) -> str:
        return min(rows, key=lambda one: rank(one, 1000.0)).name

    assert first(row("old", age_s=900), row("new", age_s=5)) == "old"
    assert first(row("big", age_s=50, n=60 << 30), row("small", age_s=5, n=1 << 30)) == "small"
    assert first(row("big", age_s=900, n=60 << 30), row("small", age_s=5, n=1 << 30)) == "big"
    assert first(row("slow", age_s=50, load_s=90.0), row("fast", age_s=5, load_s=3.0)) == "fast"
    assert first(row("a", age_s=50, n=1 << 30), row("b", age_s=5, n=(1 << 30) - 1)) == "a", (
        "about as dear"
    )
    assert first(row("a", age_s=50, load_s=7.5), row("b", age_s=5, load_s=0.5)) == "a", "both at once"
    parks = row("parks", age_s=5, n=30 << 30, rest={"host": 1})
    assert first(row("loads", age_s=50, n=30 << 30), parks) == "parks", "it wakes in a moment"
    parked = ModelRow("parked", need={"host": 9}, rest={"host": 9}, state="parked", used=999.0)
    assert first(parked, row("old", age_s=900)) == "parked"
    assert first(parked, ModelRow("older", rest={"host": 1}, state="parked", used=5.0)) == "older"


def test_switches_of_two_models_that_do_not_fit_together_keep_the_books() -> None:
    rng = random.Random(7)
    w = card_world(24, 100, ("a", 20), ("b", 18))
    for i in range(100):
        ticket = w.ask("ab"[i % 2])
        w.run(w.now + rng.choice([0.07, 0.4, 1.3, 3.1]))
        if rng.random() < 0.2:
            w.do(w.table.died("ab"[rng.randrange(2)], DeviceError("killed"), w.now))
        if ticket in w.granted or rng.random() < 0.3:
            w.end(ticket)
    w.run(w.now + 700)
    for row in w.table.rows.values():
        for ticket in list(row.claims):
            w.end(ticket)
    w.run(w.now + 30)
    assert not w.table.n_waiting and not w.due
    for name in "ab":
        w.do(w.table.unload(name, w.now))
    w.run(w.now + 5)
    assert not any(w.table.used().values()) and not w.table._of and not any(w.up.values())
