"""Ranks as processes: engines that lose one, and processes that end in time."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY
from known_texts import demo_prompts
from waiting import children, lives, wait_for

from pyspec.config import EngineSettings
from pyspec.engine.api import Engine
from pyspec.engine.load import ranks as ranks_module
from pyspec.engine.load.ranks import Ranks
from pyspec.engine.process.core import EngineCore
from pyspec.errors import DeviceError, RankLost, Unavailable
from pyspec.request import Delta, Done, Event, Failed, Request

N = 12
SOON_S = 15.0  # seconds, on a machine with other work
SETTINGS = {"np": 2, "ctx": 256, "device": "cpu", "kv_type": "f32", "warm_up": False, "threads": 1}
LLAMA = FIXTURES / "llama.gguf"

pytestmark = pytest.mark.slow


class Asked:
    """One request to a core in this process."""

    def __init__(self, core: EngineCore, prompt: tuple[int, ...], n: int) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.over, self.begun = threading.Event(), threading.Event()
        core.submit(Request(prompt=prompt, params=GREEDY, max_tokens=n), self.hear)

    def hear(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.tokens += event.tokens
            self.begun.set()
        if isinstance(event, Failed):
            self.error = event.error
        if isinstance(event, Failed | Done):
            self.over.set()


@pytest.fixture
def core() -> Iterator[EngineCore]:
    """Four ranks of a tiny model."""
    core = EngineCore.load(LLAMA, EngineSettings(tp=4, **SETTINGS))
    yield core
    core.close()
    assert core._ranks is not None
    wait_for(lambda: not any(map(lives, core._ranks.pids)), SOON_S)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT])
@pytest.mark.parametrize("when", ["at work", "idle"])
def test_a_rank_that_is_lost_takes_all_with_it(
    core: EngineCore, sign: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = core._ranks
    assert ranks is not None and len(ranks.pids) == 3
    asked = Asked(core, (1, 2, 3), 240 if when == "at work" else 2)
    assert asked.begun.wait(60)
    if when == "idle":
        assert asked.over.wait(60)
    os.kill(ranks.pids[1], sign)
    wait_for(lambda: not core.alive(), SOON_S)
    wait_for(lambda: not any(map(lives, ranks.pids)), SOON_S)
    with pytest.raises(Unavailable, match="rank 2 of 4: its process"):
        core.submit(Request(prompt=(1,), params=GREEDY, max_tokens=2), asked.hear)
    if when == "at work":
        assert asked.over.wait(SOON_S) and isinstance(asked.error, RankLost), asked.error
        assert "rank 2 of 4: its process" in str(asked.error)
    said = [r.message for r in caplog.records if r.levelno >= logging.ERROR]
    assert sum("rank 2 of 4" in line for line in said) == 1, said


def test_processes_share_a_drafter_and_end() -> None:
    prompt, text = demo_prompts()[0]
    settings = {**SETTINGS, "n_draft_fixed": True}
    with Engine.load(DEMO, DEMO_DRAFT, tp=2, **settings) as engine:
        found = engine.generate(prompt, max_tokens=N, temperature=0.0)
        assert list(found.tokens) == text[:N]
        assert found.timings.draft_n_accepted > N // 2
    wait_for(lambda: not children(os.getpid(), "rank_main"), SOON_S)


def test_the_supervisor_goes_on_with_new_ranks() -> None:
    prompt, text = demo_prompts()[0]
    with Engine.load(DEMO, None, isolated=True, tp=2, **SETTINGS) as engine:
        assert list(engine.generate(prompt, max_tokens=N).tokens) == text[:N]
        (rank,) = children(os.getpid(), "rank_main")
        done: list[object] = []
        thread = threading.Thread(
            target=lambda: done.append(
                engine.generate(prompt, max_tokens=200, ignore_eos=True, cache_prompt=False)
            )
        )
        thread.start()
        time.sleep(0.3)
        os.kill(rank, signal.SIGKILL)
        thread.join(120)
        assert done and list(done[0].tokens[: len(text)]) == text  # type: ignore[attr-defined]
        assert engine.metrics().restarts == 1
        wait_for(lambda: not lives(rank), SOON_S)
        assert len(children(os.getpid(), "rank_main")) == 1
    wait_for(lambda: not children(os.getpid(), "rank_main"), SOON_S)


def test_ranks_end_with_an_engine_that_is_killed() -> None:
    with Engine.load(DEMO, None, isolated=True, tp=2, **SETTINGS) as engine:
        (rank,), (child,) = (children(os.getpid(), x) for x in ("rank_main", "process.engine_main"))
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: not lives(rank), SOON_S)
        assert engine.generate(demo_prompts()[1][0], max_tokens=4).tokens


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "rank 1 of 2: its process ended: exit status 3"),
        ("import os; os.kill(os.getpid(), 11)", "rank 1 of 2: its process ended: signal 11"),
    ],
)
def test_a_rank_that_can_not_start_ends_the_load(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(Ranks.__init__, "__kwdefaults__", {"command": ranks_module.COMMAND})
    began = time.monotonic()
    with pytest.raises(DeviceError, match=said):
        EngineCore.load(LLAMA, EngineSettings(tp=2, **SETTINGS))
    assert time.monotonic() - began < SOON_S


FAILS = """
import sys
import torch
from pyspec.device.follow import Follower
obey, n = Follower.obey, 0
def fails(self, call):
    global n
    n += call[0].startswith("launch")
    if n == 4:
        raise torch.OutOfMemoryError("no memory is left for this rank")
    obey(self, call)
Follower.obey = fails
from pyspec.engine.process.rank_main import main
main(int(sys.argv[1]))
"""


def test_a_rank_that_has_no_memory_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks.__init__, "__kwdefaults__", {"command": (sys.executable, "-c", FAILS)})
    core = EngineCore.load(LLAMA, EngineSettings(tp=2, **SETTINGS))
    asked = Asked(core, (1, 2, 3), 40)
    assert asked.over.wait(SOON_S) and isinstance(asked.error, RankLost)
    assert "rank 1 of 2: OutOfMemoryError: no memory is left for this rank" in str(asked.error)
    assert len(asked.tokens) == 3 and not core.alive()
    core.close()


def test_threads_that_wait_for_ranks_do_not_wake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looked and told each other so without an end, and the rank that was to start had no processor."""
    looks: list[float] = []
    look = ranks_module._Watched.look

    def counted(watched: ranks_module._Watched) -> object:
        looks.append(time.monotonic())
        return look(watched)

    monkeypatch.setattr(ranks_module._Watched, "look", counted)
    silent = [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(60)"]
    watched = ranks_module._Watched(2, silent)
    try:
        with pytest.raises(RankLost, match="are not there after 1 s"):
            watched.wait_for("joins", 1.0)
    finally:
        watched.closing = True
        watched.kill()
    assert 1 <= len(looks) <= 3 * (1.0 / ranks_module.TICK_S)
