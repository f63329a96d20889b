"""The engine's answers to a program's mistakes: an error at once, no traceback, nothing left behind."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sampling import few
from waiting import wait_for

from pyspec.engine.api import Engine
from pyspec.engine.loop.job import Job
from pyspec.errors import BadTemplate, ConfigError, PyspecError, RequestError, SlotError, Unavailable
from pyspec.request import Delta, Done, Event, Failed, Request
from pyspec.slot_action import SlotAction

SHORT: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0}
LONG: dict[str, Any] = {"max_tokens": 180, "temperature": 0.0, "ignore_eos": True}


def load(*, isolated: bool = False) -> Engine:
    return Engine.load("demo", None, np=2, ctx=256, warm_up=False, threads=1, isolated=isolated)


@pytest.fixture(scope="module", params=[False, True], ids=["in-process", "isolated"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(isolated=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def here() -> Iterator[Engine]:
    with load() as engine:
        yield engine


# -- listeners -------------------------------------------------------------------------------------------------------

ASKED: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate("Once", **SHORT),
    "stream": lambda engine: next(engine.stream("Once", **SHORT)),
    "generate_many": lambda engine: engine.generate_many(["Once", "Twice"], **SHORT),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "Once"}], **SHORT),
    "agenerate": lambda engine: asyncio.run(engine.agenerate("Once", **SHORT)),
    "erase_slot": lambda engine: engine.erase_slot(1),
    "save_slot": lambda engine: engine.save_slot(1, "/nowhere/x"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_listener_that_would_wait_for_its_own_engine_is_told_so(engine: Engine, name: str) -> None:
    heard: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    is_first = [True]

    def sink(event: Event) -> None:
        if isinstance(event, Delta) and is_first.pop():
            is_first.append(False)
            try:
                ASKED[name](engine)
                heard.put(None)
            except BaseException as e:  # noqa: BLE001 - it is looked at below
                heard.put(e)
        elif isinstance(event, Delta):
            is_first.append(False)

    engine.submit(engine.request("Once upon a time", **SHORT), sink)
    error = heard.get(timeout=60)
    assert isinstance(error, RequestError) and "listener" in str(error)
    assert engine.generate("Once", **SHORT).finish == "length"


def test_a_listener_may_submit_and_wait_for_another_engine(here: Engine) -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    with load() as other:

        def sink(event: Event) -> None:
            if isinstance(event, Delta):
                heard.put(other.generate("Seven stones", **SHORT).n_predicted)
                heard.put(here.submit(here.request("Once", **SHORT), lambda event: None))

        here.submit(here.request("Once upon", max_tokens=1), sink)
        assert heard.get(timeout=60) == 3 and isinstance(heard.get(timeout=60), str)


def test_a_listener_of_a_slot_may_raise_what_it_likes(engine: Engine) -> None:
    for error in (ValueError, SystemExit, GeneratorExit):

        def hear(answer: object, error: type[BaseException] = error) -> None:
            raise error

        engine.act_on_slot(SlotAction("erase", 0), hear)
        assert engine.generate("Once", **SHORT).n_predicted == 3


# -- failures in the loop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [1.5, -7, 99, "x", None, 2**70])
def test_a_visit_that_can_not_be_made_is_made_once(
    here: Engine, slot: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Called below the checks of arguments."""
    from pyspec.engine.loop.slot_task import SlotTask

    failed: queue.SimpleQueue[PyspecError] = queue.SimpleQueue()
    with caplog.at_level(logging.ERROR):
        here.core._add_slot_task(SlotTask(slot, lambda: 1 / 0, failed.put))  # type: ignore[attr-defined, return-value]
        assert isinstance(failed.get(timeout=60), SlotError)
        assert here.generate("Once", **SHORT).n_predicted == 3
    assert failed.empty() and len(caplog.records) <= 2


