"""Events on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pyspec.errors import Unavailable
from pyspec.request import Delta
from pyspec.server.bridge import EVENT_COST, Inbox


def delta(text: str = "") -> Delta:
    return Delta("0", (), text)


def test_events_keep_their_order_across_threads() -> None:
    async def read() -> list[str]:
        inbox = Inbox(asyncio.get_running_loop(), 1 << 20)

        def write() -> None:
            for i in range(2000):
                inbox.put(0, delta(str(i)))

        thread = threading.Thread(target=write)
        thread.start()
        texts: list[str] = []
        while len(texts) < 2000:
            batch = await inbox.take(5.0)
            assert batch, "a wake-up without events was reported as silence"
            texts += [event.text for _, event in batch]
        thread.join()
        return texts

    assert asyncio.run(read()) == [str(i) for i in range(2000)]


def test_silence_gives_an_empty_batch() -> None:
    async def read() -> list[object]:
        return list(await Inbox(asyncio.get_running_loop(), 100).take(0.01))

    assert asyncio.run(read()) == []


def test_past_the_limit_nothing_more_is_kept() -> None:
    async def fill() -> None:
        inbox = Inbox(asyncio.get_running_loop(), 10 * EVENT_COST)
        for _ in range(10):
            inbox.put(0, delta())
        assert len(await inbox.take(1.0)) == 10
        for _ in range(11):
            inbox.put(0, delta())
        await asyncio.wait_for(inbox.overflow.wait(), 1.0)
        with pytest.raises(Unavailable, match="more than 1280 bytes"):
            await inbox.take(1.0)

    asyncio.run(fill())


def test_an_engine_that_outlives_the_loop_is_not_disturbed() -> None:
    async def make() -> Inbox:
        return Inbox(asyncio.get_running_loop(), 1000)

    inbox = asyncio.run(make())
    inbox.put(0, delta("late"))
