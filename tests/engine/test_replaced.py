"""An engine process that dies, hangs or can not be loaded: the events of its requests, and of waiting ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine_main import token_at
from sampling import slow
from supervised_rig import CHILD, PATH, Ear, Plants, wait_for
from waiting import lives

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.messages import pack, unpack
from pyspec.engine.process import process as watchdog
from pyspec.engine.process import supervisor as supervising
from pyspec.engine.process.supervised_request import PROGRESS, SupervisedRequest
from pyspec.engine.process.supervisor import Supervisor
from pyspec.errors import (
    DeviceError,
    DoesNotFit,
    EngineBug,
    OutOfBounds,
    PyspecError,
    QueueFull,
    SlotError,
    Unavailable,
)
from pyspec.request import (
    Delta,
    Done,
    Event,
    Failed,
    Progress,
    PromptLogprobs,
    Request,
    SamplingParams,
    Started,
    Timings,
    TokenLogprob,
)


@contextmanager
def start(plants: Plants, path: Path = PATH, **settings: object) -> Iterator[tuple[Engine, Supervisor]]:
    values = {"np": 8, "hang_timeout": 1.0} | settings
    supervisor = Supervisor(
        path, EngineSettings(**values), command=(sys.executable, str(CHILD), str(plants.folder))
    )  # type: ignore[arg-type]
    try:
        supervisor.wait()
        yield Engine(supervisor, supervisor.tokenizer, supervisor.template), supervisor
    finally:
        supervisor.close()


@pytest.fixture(autouse=True)
def _without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STOPPED_S", 0.5)
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0, 0.01, 0.02))


def again(engine: Engine, supervisor: Supervisor, n: int) -> None:
    """Wait for the engine that comes after `n` others."""
    wait_for(lambda: supervisor.n_restart == n and engine.state() == "ok")


def eight(engine: Engine, plants: Plants) -> list[Ear]:
    """They are held at some twenty tokens until "hold" is healed."""
    plants.plant(hold="20")
    ears = [Ear(engine, range(1, i + 2), 50 + i) for i in range(8)]
    wait_for(lambda: all(len(ear.tokens) > 9 for ear in ears))
    return ears


DISASTERS: dict[str, Callable[[Plants, Supervisor], object]] = {
    "killed": lambda plants, s: s._child and os.kill(s._child.process.pid, signal.SIGKILL),
    "stopped": lambda plants, s: s._child and os.kill(s._child.process.pid, signal.SIGSTOP),
    "crashed": lambda plants, s: plants.plant(round="abort"),
    "hanging": lambda plants, s: plants.plant(round="endless"),
    "without a device": lambda plants, s: plants.plant(
        round="fatal CUDA error: an illegal memory access"
    ),
}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("disaster", DISASTERS)
def test_eight_streams_go_on_when_their_engine_is(plants: Plants, disaster: str) -> None:
    with start(plants) as (engine, supervisor):
        ears = eight(engine, plants)
        DISASTERS[disaster](plants, supervisor)
        plants.heal("hold")
        late = Ear(engine, (9, 9), 30)
        for ear in (*ears, late):
            ear.check()
        counts = engine.metrics()
        assert counts.restarts == 1 and counts.requests_failed == 0 and engine.state() == "ok"
        assert counts.tokens_replayed >= sum(len(ear.request.prompt) + 10 for ear in ears)


def test_no_request_goes_on_with_another_model(plants: Plants, tmp_path: Path) -> None:
    """The file was replaced since its load. Its requests are told so, and the same bytes, put back, serve again."""
    path = tmp_path / "m.gguf"
    shutil.copy(PATH, path)
    with start(plants, path) as (engine, supervisor):
        (ear, *others) = eight(engine, plants)
        shutil.copy(PATH.with_name("gemma3.gguf"), tmp_path / "new")
        os.replace(tmp_path / "new", path)
        DISASTERS["killed"](plants, supervisor)
        for one in (ear, *others):
            failed = one.wait()
            assert isinstance(failed, Failed) and "m.gguf is another file" in str(failed.error)
        assert engine.state() == "stopped"
        plants.heal("hold")
        shutil.copy(PATH, path)
        again(engine, supervisor, 1)
        Ear(engine).check()


def test_a_host_that_is_late_again_and_again_is_no_kernels_fault_and_no_requests(
    plants: Plants, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that goes on meanwhile is not suspected, and no engine is examined."""
    with start(plants) as (engine, supervisor):
        ear = Ear(engine, n=300)
        for i in range(4):
            wait_for(lambda i=i: len(ear.tokens) > 10 * (i + 1))
            plants.plant(round="host it was late")
            again(engine, supervisor, i + 1)
        ear.check()
    assert caplog.text.count("the engine is replaced: it was late") == 4
    assert "failed twice" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(("n", "n_kill", "further"), [(1500, 6, 100), (900, 5, 4)])