def test_a_job_that_can_not_line_up_fails_alone(here: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    push = here.loop.submit

    def refuse(job: Job) -> None:
        if job.n_prompt == 5:
            raise TypeError("unhashable")
        push(job)

    monkeypatch.setattr(here.loop, "submit", refuse)
    with pytest.raises(SlotError, match="unhashable"):
        here.run(Request(prompt=(1, 2, 3, 4, 5), max_tokens=2))
    assert here.generate("Once", **SHORT).n_predicted == 3


def test_what_admission_fails_for_is_turned_away_and_not_tried_for_ever(
    here: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = here.loop.queue.first

    def fail(table: object) -> object:
        if any(job.n_prompt == 5 for job in here.loop.queue.waiting()):
            raise KeyError("pages")
        return first(table)  # type: ignore[arg-type]

    monkeypatch.setattr(here.loop.queue, "first", fail)
    with pytest.raises(SlotError, match="pages"):
        here.run(Request(prompt=(1, 2, 3, 4, 5), max_tokens=2))
    assert here.generate("Once", **SHORT).n_predicted == 3
    assert len(caplog.records) < 5, "the log repeats itself"


# -- nothing is left behind ------------------------------------------------------------------------------------------


def _names(pids: set[int]) -> list[str]:
    """Command lines of processes, for a failure's message."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
    return found


def _children() -> set[int]:
    """Living processes that this one started: engines, and template renderers."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize("isolated", few([False, True], False), ids=["in-process", "isolated"])
def test_an_engine_that_nobody_has_any_more_ends(isolated: bool) -> None:
    threads, children = set(threading.enumerate()), _children()
    engine = load(isolated=isolated)
    assert engine.template is not None
    engine.template.check()  # starts its process
    engine.generate("Once", **SHORT)
    stream = engine.stream("Once", **LONG)
    next(stream)
    new = [t for t in threading.enumerate() if t not in threads]
    assert any(t.name in ("pyspec-engine", "pyspec-supervisor") for t in new)
    del engine, stream
    gc.collect()
    wait_for(
        lambda: not any(t.is_alive() for t in new), why=lambda: [t.name for t in new if t.is_alive()]
    )
    wait_for(lambda: _children() <= children, why=lambda: _names(_children() - children))


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True], ids=["in-process", "isolated"])
def test_an_engine_ends_with_its_processes_though_a_coroutine_was_left(isolated: bool) -> None:
    """Python would collect the coroutines' cycles later: closing the engine collects them at once."""
    children = _children()
    engine = load(isolated=isolated)

    async def leave(left: Engine) -> None:
        async for _ in left.achat_stream([{"role": "user", "content": "Hi"}], **LONG):
            break

    gc.collect()
    gc.disable()  # else the collection could be Python's own
    try:
        asyncio.run(leave(engine))
        assert _children() - children
        del engine
        wait_for(lambda: _children() <= children, why=lambda: _names(_children() - children))
    finally:
        gc.enable()


def test_a_replaced_template_leaves_no_process() -> None:
    children = _children()
    with load(isolated=False) as engine:
        engine.use_template("{{ messages[0].content }}")
        n_child = len(_children() - children)
        for i in range(3):
            engine.use_template(f"{i} {{{{ messages[0].content }}}}")
        wait_for(
            lambda: len(_children() - children) <= n_child, why=lambda: _names(_children() - children)
        )


def test_a_program_that_only_has_a_stream_still_has_its_engine() -> None:
    stream = load().stream("Once upon a time", max_tokens=6, temperature=0.0, ignore_eos=True)
    gc.collect()
    assert sum(len(event.tokens) for event in stream if isinstance(event, Delta)) == 6


# -- asyncio ---------------------------------------------------------------------------------------------------------


async def _leave(engine: Engine) -> None:
    async for _ in engine.astream("Once upon a time", **LONG):
        break


async def _time_out(engine: Engine) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.agenerate("Once upon a time", **LONG), 0.15)


async def _cancel(engine: Engine) -> None:
    tasks = [asyncio.create_task(engine.agenerate("Once upon a time", **LONG)) for _ in range(3)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


WAYS = {"left": _leave, "timed out": _time_out, "cancelled": _cancel}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_an_event_loop_that_ends_first_leaves_no_traceback(
    engine: Engine, way: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(WAYS[way](engine))
        gc.collect()
        wait_for(lambda: not any(s.is_processing for s in engine.slots()))
        assert engine.generate("Once", **SHORT).n_predicted == 3
    assert not caplog.records and "Traceback" not in capfd.readouterr().err


def test_a_loop_that_was_closed_without_a_word_ends_its_requests(
    here: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_leave(here))
    loop.close()
    with caplog.at_level(logging.WARNING):
        wait_for(lambda: not any(s.is_processing for s in here.slots()))
        assert here.generate("Once", **SHORT).n_predicted == 3
    ours = [r for r in caplog.records if r.name.startswith("pyspec")]
    assert not ours, "only asyncio warns of loops that are closed so"


# -- a fork ----------------------------------------------------------------------------------------------------------


def _load_in_child(end: Connection) -> None:
    try:
        load()
        end.send("loaded")
    except PyspecError as e:
        end.send(e)


def test_a_fresh_engine_in_a_forked_child_is_refused_at_once(here: Engine) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=_load_in_child, args=(theirs,), daemon=True
    )
    child.start()
    assert ours.poll(60), "it hangs"
    error = ours.recv()
    child.join(60)
    assert isinstance(error, Unavailable) and "fork" in str(error) and "isolated=True" in str(error)
    assert here.generate("Once", **SHORT).n_predicted == 3


# -- small things ----------------------------------------------------------------------------------------------------


def test_an_engine_is_made_by_load_and_stays_in_its_process(here: Engine) -> None:
    for make in (lambda: Engine("demo"), lambda: Engine(), lambda: Engine(model_path="demo", n_ctx=256)):  # type: ignore[arg-type,call-arg]
        with pytest.raises(TypeError, match="is loaded"):
            make()
    for share in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="each process loads its own"):
            share(here)


