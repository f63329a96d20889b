"""The engine's thread: every client gets a last event after any end, and no caller's mistake ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from engine_rig import FIXTURES, GREEDY
from waiting import wait_for

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.errors import (
    ConfigError,
    DeviceError,
    PromptTooLong,
    PyspecError,
    QueueFull,
    RequestError,
    SlotError,
    Unavailable,
)
from pyspec.models.target import Out
from pyspec.request import Delta, Done, Event, Failed, Progress, Request, SamplingParams
from pyspec.slots.batch import Batch

PATH = FIXTURES / "qwen35.gguf"
LONG = Request(prompt=(1, 2, 3), params=GREEDY, max_tokens=200)
SHORT = Request(prompt=(1, 2, 3), params=GREEDY, max_tokens=30)


def start(**settings: object) -> Engine:
    return Engine.load(PATH, **({"np": 2, "ctx": 256, "warm_up": False, "draft": "mtp"} | settings))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with start() as e:
        yield e


def test_a_pool_smaller_than_a_slot_is_the_limit_of_a_request_and_named_as_such() -> None:
    with start(kv_pool=100) as engine:
        assert engine.info.room < 200 < engine.info.n_ctx
        with pytest.raises(PromptTooLong, match=rf"holds {engine.info.room} \(kv_pool raises it"):
            engine.generate(list(range(1, 201)), max_tokens=3)
        assert (
            3 + len(engine.generate([1, 2, 3], max_tokens=500, ignore_eos=True).tokens)
            <= engine.info.room
        )


def test_a_prompt_beyond_the_trained_length_is_told_how_to_stretch_it() -> None:
    with start(np=1, ctx=0) as engine:
        assert engine.info.n_ctx == engine.info.n_ctx_train
        with pytest.raises(
            PromptTooLong, match="trained for no more; rope_scaling yarn with rope_scale and ctx"
        ):
            engine.generate([1] * engine.info.n_ctx, max_tokens=3)
    with (
        start(ctx=128) as engine,
        pytest.raises(PromptTooLong, match=r"\(ctx raises it up to the length"),
    ):
        engine.generate([1] * 128, max_tokens=3)


def test_a_load_that_warms_up_ends_with_a_full_collection_which_would_else_interrupt_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: callers.append(sys._getframe(1).f_code.co_name) or 0)
    with start(warm_up=True):
        assert "_loaded" in callers


class Ear:
    """Collects one request's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def last(self) -> Event | None:
        return self.events[-1] if self.events else None

    @property
    def over(self) -> bool:
        return isinstance(self.last, Done | Failed)


def replace_forward(engine: Engine, what: Callable[[], None]) -> None:
    forward = engine.loop.target.run

    def wrapped(batch: Batch, taps: tuple[int, ...] = ()) -> Out:
        what()
        return forward(batch, taps)

    engine.loop.worker.arena = None  # no recordings, so every forward calls `wrapped`
    engine.loop.target.run = wrapped  # type: ignore[method-assign]


def failing(broken: Exception, request: Request) -> tuple[Engine, list[Ear]]:
    """An engine whose fifth forward fails, and five requests to it."""
    engine, n = start(), 0

    def fail() -> None:
        nonlocal n
        n += 1
        if n == 5:
            raise broken

    replace_forward(engine, fail)
    ears = [Ear() for _ in range(5)]
    for ear in ears:
        engine.submit(request, ear)
    return engine, ears


def test_closing_tells_running_waiting_and_just_arrived_requests() -> None:
    engine = start()
    replace_forward(engine, lambda: time.sleep(0.003))
    ears = [Ear() for _ in range(8)]
    for ear in ears[:6]:
        engine.submit(LONG, ear)
    wait_for(lambda: any(isinstance(e, Delta) for e in ears[0].events))
    for ear in ears[6:]:
        engine.submit(LONG, ear)
    engine.close()
    for ear in ears:
        assert isinstance(ear.last, Failed) and isinstance(ear.last.error, Unavailable)
    assert not engine.alive()
    with pytest.raises(Unavailable, match="closed"):
        engine.submit(LONG, Ear())
    engine.loop.table.check()
    engine.close()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("broken", [RuntimeError("CUDA error: gone\nat 0x0"), DeviceError("gone")])
