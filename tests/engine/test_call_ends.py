"""The ends of a program's calls: their time limit, a close that lets them end, and the seed that they drew."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import wait_for

from pyspec.engine.api import Engine
from pyspec.errors import ConfigError, PyspecError, TimedOut, Unavailable
from pyspec.request import Delta, Done

LONG: dict[str, Any] = {"max_tokens": 10_000, "temperature": 0.0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "Count."}]
WAIT_S = 60.0  # a hang is a failure


def loaded(**settings: Any) -> Engine:
    plain: dict[str, Any] = {"ctx": 512, "np": 1, "device": "cpu", "warm_up": False}
    return Engine.load("demo", None, **{**plain, **settings})


@pytest.fixture
def engine() -> Iterator[Engine]:
    with loaded() as engine:
        yield engine


def slowed(engine: Engine, seconds: float) -> None:
    """Have every round take so long."""
    step = engine.loop.step

    def slow() -> None:
        time.sleep(seconds)
        step()

    engine.loop.step = slow


def is_idle(engine: Engine) -> bool:
    m = engine.metrics()
    return m.requests_processing + m.requests_queued == 0


async def _alist(events: Any) -> list[Any]:
    return [event async for event in events]


CALLS: dict[str, Callable[[Engine, float], Any]] = {
    "generate": lambda e, t: e.generate("Once", timeout=t, **LONG),
    "a request": lambda e, t: e.generate(e.request("Once", **LONG), timeout=t),
    "stream": lambda e, t: list(e.stream("Once", timeout=t, **LONG)),
    "run": lambda e, t: e.run(e.request("Once", **LONG), t),
    "run_stream": lambda e, t: list(e.run_stream(e.request("Once", **LONG), timeout=t)),
    "chat": lambda e, t: e.chat(CHAT, timeout=t, **LONG),
    "chat_stream": lambda e, t: list(e.chat_stream(CHAT, timeout=t, **LONG)),
    "generate_many": lambda e, t: e.generate_many(["Once", "Twice"], timeout=t, **LONG),
    "agenerate": lambda e, t: asyncio.run(e.agenerate("Once", timeout=t, **LONG)),
    "astream": lambda e, t: asyncio.run(_alist(e.astream("Once", timeout=t, **LONG))),
    "achat": lambda e, t: asyncio.run(e.achat(CHAT, timeout=t, **LONG)),
    "achat_stream": lambda e, t: asyncio.run(_alist(e.achat_stream(CHAT, timeout=t, **LONG))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_at_its_time_limit_and_so_does_its_request(name: str, engine: Engine) -> None:
    slowed(engine, 0.02)
    with pytest.raises(
        TimedOut, match=r"longer than its timeout of 0\.5 s; it ended after \d+ tokens$"
    ) as e:
        CALLS[name](engine, 0.5)
    assert isinstance(e.value, TimeoutError) and isinstance(e.value, PyspecError)
    wait_for(lambda: is_idle(engine))


@pytest.mark.parametrize("name", CALLS)
def test_a_round_that_has_begun_counts_and_so_does_the_prompt(name: str, engine: Engine) -> None:
    slowed(engine, 1.5)
    began = time.monotonic()
    with pytest.raises(
        TimedOut, match=r"ended (while its prompt was read|before its request had a slot)$"
    ):
        CALLS[name](engine, 0.2)
    assert time.monotonic() - began < 1.4, "it does not wait for the round"


@pytest.mark.parametrize("name", CALLS)
def test_waiting_counts_in_the_queue_and_before_a_full_one(name: str) -> None:
    with loaded(queue=1) as engine:
        slowed(engine, 0.02)
        running = engine.stream("Once", **LONG)
        next(running)
        with pytest.raises(TimedOut, match="before its request had a slot"):
            CALLS[name](engine, 0.3)
        wait_for(lambda: engine.metrics().requests_queued == 0)
        engine.submit(engine.request("Once", **LONG), lambda event: None)
        with pytest.raises(TimedOut, match="before its request had a slot"):
            CALLS[name](engine, 0.3)
        running.close()


def test_what_ended_in_time_is_kept_beside_what_did_not(engine: Engine) -> None:
    slowed(engine, 0.02)
    short = engine.request("Once", max_tokens=3, temperature=0.0)
    long = engine.request("Once", **LONG)
    got = engine.generate_many([short, long, short], timeout=1.0, return_exceptions=True)
    assert [type(one).__name__ for one in got] == ["Result", "TimedOut", "TimedOut"]
    assert "after" in str(got[1]) and "before its request had a slot" in str(got[2])
    wait_for(lambda: is_idle(engine))
    assert engine.generate("Once", max_tokens=3, temperature=0.0, timeout=60) is not None


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, "1", True])
def test_a_time_limit_is_a_number_of_seconds(timeout: Any, engine: Engine) -> None:
    for call in CALLS.values():
        with pytest.raises(ConfigError, match=r"^timeout is .*; want a number above 0"):
            call(engine, timeout)
    with pytest.raises(ConfigError, match="timeout belongs to the call that runs the request"):
        engine.request("Once", timeout=1.0)
    assert engine.request("Once", timeout=None).prompt


# -- a close that lets requests end ----------------------------------------------------------------------------------


def test_a_close_that_drains_loses_nothing_and_takes_nothing_new() -> None:
    engine = loaded(np=2)
    slowed(engine, 0.02)
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {
        "many": lambda: engine.generate_many(["a", "b", "c", "d", "e"], **options),
        "one": lambda: engine.generate("Once", **options),
        "chat": lambda: engine.chat(CHAT, **options),
        "async": lambda: asyncio.run(engine.agenerate("Twice", **options)),
    }
    threads = [
        threading.Thread(target=lambda n=n, c=c: found.update({n: c()})) for n, c in calls.items()
    ]
    for thread in threads:
        thread.start()
    heard: list[Any] = []
    wait_for(lambda: engine._n_call == len(calls))
    engine.submit(engine.request("Thrice", **options), heard.append)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(engine.close(drain=WAIT_S)))
    closing.start()
    wait_for(lambda: engine.state() == "draining")
    assert not engine.alive()
    for call in (*calls.values(), lambda: engine.submit(engine.request("x"), heard.append)):
        with pytest.raises(Unavailable, match="the engine is closing"):
            call()
    for thread in (*threads, closing):
        thread.join(WAIT_S)
    assert closed == [True] and engine.state() == "stopped"
    results = [*found["many"], found["one"], found["chat"], found["async"]]
    assert [r.finish for r in results] == ["length"] * 8 and isinstance(heard[-1], Done)


def test_what_does_not_end_in_a_drains_time_fails() -> None:
    engine = loaded()
    slowed(engine, 0.02)
    events = engine.stream("Once", **LONG)
    assert isinstance(next(events), Delta)
    began = time.monotonic()
    assert engine.close(drain=0.3) and 0.3 <= time.monotonic() - began < 10
    with pytest.raises(Unavailable):
        list(events)


@pytest.mark.parametrize("drain", [-1, "x", None, math.nan])
def test_a_drain_is_a_number_of_seconds(drain: Any, engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"^drain is "):
        engine.close(drain=drain)


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_a_seed_that_was_drawn_is_in_the_result_and_repeats_its_text(engine: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 2.0, "top_k": 0, "ignore_eos": True}
    first, second = (engine.generate("Once", **options) for _ in range(2))
    assert first.seed != second.seed and min(first.seed, second.seed) >= 0
    assert engine.generate("Once", seed=first.seed, **options).text == first.text
    assert engine.chat(CHAT, seed=7, **options).seed == 7