def test_a_text_survives_many_engines_and_nobody_is_blamed_for_those_killed_from_outside(
    plants: Plants, n: int, n_kill: int, further: int
) -> None:
    """However little further it came in each."""
    with start(plants) as (engine, supervisor):
        ear = Ear(engine, n=n)
        for i in range(n_kill):
            most = len(ear.tokens) + further
            wait_for(lambda most=most: len(ear.tokens) > most)
            DISASTERS["killed"](plants, supervisor)
            again(engine, supervisor, i + 1)
        done = ear.check()
        assert done.timings.n_rounds == sum(done.timings.n_draft_used)


def test_a_stop_string_survives(plants: Plants) -> None:
    with start(plants) as (engine, _):
        whole = Ear(engine, (4, 4), 300)
        whole.check()
        at = next(i for i in range(150, 280) if whole.text.find(whole.text[i : i + 5]) == i)
        stop = whole.text[at : at + 5]
        ear = Ear(engine, (4, 4), 300, stop=(stop,))
        wait_for(lambda: len(ear.tokens) > 20)
        plants.plant(round="abort")
        done = ear.wait()
        assert isinstance(done, Done) and (done.finish, done.stop_string) == ("stop", stop)
        assert ear.text == whole.text[:at]


def test_a_request_that_ends_the_engine_three_times_fails_and_the_others_live(plants: Plants) -> None:
    plants.plant(poison="77 20")
    with start(plants) as (engine, supervisor):
        others = [Ear(engine, range(1, i + 2), 400) for i in range(7)]
        guilty = Ear(engine, (77,), 400)
        last = guilty.wait()
        assert isinstance(last, Failed) and isinstance(last.error, SlotError)
        assert "ended 3 times while this request ran" in str(last.error) and "signal 6" in str(
            last.error
        )
        for ear in others:
            ear.check()
        assert supervisor.n_restart == 3 and engine.metrics().requests_failed == 1


def test_a_kernel_that_is_named_is_not_used_again_and_no_request_is_blamed(plants: Plants) -> None:
    with start(plants) as (engine, supervisor):
        ear = Ear(engine, n=900)
        for name in (
            "pyspec.cuda.ops.linear.cuda",
            "pyspec.cuda.ops.gdn.cuda",
            "pyspec.cuda.ops.attend.cuda",
        ):
            n = len(ear.tokens)
            wait_for(lambda n=n: len(ear.tokens) > n)
            plants.plant(round=f"kernel {name}")
            wait_for(lambda name=name: name in supervisor._launcher.demoted and engine.state() == "ok")
        ear.check()
        assert supervisor._child.answer.info.draft_note.count("pyspec.cuda.ops") == 3  # type: ignore[union-attr]


@pytest.mark.slow
def test_requests_are_cancelled_while_there_is_no_engine(plants: Plants) -> None:
    with start(plants) as (engine, supervisor):
        ears = eight(engine, plants)
        plants.plant(load="sleep 1")
        DISASTERS["killed"](plants, supervisor)
        wait_for(lambda: engine.state() == "recovering")
        engine.cancel(ears[3].name)
        done = ears[3].wait()
        assert isinstance(done, Done)
        assert done.finish == "cancelled"
        assert done.n_predicted == len(ears[3].tokens)
        assert engine.state() == "recovering", "it is not waited for"
        plants.heal("hold")
        for ear in (*ears[:3], *ears[4:]):
            ear.check()
        engine.cancel("r1")
        engine.cancel("never was")


@pytest.mark.slow
def test_an_engine_that_can_not_be_loaded_again_fails_all_and_is_tried_again(plants: Plants) -> None:
    with start(plants) as (engine, supervisor):
        ears = eight(engine, plants)
        plants.plant(load="refuse the device is not there")
        DISASTERS["killed"](plants, supervisor)
        for ear in ears:
            last = ear.wait()
            assert isinstance(last, Failed) and isinstance(last.error, Unavailable)
            assert "the device is not there" in str(last.error)
        assert not engine.alive()
        with pytest.raises(Unavailable, match="the device is not there"):
            Ear(engine)
        plants.heal("load")
        plants.heal("hold")
        wait_for(engine.alive)
        Ear(engine).check()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("load", "why"),
    [
        ("refuse too little memory", "too little memory"),
        ("exit 3", "while it was loading: exit status 3"),
        # each load imports torch
        slow("gone an illegal memory access was encountered", "Triton Error"),
    ],
)
def test_a_first_load_that_fails_is_told_to_whoever_waits(
    plants: Plants, caplog: pytest.LogCaptureFixture, load: str, why: str
) -> None:
    plants.plant(load=load)
    with pytest.raises(DeviceError, match=why), start(plants):
        pass
    assert caplog.text.count("trying again") == 2 and "the engine failed twice" in caplog.text