def test_a_lost_device_ends_all_requests_and_refuses_new_ones(broken: Exception) -> None:
    engine, ears = failing(broken, LONG)
    wait_for(lambda: not engine.alive() and all(ear.over for ear in ears))
    for ear in ears:
        assert isinstance(ear.last, Failed) and isinstance(ear.last.error, DeviceError)
        assert "\n" not in str(ear.last.error)
    with pytest.raises(Unavailable):
        engine.submit(LONG, Ear())
    assert engine.metrics().requests_failed == 5 and engine.metrics().requests_queued == 0
    engine.close()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "broken", [ZeroDivisionError("a bug\nof ours"), AssertionError(), torch.OutOfMemoryError("full")]
)
def test_a_bug_ends_the_rounds_requests_and_the_next_ones_run(broken: Exception) -> None:
    engine, ears = failing(broken, SHORT)
    wait_for(lambda: all(ear.over for ear in ears))
    failed = [ear for ear in ears if isinstance(ear.last, Failed)]
    assert 0 < len(failed) <= engine.info.n_slot
    for ear in failed:
        assert isinstance(ear.last, Failed) and isinstance(ear.last.error, SlotError)
        assert type(broken).__name__ in str(ear.last.error) and "\n" not in str(ear.last.error)
    assert engine.alive() and len(engine.generate([1, 2], params=GREEDY, max_tokens=20).tokens) == 20
    engine.loop.table.check()
    engine.close()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("part", ["draft", "observe", "begin", "checkpoint", "end"])
def test_a_drafters_bug_costs_drafts_and_no_text(part: str) -> None:
    with start() as cold:
        want = [cold.generate([i, 2, 3], params=GREEDY, max_tokens=30).tokens for i in range(3)]
    engine = start()
    setattr(engine.loop.drafter, part, lambda *a: [][7])
    ears = [Ear() for _ in range(3)]
    for i, ear in enumerate(ears):
        engine.submit(Request(prompt=(i, 2, 3), params=GREEDY, max_tokens=30), ear)
    wait_for(lambda: all(ear.over for ear in ears))
    assert [
        tuple(t for e in ear.events if isinstance(e, Delta) for t in e.tokens) for ear in ears
    ] == want
    assert engine.alive()
    engine.loop.table.check()
    engine.close()


def test_a_listener_that_fails_ends_its_own_request_only(engine: Engine) -> None:
    def deaf(event: Event) -> None:
        raise RuntimeError("Event loop is closed")

    engine.submit(LONG, deaf)
    assert len(engine.generate([1, 2], params=GREEDY, max_tokens=20).tokens) == 20
    wait_for(lambda: not any(s.is_processing for s in engine.slots()))
    assert engine.alive() and engine.metrics().requests_cancelled == 1


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "raised",
    [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), MemoryError()],
    ids=repr,
)
def test_a_listener_ends_nobody_else_whatever_it_raises(engine: Engine, raised: BaseException) -> None:
    def leave(event: Event) -> None:
        raise raised

    neighbour = Ear()
    engine.submit(LONG, neighbour)
    engine.submit(LONG, leave)
    wait_for(lambda: neighbour.over and not any(s.is_processing for s in engine.slots()))
    assert (
        isinstance(neighbour.last, Done) and engine.alive() and engine.metrics().requests_cancelled == 1
    )


def test_an_engine_in_a_fork_says_that_it_is_not_there(engine: Engine) -> None:
    assert engine.generate([1, 2], params=GREEDY, max_tokens=2).n_predicted == 2
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # this process must not continue with the tests
        said = b"nothing"
        try:
            engine.generate([1, 2], params=GREEDY, max_tokens=2)
        except Unavailable as e:
            said = str(e).encode()
        finally:
            engine.close()
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert f"runs in process {os.getpid()} and does not survive a fork" in said
    assert engine.generate([1, 2], params=GREEDY, max_tokens=2).n_predicted == 2