def test_several_prompts_are_a_list(here: Engine) -> None:
    for prompts in ("text", b"text", {"role": "user"}, 5, None):
        with pytest.raises(RequestError, match="prompts is"):
            here.generate_many(prompts, **SHORT)  # type: ignore[call-overload]
    assert [r.n_predicted for r in here.generate_many(iter(["Once", "Twice"]), **SHORT)] == [3, 3]  # type: ignore[call-overload]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", ["e", "the", " a", "time", "\n", "er "])
def test_tokens_of_a_result_are_those_of_its_text(engine: Engine, stop: str) -> None:
    free = engine.generate("Once upon a time", max_tokens=40, temperature=0.0, logprobs=0)
    held = engine.generate("Once upon a time", max_tokens=40, temperature=0.0, logprobs=0, stop=stop)
    assert engine.decode(free.tokens) == free.text and len(free.logprobs) == len(free.tokens)
    assert held.tokens == free.tokens[: len(held.tokens)] and len(held.logprobs) == len(held.tokens)
    if not held.stop:
        assert held.tokens == free.tokens
        return
    assert held.text == free.text[: free.text.find(stop)]
    said = engine.decode(held.tokens)
    assert held.text.startswith(said) and stop not in said
    more = engine.decode(free.tokens[: len(held.tokens) + 1])
    assert not held.text.startswith(more) or len(more) > len(held.text), (
        "a token that is in the text is missing"
    )
    assert held.n_predicted > len(held.tokens)


def test_an_engine_says_what_it_is() -> None:
    engine = load()
    assert (
        "np=2" in repr(engine) and "ctx=256" in repr(engine) and engine.info.model_name in repr(engine)
    )
    assert "ok" in repr(engine)
    engine.close()
    assert "stopped" in repr(engine)


@pytest.mark.parametrize(
    "value", [5, b"demo", "\0", "", "x" * 5000, object(), ["demo"], "\udc80/none.gguf", -1.5, {}]
)
def test_what_can_not_be_loaded_is_an_error_of_ours(value: Any) -> None:
    for call in (
        lambda: Engine.load(value),
        lambda: Engine.load("demo", value),
        lambda: Engine.load("demo", isolated=value),
        lambda: Engine.load("demo", np=(value,)),
        lambda: Engine.load("demo", kv_type=value),
        lambda: Engine.load("demo", device=value),
        lambda: Engine.from_settings(value, value),
    ):
        with pytest.raises(PyspecError):
            call().close()


def test_a_template_is_text(here: Engine) -> None:
    with pytest.raises(BadTemplate):
        here.use_template(b"{{ x }}")  # type: ignore[arg-type]
    for limit in (float("nan"), "x", -1.0, 2**70):
        with pytest.raises(ConfigError):
            here.close(limit)  # type: ignore[arg-type]
    assert here.generate("Once", **SHORT).n_predicted == 3


def test_a_log_that_repeats_itself_is_cut_short(here: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Without a logging set-up: a program gets no disk full of tracebacks."""
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def sink(event: Event) -> None:
        if isinstance(event, Done | Failed):
            ended.put(None)
        raise RuntimeError("the listener's own fault")

    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            here.submit(here.request("Once", **SHORT), sink)
            ended.get(timeout=60)
    assert 1 <= len(caplog.records) <= 45
    assert here.generate("Once", **SHORT).n_predicted == 3