def test_the_next_engine_holds_what_the_first_one_had_room_for(plants: Plants) -> None:
    """The memory of a dead engine may return late: requests that hold more than fits now would be refused."""
    plants.plant(room="3333")
    with start(plants) as (engine, supervisor):
        assert engine.info.n_ctx == 3333
        plants.plant(room="777", round="abort")
        ear = Ear(engine)
        ear.check()
        assert supervisor.n_restart == 1 and {slot.n_ctx for slot in engine.slots()} == {3333}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "kind", "why"),
    [
        slow(
            "bug division by zero",
            EngineBug,
            "loading failed: ZeroDivisionError: division by zero .*bug in pyspec",
        ),
        (
            "memory tried to allocate 7 GiB",
            DoesNotFit,
            "loading failed: MemoryError: tried to allocate 7 GiB; fewer",
        ),
    ],
)
def test_a_load_that_would_fail_again_is_not_tried_again_nor_laid_to_the_device(
    plants: Plants, caplog: pytest.LogCaptureFixture, load: str, kind: type[PyspecError], why: str
) -> None:
    plants.plant(load=load)
    with pytest.raises(kind, match=why), start(plants):
        pass
    assert "trying again" not in caplog.text and "device" not in caplog.text


def test_a_device_that_is_not_there_is_looked_for_once(
    plants: Plants, caplog: pytest.LogCaptureFixture
) -> None:
    plants.plant(load="none there is no such device")
    with pytest.raises(DeviceError, match="no such device"), start(plants):
        pass
    assert "trying again" not in caplog.text


@pytest.mark.slow
def test_a_full_queue_refuses_and_what_had_begun_is_not_in_it_again(plants: Plants) -> None:
    with start(plants, np=2, queue=3) as (engine, supervisor):
        plants.plant(hold="20")
        running = [Ear(engine, (i,), 100) for i in (1, 2)]
        wait_for(lambda: all(ear.tokens for ear in running))
        waiting = [Ear(engine, (i,), 20) for i in (3, 4, 5, 6)]
        with pytest.raises(QueueFull):
            Ear(engine)
        DISASTERS["killed"](plants, supervisor)
        plants.heal("hold")
        for ear in (*running, *waiting):
            ear.check()


def test_closing_ends_everything_whatever_the_engine_is_at(plants: Plants) -> None:
    with start(plants, hang_timeout=1000.0) as (engine, supervisor):
        ears = eight(engine, plants)
        plants.plant(round="endless")
        assert supervisor._child is not None
        pid = supervisor._child.process.pid
        assert engine.close()
        for ear in ears:
            last = ear.wait()
            assert isinstance(last, Failed) and isinstance(last.error, Unavailable)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(Unavailable, match="closed"):
            Ear(engine)


def test_a_listener_that_fails_ends_its_own_request_only(plants: Plants) -> None:
    with start(plants) as (engine, _):

        def leave(event: Event) -> None:
            raise SystemExit(3)

        engine.submit(Request(prompt=(1,), max_tokens=4000), leave)
        Ear(engine).check()
        wait_for(lambda: engine.metrics().requests_processing == 0)


