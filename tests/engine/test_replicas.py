"""Several engines behind one interface: the one that gets a request, ends of engines, and the figures of all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from supervised_rig import CHILD, PATH, Ear, Plants, wait_for

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.plan.describe import check_cards, describe
from pyspec.engine.plan.longest import usable_bytes
from pyspec.engine.policy.affinity import BLOCK, MOST, WORTH, Affinity, KnownTexts, chain
from pyspec.engine.process import supervisor as supervising
from pyspec.engine.process.replicas import Replicas, later_device, shared_settings
from pyspec.engine.process.supervised_request import Crash, SupervisedRequest
from pyspec.errors import (
    ConfigError,
    DeviceError,
    ModelError,
    NoDevice,
    QueueFull,
    RequestError,
    SlotError,
    Unavailable,
)
from pyspec.request import Done, Failed, Request, Started
from pyspec.slot_action import SlotAction

N = 3
SYSTEM = tuple(range(5 * BLOCK))


@contextmanager
def start(plants: Plants, n: int = N, **settings: object) -> Iterator[tuple[Engine, Replicas]]:
    values = {"np": 5, "replicas": n} | settings
    command = (sys.executable, str(CHILD), str(plants.folder))
    replicas = Replicas(PATH, EngineSettings(**values), command=command)  # type: ignore[arg-type]
    try:
        replicas.wait()
        yield Engine(replicas, replicas.tokenizer, replicas.template), replicas
    finally:
        assert replicas.close()


@pytest.fixture(autouse=True)
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0, 0.01, 0.02))


def kill(replicas: Replicas, i: int) -> None:
    child = replicas.supervisors[i]._child
    assert child is not None
    os.kill(child.process.pid, signal.SIGKILL)


# -- the choice ------------------------------------------------------------------------------------------------------


def test_a_conversation_returns_to_its_replica_until_that_is_much_busier() -> None:
    affinity = Affinity(N, 1000, 10)
    turn = chain(SYSTEM + tuple(range(500, 500 + 40 * BLOCK)))
    affinity.chose(1, turn)
    longer = chain(SYSTEM + tuple(range(500, 500 + 43 * BLOCK)))
    assert affinity.order(longer, [0, 0, 0]) == [1, 0, 2]
    lead = 45 * BLOCK // WORTH  # whole requests that the 45 known blocks are worth
    assert lead == 2
    assert affinity.order(longer, [0, lead, 0])[0] == 1
    assert affinity.order(longer, [0, lead + 1, 0])[0] == 0
    assert affinity.order(longer, [None, lead + 1, None]) == [1]
    assert affinity.order([], [0, 0, 0]) == [0, 2, 1], (
        "it had a request, and nothing is known of this one"
    )


def test_what_all_replicas_know_decides_nothing() -> None:
    affinity = Affinity(N, 1000, 10)
    for i in range(N):
        affinity.chose(i, chain(SYSTEM))
    assert affinity.order(chain(SYSTEM), [2, 1, 2])[0] == 1
    assert affinity.order(chain(SYSTEM)[:2], [1, 1, 0])[0] == 2


def test_a_long_prefix_does_not_outweigh_any_queue() -> None:
    affinity = Affinity(2, 10**5, 3)
    keys = chain(range(100 * WORTH))
    affinity.chose(0, keys)
    assert affinity.order(keys, [3 * MOST - 1, 0])[0] == 0
    assert affinity.order(keys, [3 * MOST + 1, 0])[0] == 1


def test_a_conversation_leaves_for_an_idle_slot_and_not_for_a_queue_that_is_a_little_shorter() -> None:
    affinity = Affinity(3, 1000, 3)
    turn = chain(range(8 * BLOCK))  # worth half a request
    affinity.chose(0, turn)
    assert affinity.order(turn, [3, 2, 2])[0] == 1, "none waits"
    assert affinity.order(turn, [24, 24, 23])[0] == 0 and affinity.order(turn, [24, 21, 23])[0] == 0
    assert affinity.order(turn, [24, 15, 23])[0] == 1
    assert affinity.order(turn, [24, None, 2])[0] == 2
    assert affinity.order([], [24, 23, 24])[0] == 1, "a new one goes to the shortest"


def test_the_ends_of_old_texts_are_forgotten_first() -> None:
    known, old, new = KnownTexts(7), chain(range(5 * BLOCK)), chain(range(9, 9 + 4 * BLOCK))
    known.add(old)
    known.add(new)
    assert known.n_known(old) == 3 * BLOCK and known.n_known(new) == 4 * BLOCK
    assert known.n_known(old[:2]) == 2 * BLOCK
    known.clear()
    assert known.n_known(old) == 0
    assert chain(range(2 * BLOCK + 5))[:2] == old[:2] and chain((7, *range(1, 2 * BLOCK)))[1] != old[1]


def test_settings_of_the_first_and_the_later_ones() -> None:
    s = shared_settings(EngineSettings(replicas=4, cache_ram=1000, threads=7))
    assert (s.cache_ram, s.threads, s.replicas) == (250, 7, 4)
    assert (later_device("cuda:1", 6), later_device("cuda", 2), later_device("cpu", 3)) == (
        "cuda:7",
        "cuda:2",
        "cpu",
    )
    with pytest.raises(ConfigError, match="--tp 0 takes every GPU"):
        EngineSettings(replicas=2, tp=0)
    with pytest.raises(ConfigError, match="leave out --in-process"):
        Engine.from_settings(PATH, EngineSettings(replicas=2))


@pytest.mark.parametrize(
    ("first", "there", "fits"), [("cuda", 6, True), ("cuda:1", 6, False), ("cpu", 0, True)]
)
def test_cards_are_counted_before_the_load(
    monkeypatch: pytest.MonkeyPatch, first: str, there: int, fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    settings = EngineSettings(replicas=3, tp=2)
    if fits:
        check_cards(torch.device(first), settings)
    else:
        with pytest.raises(
            NoDevice, match=r"^--replicas 3 with --tp 2 wants 6 GPUs from cuda:1 on; 6 are here$"
        ):
            check_cards(torch.device(first), settings)


def test_replicas_share_a_cpus_memory() -> None:
    alone, three = (describe(PATH, EngineSettings(replicas=n, device="cpu")) for n in (1, 3))
    assert 0.9 < usable_bytes(alone) / (3 * usable_bytes(three)) < 1.1


# -- engines -----------------------------------------------------------------------------------------------------------


def test_the_file_is_read_once_for_all_and_its_loss_ends_requests_not_the_replica(
    plants: Plants, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Path) -> None:
        raise ModelError(f"cannot open {path}")

    with start(plants, 2) as (engine, replicas):
        first, second = replicas.supervisors
        assert second.texts is first.texts
        plants.plant(hold="20")
        ears = [Ear(engine, range(1, i + 2), 100) for i in range(2)]
        wait_for(lambda: all(len(ear.tokens) > 9 for ear in ears))
        monkeypatch.setattr(supervising, "open_gguf", gone)
        del first.__dict__["texts"]
        kill(replicas, 0)
        wait_for(lambda: first.n_restart == 1 and first.state() == "ok")
        plants.heal("hold")
        assert sorted(type(ear.wait()).__name__ for ear in ears) == ["Done", "Failed"]


def test_a_killed_replicas_requests_continue_on_the_others_at_once(plants: Plants) -> None:
    with start(plants) as (engine, replicas):
        assert engine.info.n_slot == 15 and [s.slot for s in engine.slots()] == list(range(15))
        plants.plant(hold="20")
        ears = [Ear(engine, range(1, i + 2), 50 + i) for i in range(12)]
        assert [s.n_open for s in replicas.supervisors] == [4, 4, 4]
        assert len({ear.name for ear in ears}) == 12
        wait_for(lambda: all(len(ear.tokens) > 9 for ear in ears))
        plants.plant(load="sleep 60")  # it is not waited for
        kill(replicas, 1)
        cancelled = ears[4]
        wait_for(
            lambda: (
                replicas.supervisors[1].state() == "recovering" and not replicas.supervisors[1].n_open
            )
        )
        engine.cancel(cancelled.name)
        plants.heal("hold")
        late = Ear(engine, (9, 9), 30)
        for ear in (*ears[:4], *ears[5:], late):
            ear.check()
        last = cancelled.wait()
        assert isinstance(last, Done) and last.finish == "cancelled"
        rows = engine.replicas()
        assert [row.state for row in rows] == ["ok", "recovering", "ok"] and engine.state() == "ok"
        assert [row.requests_moved for row in rows] == [0, 4, 0]
        assert sum(row.requests for row in rows) == 12 + 4 + 1
        counts = engine.metrics()
        assert counts.restarts == 1 and counts.requests_failed == 0
        assert counts.tokens_replayed >= sum(len(ear.request.prompt) + 10 for ear in ears[1::3])
        assert engine.replicas(counts=False)[0].metrics is None
    assert engine.state() == "stopped" and len(engine.slots()) == 15, "closed engines still tell"
    assert engine.metrics().requests_failed == 0


def test_a_request_that_ends_engines_takes_two_with_it_and_no_other_request(plants: Plants) -> None:
    """After its second crash it waits for its own engine to come back, and runs there alone."""
    plants.plant(poison="77 20")
    with start(plants) as (engine, replicas):
        others = [Ear(engine, range(1, i + 2), 400) for i in range(8)]
        guilty = Ear(engine, (77,), 400)
        last = guilty.wait()
        assert isinstance(last, Failed) and isinstance(last.error, SlotError)
        for ear in others:
            ear.check()
        assert engine.metrics().requests_failed == 1
        assert sum(s.n_restart for s in replicas.supervisors) == 3
        assert max(s.n_restart for s in replicas.supervisors) == 2


def test_replicas_share_their_places_to_wait(plants: Plants) -> None:
    """A conversation returns to its replica beyond that one's part, and what is full is all of them."""
    talk = tuple(i * i % 300 for i in range(2500))  # known, it is worth as much as four requests
    with start(plants, 2, np=1, queue=3, hang_timeout=60.0) as (engine, replicas):
        Ear(engine, talk, 3).check()
        home = [row.requests for row in engine.replicas()].index(1)
        busy = [Ear(engine, (i + 1,), 100_000) for i in range(2)]
        wait_for(lambda: all(len(ear.tokens) > 1 for ear in busy))
        for n in range(6):
            Ear(engine, (*talk, n), 5)
        assert replicas.supervisors[home].n_open == 1 + 4
        assert replicas.supervisors[1 - home].n_open == 1 + 2
        for n in range(3):
            Ear(engine, (*talk, 7, n), 5)
        with pytest.raises(QueueFull, match="9 requests are waiting"):
            Ear(engine, (*talk, 8), 5)
        fresh = tuple(i * i % 299 for i in range(1000))
        with pytest.raises(QueueFull):
            Ear(engine, fresh, 5)
        other = Ear(engine, fresh, 5, client="another")
        assert sum(len(s.waiting()) for s in replicas.supervisors) == 9, "the newest gave its place up"
        engine.cancel(other.name)


