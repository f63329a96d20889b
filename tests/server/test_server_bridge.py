"""Events on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing

import pytest
from server_fakes import FakeEngine

from pyspec.errors import QueueFull, Unavailable
from pyspec.request import Delta, Done, Event, Failed, Request, Started, Timings
from pyspec.server.bridge import EVENT_COST, Batch, Inbox, Submission
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings


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


def test_events_are_taken_at_once_while_the_reader_waits_and_in_order_whatever_is_refused() -> None:
    """Some batches are taken on the spot, others refused: the reader and the taker together have every event, in order."""

    async def read() -> tuple[list[str], int]:
        inbox, texts, n_taken = Inbox(asyncio.get_running_loop(), 1 << 20), [], 0

        def take(batch: Batch) -> bool:
            nonlocal n_taken
            if int(batch[0][1].text) % 7 == 3:  # type: ignore[union-attr]
                return False
            texts.extend(event.text for _, event in batch)  # type: ignore[union-attr]
            n_taken += len(batch)
            return True

        inbox.at_once = take

        def write() -> None:
            for i in range(3000):
                inbox.put(0, delta(str(i)))
                if i % 5 == 0:
                    time.sleep(0)

        thread = threading.Thread(target=write)
        thread.start()
        while len(texts) < 3000:
            texts += [event.text for _, event in await inbox.take(0.05)]  # type: ignore[union-attr]
        thread.join()
        return texts, n_taken

    texts, n_taken = asyncio.run(read())
    assert texts == [str(i) for i in range(3000)] and n_taken > 0


def test_a_failure_of_what_takes_at_once_is_the_readers() -> None:
    async def read() -> None:
        inbox = Inbox(asyncio.get_running_loop(), 1 << 20)
        inbox.at_once = lambda batch: 1 // 0 > 0
        reading = asyncio.ensure_future(inbox.take(60.0))
        await asyncio.sleep(0)
        inbox.put(0, delta("x"))
        await reading

    with pytest.raises(ZeroDivisionError):
        asyncio.run(read())


class Crowded:
    """An engine that gives the second request's place to another client, once or always, and ends the others."""

    def __init__(self, *, is_relentless: bool) -> None:
        self.info, self.n, self.is_relentless = type("Info", (), {"n_slot": 4}), 0, is_relentless

    def submit(self, request: Request, sink: object) -> str:
        self.n += 1
        name = str(self.n)
        lost = request.prompt == (2,) and (self.is_relentless or self.n == 2)
        done = Done(name, "stop", 1, 1, Timings(), "")
        events: list[Event] = [Failed(name, QueueFull(9))] if lost else [Started(name, 0, 1, 0), done]
        for event in events:
            sink(event)  # type: ignore[operator]
        return name

    def cancel(self, name: str) -> None: ...


@pytest.mark.parametrize("is_relentless", [False, True])
def test_one_choice_that_loses_its_place_waits_again_while_others_have_theirs(
    is_relentless: bool,
) -> None:
    async def read() -> tuple[set[int], list[Event]]:
        submission = Submission(Crowded(is_relentless=is_relentless), 1 << 20)  # type: ignore[arg-type]
        submission.submit([Request(prompt=(i,)) for i in (1, 2, 3)])
        events = [pair async for batch in submission.batches(5.0) for pair in batch]
        return {i for i, event in events if isinstance(event, Done)}, [
            e for _, e in events if isinstance(e, Failed)
        ]

    done, failed = asyncio.run(read())
    assert done == ({0, 2} if is_relentless else {0, 1, 2}) and len(failed) == is_relentless


def test_work_on_a_text_that_an_unload_drops_is_an_answer() -> None:
    """Not the end of its client's connection: the model may have been unloaded for another one."""

    async def unload() -> None:
        with closing(FakeEngine()) as engine:
            service, go = Service(engine, ServerSettings(port=0, text_threads=1)), threading.Event()
            running, dropped = (asyncio.ensure_future(service.text(go.wait, 20)) for _ in "ab")
            await asyncio.sleep(0.05)
            service.close()
            go.set()
            with pytest.raises(Unavailable, match="unloaded"):
                await dropped
            assert await running

    asyncio.run(unload())