def test_an_engine_ends_with_its_parent(plants: Plants) -> None:
    code = f"""
import sys, time
from pathlib import Path
from pyspec.config import EngineSettings
from pyspec.engine.process.supervisor import Supervisor
s = Supervisor(Path({str(PATH)!r}), EngineSettings(), command=({sys.executable!r}, {str(CHILD)!r}, {str(plants.folder)!r}))
s.wait()
assert "torch" not in sys.modules
print(s._child.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()

    wait_for(lambda: not lives(pid))


def test_a_seed_is_drawn_once(plants: Plants) -> None:
    with start(plants) as (engine, supervisor):
        ear = Ear(engine, params=SamplingParams(), n=100)
        wait_for(lambda: len(ear.tokens) > 9)
        seed = next(iter(supervisor._records.values())).seed
        DISASTERS["killed"](plants, supervisor)
        ear.wait()
        assert ear.tokens == [token_at((1, 2), i, seed) for i in range(100)]


def test_a_kernel_under_examination_is_known_by_the_module_that_launched_it() -> None:
    from pyspec.cuda.checker import Examination

    examination, seen = Examination(), []
    space = {"__name__": "pyspec.cuda.ops.linear.pair", "run": examination.run, "wait": lambda: None}
    exec("def product(launch): run(launch, wait)", space)
    outer = {"__name__": "pyspec.cuda.ops.linear.cuda", "product": space["product"]}
    exec("def call(launch): product(launch)", outer)
    outer["call"](lambda: seen.append(examination.under_way))  # type: ignore[operator]
    assert seen == [("pyspec.cuda.ops.linear.pair", "pyspec.cuda.ops.linear.cuda")]
    assert examination.under_way == ()
    with pytest.raises(ZeroDivisionError):
        outer["call"](lambda: 1 / 0)  # type: ignore[operator]
    assert examination.under_way[0] == "pyspec.cuda.ops.linear.pair", "the one that failed"


def test_an_implementation_that_failed_while_it_ran_is_done_without() -> None:
    from pyspec.cuda.kernel_context import KernelContext, within
    from pyspec.cuda.op import Impl, Op

    def bind(spec: str) -> Callable[[], str]:
        return lambda: "fast"

    op = Op("planted", Impl("torch", lambda spec: lambda: "reference"), [Impl("fast", bind)])
    assert op.bind("a")() == "fast"
    demoted = KernelContext(demoted=frozenset({__name__}))
    assert op.bind("a", demoted)() == "reference" and op.bind("a")() == "fast", (
        "another engine of the process keeps it"
    )
    with within(demoted):
        assert op.bind("b")() == "reference" and "failed while it ran" in str(
            op.refusal(op.impls[0], "b")
        )


# -- the parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        Started("r1", 2, 30, 4),
        Progress("r1", 30, 4, 17, 2.5),
        Delta("r1", (1, 2), "ab"),
        Delta(
            "r1",
            (1,),
            "",
            (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))),),
            3,
            1,
            Timings(predicted_n=4),
        ),
        Done("r1", "stop", 3, 9, Timings(n_draft_used=(1, 2), synthetic=True), "x", True, 4, 2, seed=77),
        PromptLogprobs("r1", 3, (TokenLogprob(5, -0.25, ((5, -0.25),)),), (1,)),
    ],
)
def test_an_event_is_the_same_after_the_journey(event: Event) -> None:
    assert unpack(pack(event)) == event


class Odd(PyspecError):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("error", [OutOfBounds("row", 5, 4, 1), QueueFull(3), Odd(1, 2)])
def test_an_error_says_the_same_after_the_journey(error: PyspecError) -> None:
    told = unpack(pack(Failed("r1", error)))
    assert isinstance(told, Failed) and str(told.error) == str(error)


def record(**values: object) -> SupervisedRequest:
    return SupervisedRequest("r1", replace(Request(prompt=(1, 2, 3)), **values), 7, lambda event: None)  # type: ignore[arg-type]


def test_text_that_was_released_with_a_lost_end_is_not_told_twice() -> None:
    """The last Delta of a lost engine may have flushed a possible beginning of a stop string; its Done did not arrive."""
    from engine_rig import fixture_tokenizer

    tokenizer = fixture_tokenizer()
    ids = tokenizer.encode("abcdef", add_special=False)
    r = record(stop=("fgh",))
    r.on_event(Started("r1", 0, 3, 0))
    r.on_event(Delta("r1", tuple(ids), "abcdef"))  # a stream alone would hold the f back
    r.lose_engine(tokenizer)
    assert r.submit().request.resumed == tuple(ids)
    assert r.on_event(Delta("r1", (), "f")) is None
    more = r.on_event(Delta("r1", (ids[0],), "fa"))
    assert isinstance(more, Delta) and more.text == "fa"


def test_a_crash_further_on_is_another_crash() -> None:
    r = record()
    r.blame(from_outside=False)
    r.blame(from_outside=False)
    assert len(r.crashes) == 2
    r.tokens += [0] * PROGRESS
    r.blame(from_outside=False)
    assert len(r.crashes) == 3
    r.tokens += [0] * (PROGRESS + 1)
    r.blame(from_outside=False)
    assert len(r.crashes) == 1
    r.tokens += [0]
    r.blame(from_outside=True)
    assert len(r.crashes) == 1, "killed from outside while it got on"


def test_time_that_was_used_up_is_not_given_again() -> None:
    from engine_rig import fixture_tokenizer

    r = record(max_predict_ms=50.0)
    r.on_event(Started("r1", 0, 3, 0))
    r.on_event(Delta("r1", (1,), "a"))
    time.sleep(0.02)
    r.on_event(Delta("r1", (2,), "b"))
    r.lose_engine(fixture_tokenizer())
    assert 0 < r.submit().request.max_predict_ms <= 30.0