def test_one_engine_has_places_for_conversations_that_go_on(plants: Plants) -> None:
    talk = tuple(i * i % 300 for i in range(700))
    with start(plants, 1, np=1, queue=4) as (engine, replicas):
        Ear(engine, talk, 3).check()
        busy = Ear(engine, (5,), 100_000)
        wait_for(lambda: len(busy.tokens) > 1)
        for n in range(4):
            Ear(engine, (n, *talk), 5)
        with pytest.raises(QueueFull):
            Ear(engine, (9, *talk), 5)
        for n in range(2):
            Ear(engine, (*talk, 3, n), 5)
        with pytest.raises(QueueFull):
            Ear(engine, (*talk, 4), 5)
        assert len(replicas.supervisors[0].waiting()) == 6


def test_a_request_may_end_while_places_are_counted(plants: Plants) -> None:
    """The reader's thread removes it from the supervisor's records at any moment."""
    with start(plants, 1) as (engine, replicas):
        records = replicas.supervisors[0]._records

        class Ends(SupervisedRequest):
            @property
            def cancelled(self) -> bool:
                records.pop(self.name, None)
                return True

            @cancelled.setter
            def cancelled(self, value: bool) -> None:
                pass

        for i in range(3):
            records[f"r{900 + i}"] = Ends(f"r{900 + i}", Request(prompt=(1,)), 5, lambda event: None)
        Ear(engine, (7,), 5).check()
        assert not records


