"""A rank that is killed at any point of a round: the engine's end is reported at once, also while its thread and device wait."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from engine_rig import DEMO, DEMO_DRAFT, GREEDY
from known_texts import demo_prompts

from pyspec.config import EngineSettings
from pyspec.cuda.collective import Calls
from pyspec.engine.load import ranks as ranks_module
from pyspec.engine.load.ranks import Ranks
from pyspec.engine.process.core import EngineCore
from pyspec.errors import PyspecError, RankLost
from pyspec.request import Delta, Event, Request

SOON_S = 30.0  # seconds, on a machine with other work
SLEEPS = "import time; time.sleep(600)"

DIES = '''
import os, signal, sys
from pyspec.cuda.collective import Collective
from pyspec.device.follow import Follower
from pyspec.engine.process import rank_main

where, at, n = sys.argv[1], int(sys.argv[2]), 0

def die_at(owner, name, what):
    """Be killed when a function is called for the `at`th time with something of which `what` is true."""
    inner = getattr(owner, name)
    def call(self, *args, **more):
        global n
        n += what(*args)
        if n == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *args, **more)
    setattr(owner, name, call)

if where in ("sum", "stacked"):
    die_at(Collective, where, lambda *args: True)
else:
    die_at(Follower, "obey", lambda call: call[0] == where)
rank_main.main(int(sys.argv[3]))
'''
PHASES = [
    ("reset", 1),  # before the first round
    ("launch", 1),  # a prompt, before its first sum
    ("launch", 7),
    ("sum", 5),  # in a forward, while the first rank waits in the same sum
    ("sum", 68),
    ("stacked", 9),  # where columns are gathered behind a forward
    ("keep_state", 1),  # between rounds: the others notice it at the next sum
]


class Dying:
    """A core with one rank that is killed, in place of a supervised process: it keeps the reason of its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, at: int) -> None:
        command = (sys.executable, "-c", DIES, where, str(at))
        monkeypatch.setattr(Ranks.__init__, "__kwdefaults__", {"command": command})
        self.why: list[PyspecError] = []
        self.is_over = threading.Event()
        settings = EngineSettings(
            tp=2, np=2, ctx=301, device="cpu", kv_type="f32", warm_up=False, threads=1
        )
        self.core = EngineCore.load(DEMO, settings, on_death=self.hear)
        self.n_token = 0

    def hear(self, error: PyspecError) -> None:
        """In place of the end of the process."""
        self.why.append(error)
        self.is_over.set()

    def ask(self) -> None:
        for prompt, _ in demo_prompts()[:2]:
            self.core.submit(Request(prompt=tuple(prompt), params=GREEDY, max_tokens=90), self.listen)

    def listen(self, event: Event) -> None:
        self.n_token += len(event.tokens) if isinstance(event, Delta) else 0


@pytest.mark.slow
@pytest.mark.parametrize(("where", "at"), PHASES)
def test_a_rank_killed_in_any_phase_of_a_round_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    dying = Dying(monkeypatch, where, at)
    try:
        dying.ask()
        assert dying.is_over.wait(SOON_S), (
            f"after {dying.n_token} tokens nothing is known of a rank's end"
        )
        for error in dying.why:
            assert isinstance(error, RankLost) and "rank 1 of 2: its process ended: signal 9" in str(
                error
            ), error
    finally:
        dying.core.close()


WAITS = '''
import sys, time
from pyspec.device.follow import Follower
from pyspec.engine.process import rank_main

launch, n = Follower.launch, 0

def waits(self, *args):
    """In the third round, in place of its part of the sums: for ever, and its heartbeats go on."""
    global n
    n += 1
    while n == 3:
        time.sleep(0.1)
    return launch(self, *args)

Follower.launch = waits
rank_main.main(int(sys.argv[1]))
'''


def test_ranks_that_wait_for_each_other_end_a_load_and_say_in_what(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where one captures another graph. Each says where its threads are."""
    monkeypatch.setattr(Ranks.__init__, "__kwdefaults__", {"command": (sys.executable, "-c", WAITS)})
    monkeypatch.setattr(ranks_module, "CALL_S", {"cpu": 2.0})
    settings = EngineSettings(
        tp=2, np=1, ctx=301, device="cpu", draft_path=DEMO_DRAFT, check_tap_shift=True, threads=1
    )
    began = time.monotonic()
    with pytest.raises(RankLost, match="2 ranks wait for each other: ") as lost:
        EngineCore.load(DEMO, settings, on_death=print)
    assert time.monotonic() - began < 4 * SOON_S
    assert re.search(
        r"rank 0 in call (\d+) \(launch\), \d s; rank 1 in call \1 \(launch\), \d s$", str(lost.value)
    )
    said = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in said and "in waits" in said and "in stacked" in said


def test_a_call_is_over_when_the_device_has_run_it() -> None:
    class Event:
        is_over = False

        def query(self) -> bool:
            return self.is_over

    calls, event = Calls(torch.device("cpu")), Event()
    assert calls.waits() == (0.0, "behind call 0 (none)")
    with calls.within("launch"):
        seconds, said = calls.waits()
        assert seconds > 0 and said == "in call 1 (launch)"
    assert calls.waits() == (0.0, "behind call 1 (launch)")
    with pytest.raises(ValueError, match="no"), calls.within("draft: check"):
        raise ValueError("no")
    assert calls.waits()[1] == "behind call 2 (draft: check)"
    with calls.within("seal"):
        pass
    calls._open[-1][1][:] = [event]  # type: ignore[list-item]
    assert calls.waits()[0] > 0 and calls.waits()[1] == "in call 3 (seal)"
    event.is_over = True
    assert calls.waits() == (0.0, "behind call 3 (seal)")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two more ranks that do nothing."""
    ranks = Ranks(3, command=(sys.executable, "-c", SLEEPS))
    yield ranks
    ranks._state.kill()
    ranks.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hears", ["the ranks' thread", "the engine's thread"])
def test_a_device_that_does_not_let_go_keeps_nobody_from_hearing_why(
    ranks: Ranks, victim: int, hears: str
) -> None:
    """A GPU that waits for an answer may block the call that aborts it. The engine's end is reported before."""
    heard: list[PyspecError] = []
    told, released, asks = threading.Event(), threading.Event(), threading.Event()

    def hear(error: PyspecError) -> None:
        heard.append(error)
        told.set()

    device = SimpleNamespace(abort=lambda: released.wait(SOON_S))
    ranks._state.collective = lambda: device  # type: ignore[assignment,return-value]
    ranks.when_lost(hear)
    if hears == "the engine's thread":  # it sees the failed sum first, and asks for the reason
        ranks._state.closing = True
        time.sleep(0.5)  # the other one has gone
        ranks._state.closing = False
        threading.Thread(target=lambda: (asks.wait(), ranks._state.why()), daemon=True).start()
    ranks._state.processes[victim].process.kill()
    asks.set()
    try:
        assert told.wait(SOON_S / 3), "the reason waits for the device"
        assert isinstance(
            heard[0], RankLost
        ) and f"rank {victim + 1} of 3: its process ended: signal 9" in str(heard[0])
    finally:
        released.set()