@pytest.mark.slow
def test_a_program_may_exit_with_a_request_running() -> None:
    code = f"""
import sys
from pathlib import Path
from pyspec.engine.api import Engine
engine = Engine.load(Path({str(PATH)!r}), "mtp", np=2, ctx=256, warm_up=False)
stream = engine.stream([1, 2, 3], max_tokens=240, ignore_eos=True)
next(stream)
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr == ""


def test_closing_says_when_a_round_does_not_end() -> None:
    engine, hangs, go = start(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        go.wait(60)

    replace_forward(engine, hang)
    ear = Ear()
    engine.submit(LONG, ear)
    assert hangs.wait(30) and not engine.close(0.05)
    go.set()
    assert engine.close() and isinstance(ear.last, Failed)


def test_many_requests_are_all_answered_or_their_error_is_raised(engine: Engine) -> None:
    prompts = [[i, i + 1] for i in range(9)]
    several = engine.generate_many(prompts, params=GREEDY, max_tokens=9)
    assert [r.tokens for r in several] == [
        engine.generate(p, params=GREEDY, max_tokens=9).tokens for p in prompts
    ]
    assert engine.generate_many([]) == []
    submit, n = engine.core.submit, 0

    def fail_at_the_third(*args: object) -> str:
        nonlocal n
        n += 1
        if n == 3:
            raise ZeroDivisionError("not one of our errors")
        return submit(*args)  # type: ignore[arg-type]

    engine.core.submit = fail_at_the_third  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.generate_many(prompts, params=GREEDY, max_tokens=200)
    wait_for(lambda: not any(s.is_processing for s in engine.slots()))


def test_many_requests_wait_for_room_in_a_queue_that_others_fill() -> None:
    with start(np=2, queue=1) as engine:
        ear = Ear()
        engine.submit(LONG, ear)
        wait_for(lambda: len(ear.events) > 0)
        results = engine.generate_many([[i] for i in range(6)], params=GREEDY, max_tokens=5)
        assert [r.n_predicted for r in results] == [5] * 6


def test_an_event_loop_that_goes_away_does_not_take_the_engine_along(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.astream([5, 6], params=GREEDY, max_tokens=250)
        await anext(stream)
        engine.stream_left = stream  # type: ignore[attr-defined]  # kept, so that nothing closes it in time

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    wait_for(lambda: not any(s.is_processing for s in engine.slots()))
    assert engine.generate([1], params=GREEDY, max_tokens=3).n_predicted == 3


def test_every_request_counts_once_and_its_prompt_as_far_as_it_was_read() -> None:
    with start(np=1, ubatch=8, batch=8, prefix_cache=False) as engine:
        begun, ears = threading.Event(), [Ear() for _ in range(4)]

        def first(event: Event) -> None:
            if isinstance(event, Progress) and not begun.is_set():  # of the first prompt's first rows
                for name in names:
                    engine.cancel(name)
                begun.set()
            ears[0](event)

        long = replace(LONG, prompt=(5, 6) * 50)
        with engine.core._wake:  # the engine's thread takes the requests after this block
            names = [engine.submit(long, ear) for ear in (first, ears[1], ears[2])]
        wait_for(begun.is_set)
        engine.submit(replace(SHORT, resumed=(4, 5, 6), max_tokens=3), ears[3])  # it has nothing to do
        wait_for(lambda: all(ear.over for ear in ears))
        counted, timings = engine.metrics(), [ear.last.timings for ear in ears]  # type: ignore[union-attr]
    assert (counted.requests_done, counted.requests_cancelled) == (1, 3)
    assert 0 < timings[0].prompt_n < 100 and [t.prompt_n for t in timings[1:]] == [0, 0, 0]
    assert counted.prompt_tokens == timings[0].prompt_n
    assert all(t.prompt_ms < 1 for t in timings[1:]), "none of them was read"


def test_leaving_a_stream_cancels_its_request(engine: Engine) -> None:
    stream = engine.stream([1, 2, 3], params=GREEDY, max_tokens=250)
    next(stream)
    stream.close()
    wait_for(lambda: not any(s.is_processing for s in engine.slots()))
    assert engine.metrics().requests_cancelled == 1
    engine.cancel("r1")  # over already
    engine.cancel("never was")


def test_a_full_queue_refuses_and_nothing_is_lost() -> None:
    """Many threads at once: every request is refused at once or answered to its end."""
    with start(queue=3) as engine:
        ears: list[Ear] = []
        refused = 0
        lock = threading.Lock()

        def hammer() -> None:
            nonlocal refused
            for _ in range(30):
                ear = Ear()
                try:
                    engine.submit(Request(prompt=(4, 5), params=GREEDY, max_tokens=2), ear)
                except QueueFull as e:
                    assert e.status == 429 and e.retry_after_s >= 1
                    with lock:
                        refused += 1
                    time.sleep(0.001)
                else:
                    with lock:
                        ears.append(ear)

        threads = [threading.Thread(target=hammer) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        wait_for(lambda: all(ear.over for ear in ears))
        assert all(isinstance(ear.last, Done) for ear in ears)
        assert refused > 0 and len(ears) + refused == 180 and engine.alive()


def test_a_short_queue_does_not_keep_the_engine_from_starting() -> None:
    with start(np=4, queue=1, warm_up=True) as engine:
        assert engine.generate([1, 2], params=GREEDY, max_tokens=4).n_predicted == 4
        assert engine.metrics().requests_done == 1, "the warm-up does not count"


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (Request(prompt=tuple([1] * 256)), PromptTooLong, "256 tokens, and a request holds 256"),
        (Request(prompt=(1, 300)), RequestError, "token 300 is outside 0..299"),
        (Request(prompt=(-1,)), RequestError, "token -1"),
        (Request(prompt=(1,), slot=2), RequestError, "slot 2 does not exist; slots are 0..1"),
        (Request(prompt=(1,), params=SamplingParams(temperature=float("nan"))), RequestError, "temperature"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_at_once(
    engine: Engine, request_: Request, error: type[PyspecError], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.submit(request_, Ear())
    assert engine.generate([1], params=GREEDY, max_tokens=2).n_predicted == 2


def test_a_sampling_parameter_that_is_none_gets_a_hint(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        engine.request([1], temprature=0)


def test_two_engines_in_one_process_do_not_meet() -> None:
    with start(draft=None) as plain, start(n_draft_fixed=True) as spec:
        a = plain.generate_many([[i, i + 1] for i in range(6)], params=GREEDY, max_tokens=30)
        b = spec.generate_many([[i, i + 1] for i in range(6)], params=GREEDY, max_tokens=30)
        assert [r.tokens for r in a] == [r.tokens for r in b]
        assert all(r.timings.draft_n == 0 for r in a) and sum(r.timings.draft_n for r in b) > 0


def closed_engine_goes_away() -> None:
    import gc
    import weakref

    engine = start()
    engine.generate([1, 2], params=GREEDY, max_tokens=4)
    state = weakref.ref(next(iter(engine.loop.memory.states.values())))
    engine.close()
    del engine

    def is_gone() -> bool:  # the ending thread, which closes leftovers, may run a moment longer
        gc.collect()
        return state() is None

    wait_for(is_gone)


def test_memory_of_a_closed_engine_goes_away() -> None:
    """In a process of its own, where no thread or exception of another test holds what it saw last."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_engine_life as t; t.closed_engine_goes_away()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_long_prompts_of_one_client_end_no_engine() -> None:
    """They once were admitted by one rule and refused by another, on the engine's own thread."""
    with start(queue=4, np=1, ctx=1024) as engine:
        ears = []
        with pytest.raises(QueueFull):
            for _ in range(40):
                ears.append(Ear())
                engine.submit(
                    Request(prompt=(1,) * 600, params=GREEDY, max_tokens=1, client="a"), ears[-1]
                )
        wait_for(lambda: all(ear.over for ear in ears[:-1]))
        assert len(ears) > 4 and all(isinstance(ear.last, Done) for ear in ears[:-1]) and engine.alive()


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_clients_that_fill_the_queue_leave_a_newcomer_a_place(isolated: bool) -> None:
    settings = EngineSettings(np=1, ctx=4096, warm_up=False, spec_type="none", queue=8)
    with Engine.from_settings(PATH, settings, isolated=isolated) as engine:
        seated = Ear()
        name = engine.submit(replace(LONG, max_tokens=4000, client="busy"), seated)
        wait_for(lambda: seated.last is not None)
        bad, good = [Ear() for _ in range(12)], Ear()
        for i, ear in enumerate(bad):  # short ones have half as many extra places
            engine.submit(replace(SHORT, client=f"bad {i % 4}"), ear)
        with pytest.raises(QueueFull):
            engine.submit(replace(SHORT, client="bad 0"), Ear())
        engine.submit(replace(SHORT, client="good"), good)
        wait_for(lambda: bad[11].over)
        assert isinstance(bad[11].last, Failed) and isinstance(bad[11].last.error, QueueFull)
        assert not any(ear.over for ear in bad[:11])
        engine.cancel(name)
        wait_for(lambda: good.over and all(ear.over for ear in bad))
        assert isinstance(good.last, Done) and all(isinstance(ear.last, Done) for ear in bad[:11])


def test_an_engine_without_rest_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[str] = []
    monkeypatch.setattr("pyspec.engine.process.core.TRIM_S", 0.0)
    monkeypatch.setattr("pyspec.engine.process.core.REST_S", 1e6)
    monkeypatch.setattr(
        "pyspec.engine.process.core.give_back_memory",
        lambda: trimmed.append(threading.current_thread().name),
    )
    with start() as engine:
        engine.run(SHORT)
        deadline = time.monotonic() + 60
        while not trimmed and time.monotonic() < deadline:
            time.sleep(0.01)
    assert set(trimmed) == {"pyspec-trim"}, "beside the rounds, not between them"


def test_an_engine_rests_once_behind_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[str] = []
    monkeypatch.setattr("pyspec.engine.process.core.REST_S", 0.02)
    with start() as engine:
        core = engine.core
        wait_for(lambda: core._is_rested)
        core.on_rest = lambda: rests.append(threading.current_thread().name)
        for n in (1, 2, 3):
            engine.run(SHORT)
            wait_for(lambda: core._is_rested)
            assert rests == ["pyspec-engine"] * n