def test_requests_wait_if_all_replicas_are_gone(plants: Plants) -> None:
    with start(plants, 2) as (engine, replicas):
        plants.plant(hold="20")
        ears = [Ear(engine, (i + 1,), 100) for i in range(6)]
        wait_for(lambda: all(len(ear.tokens) > 9 for ear in ears))
        for i in range(2):
            kill(replicas, i)
        wait_for(lambda: engine.state() == "recovering" or replicas.metrics().restarts == 2)
        plants.heal("hold")
        late = Ear(engine, (9, 9), 30)
        for ear in (*ears, late):
            ear.check()


@pytest.mark.slow
def test_requests_wait_as_long_as_any_replica_may_still_come(
    plants: Plants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines fail to load again and again, and the third one takes long: it gets the requests of all."""
    monkeypatch.setattr(supervising, "N_LOAD_AGAIN", 2)
    with start(plants) as (engine, replicas):
        plants.plant(hold="20")
        ears = [Ear(engine, (i + 1,), 100) for i in range(6)]
        wait_for(lambda: all(len(ear.tokens) > 9 for ear in ears))
        plants.plant(load="wait")
        kill(replicas, 2)
        wait_for(lambda: replicas.supervisors[2].state() == "recovering")
        wait_for(lambda: (plants.folder / "waits").exists())
        plants.plant(load="refuse no memory")
        for i in range(2):
            kill(replicas, i)
        wait_for(lambda: [s.state() for s in replicas.supervisors] == ["stopped"] * 2 + ["recovering"])
        wait_for(lambda: [s.n_open for s in replicas.supervisors[:2]] == [0, 0])
        assert replicas.supervisors[2].n_open == 6 and not any(ear.over.is_set() for ear in ears)
        assert engine.state() == "recovering"
        late = Ear(engine, (9, 9), 30)
        gone = Ear(engine, (8, 8), 30)
        engine.cancel(gone.name)
        assert isinstance(end := gone.wait(), Done) and end.finish == "cancelled"
        with pytest.raises(Unavailable, match="the engine has stopped: no memory"):
            Ear(engine, (3, 4), 20, slot=2)
        plants.heal("hold")
        plants.heal("waits")
        for ear in (*ears, late):
            ear.check()
        assert engine.metrics().requests_failed == 0


@pytest.mark.slow
def test_requests_fail_in_one_sentence_when_no_replica_can_come(
    plants: Plants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "N_LOAD_AGAIN", 3)
    with start(plants) as (engine, replicas):
        plants.plant(hold="20")
        ears = [Ear(engine, (i + 1,), 100) for i in range(5)]
        pinned = Ear(engine, (7, 7), 100, slot=12)
        wait_for(lambda: all(len(ear.tokens) > 9 for ear in (*ears, pinned)))
        plants.plant(load="refuse no memory")
        kill(replicas, 2)
        last = pinned.wait()
        assert isinstance(last, Failed) and str(last.error) == (
            "replica 2 failed and could not be loaded again: no memory"
        )
        assert not any(ear.over.is_set() for ear in ears)
        for i in range(2):
            kill(replicas, i)
        for ear in ears:
            last = ear.wait()
            assert isinstance(last, Failed) and isinstance(last.error, Unavailable)
            assert (
                str(last.error) == "each of 3 replicas failed and could not be loaded again: no memory"
            )
            assert sum(isinstance(e, Failed) for e in ear.events) == 1
        assert engine.metrics().requests_failed == 6 and engine.state() == "stopped"
        plants.heal("hold")
        plants.heal("load")
        wait_for(lambda: engine.state() == "ok")
        Ear(engine, (5,), 20).check()


@pytest.mark.slow
def test_a_suspect_waits_for_an_engine_that_runs_nothing_else(
    plants: Plants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended two engines, and the second one can not be loaded again: it fails while the others run, and waits if one loads."""
    monkeypatch.setattr(supervising, "N_LOAD_AGAIN", 2)
    with start(plants, 2) as (engine, replicas):
        plants.plant(hold="20")
        suspect = Ear(engine, (5,), 100)
        wait_for(lambda: len(suspect.tokens) > 9)
        (home,) = [i for i, s in enumerate(replicas.supervisors) if s.n_open]
        record = next(iter(replicas.supervisors[home]._records.values()))
        other = 1 - home
        plants.plant(load="wait")
        kill(replicas, other)
        wait_for(lambda: (plants.folder / "waits").exists())
        plants.plant(load="refuse no memory")
        record.crashes[:] = [Crash(time.monotonic(), 10**6)]  # the kill is its second one
        kill(replicas, home)
        wait_for(lambda: record.name in replicas.supervisors[other]._records)
        assert not suspect.over.is_set()
        plants.heal("hold")
        plants.heal("waits")
        suspect.check()


def test_a_slot_has_one_number_among_all(plants: Plants) -> None:
    with start(plants, 2) as (engine, replicas):
        ear = Ear(engine, (3, 4), 20, slot=7)
        ear.check()
        assert [e.slot for e in ear.events if isinstance(e, Started)] == [5], "the fake takes its first"
        assert replicas.supervisors[1].metrics().requests_done == 1
        with pytest.raises(RequestError, match=r"slots are 0\.\.9"):
            Ear(engine, (3,), slot=10)
        answers: list[object] = []
        engine.act_on_slot(SlotAction("erase", 8), answers.append)
        wait_for(lambda: bool(answers))


def test_a_request_that_moves_to_an_engine_that_was_just_closed_fails(plants: Plants) -> None:
    with start(plants, 2) as (_, replicas):
        pass
    heard: list[object] = []
    record = SupervisedRequest("r9", Request(prompt=(1,)), 5, heard.append)
    replicas.supervisors[1].adopt(record)
    assert isinstance(last := heard[-1], Failed) and isinstance(last.error, Unavailable)
    assert replicas.supervisors[1].n_open == 0


def test_one_that_can_not_be_loaded_ends_the_start(plants: Plants) -> None:
    plants.plant(load="none --replicas 3 wants 3 GPUs from cuda:0 on; 2 are here")
    with pytest.raises(DeviceError, match="3 wants 3 GPUs"), start(plants):
        pass


@pytest.mark.slow
def test_texts_of_the_demo_pair_outlive_a_replica() -> None:
    """Greedy, sampled, with a schema and with log probabilities: as one undisturbed engine writes them."""
    settings = {"np": 3, "threads": 1, "device": "cpu", "warm_up": False}
    many = [
        {"temperature": 0.0, "max_tokens": 700, "ignore_eos": True},
        {"seed": 3, "max_tokens": 710, "ignore_eos": True},
        {"seed": 4, "max_tokens": 720, "ignore_eos": True, "logprobs": 2, "repeat_penalty": 1.1},
        {"seed": 5, "max_tokens": 290, "json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 90}},
        {"seed": 6, "max_tokens": 730, "ignore_eos": True, "top_k": 7, "n_draft_max": 0},
    ]  # fmt: skip

    def texts(engine: Engine, on_tokens: Callable[[int, int], None]) -> list[str]:
        found = [""] * len(many)

        def read(i: int) -> None:
            n = 0
            for delta in engine.stream(f"{i} once upon a time", **many[i]):
                found[i] += delta.text
                n += len(getattr(delta, "tokens", ()))
                on_tokens(i, n)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(many))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found

    with Engine.load("demo", **settings) as one:
        whole = texts(one, lambda i, n: None)
    with Engine.load("demo", isolated=True, replicas=2, **settings) as engine:
        have, once = [0] * len(many), threading.Lock()

        def then_kill(i: int, n: int) -> None:
            have[i] = n
            if min(have) > 5 and once.acquire(blocking=False):
                kill(engine.core, 0)

        assert texts(engine, then_kill) == whole
        rows = engine.replicas()
        assert rows[0].requests_moved in (2, 3) and engine.metrics().requests_failed == 0
        assert sum(row.metrics.restarts for row in rows) == 1
