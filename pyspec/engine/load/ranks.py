"""The other ranks on the first rank's side: their processes, their calls, and the end of all if one is lost.

The first rank is the engine's own process. If a rank ends, stops or falls silent, all ranks end, because none can continue alone.
A supervisor then starts the engine anew.
"""

from __future__ import annotations

import faulthandler
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pyspec.cuda.collective import JOIN_S, Calls, Collective
from pyspec.cuda.rank import Rank
from pyspec.device.lead import Leader, Send, TpMemory
from pyspec.engine.children import how_ended, is_stopped, start
from pyspec.engine.messages import Link, LoadShare, LogLine, ShareFailed, ShareState
from pyspec.engine.plan.describe import Description, arena_pages, rank_devices
from pyspec.engine.plan.memory_plan import MemoryPlan
from pyspec.engine.plan.planned_bytes import attention_bytes
from pyspec.errors import PyspecError, RankLost
from pyspec.models.target import Target
from pyspec.slots.memory import Memory

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "pyspec.engine.process.rank_main")
LOAD_S = 1800.0
STOPPED_S = 2.0  # silence of a process that was stopped by a signal
SILENT_S = 20.0  # silence of a running process: it has a thread that only sends heartbeats
BLIND_S = 8.0  # seconds to find the rank that is gone after others report a loss: they do not know which
TICK_S = 0.2
END_S = 5.0
DUMP_S = 2.0  # for a rank to write where its threads are
OPERATION_S = 900.0  # longest sum; a supervisor is less patient (process.py)
CALL_S = {"cpu": OPERATION_S, "cuda": 60.0}  # longest call that ranks run together


class RankProcess:
    """One other rank."""

    def __init__(self, index: int, command: Sequence[str], notify: Callable[[], None]) -> None:
        self.process, ours = start(command)
        self.index, self.link, self._notify = index, Link(ours), notify
        self.state, self.received = "starts", time.monotonic()
        self.error: PyspecError | None = None
        self.waits = ShareState("").waits
        self.is_over = self.has_spoken = False
        threading.Thread(target=self._read, name=f"pyspec-rank-{index}", daemon=True).start()

    def _read(self) -> None:
        while (message := self.link.receive()) is not None:
            self.received, self.has_spoken = time.monotonic(), True
            if isinstance(message, ShareState) and message.state == "alive":
                self.waits = message.waits
            elif isinstance(message, ShareState):
                self.state = message.state
                self._notify()
            elif isinstance(message, ShareFailed):
                self.error = message.error
            elif isinstance(message, LogLine):
                logging.getLogger(message.name).log(
                    message.level, "rank %d: %s", self.index, message.text
                )
        self.is_over = True
        self._notify()

    def flaw(self, now: float) -> str:
        """Why the rank is given up; "" if it works."""
        if self.error is not None:
            return str(self.error)
        if self.is_over or self.process.poll() is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            code = self.process.returncode
            if code is None:
                return "its process ended"
            return f"its process ended: {how_ended(code)}"
        silent = now - self.received
        limit = SILENT_S if self.has_spoken else JOIN_S  # imports take long on a busy machine
        if silent > limit or (silent > STOPPED_S and is_stopped(self.process.pid)):
            return f"its process has been silent for {silent:.1f} s"
        return ""


class Ranks:
    """All ranks but the first. Created and used by the engine's thread; `on_lost` is called once, on another thread.

    log_level  of the other ranks; their lines appear in this process's log
    """

    def __init__(self, n: int, *, command: Sequence[str] = COMMAND) -> None:
        self.n = n
        self.folder = tempfile.mkdtemp(prefix="pyspec-ranks-")
        self._state = _Watched(n, command)
        self._end = weakref.finalize(self, _close, self._state, self.folder)

    @property
    def store(self) -> str:
        """The file through which the ranks meet."""
        return str(Path(self.folder) / "meet")

    @property
    def pids(self) -> list[int]:
        return [p.process.pid for p in self._state.processes]

    @property
    def error(self) -> PyspecError | None:
        """The reason why they ended."""
        return self._state.error

    def when_lost(self, do: Callable[[PyspecError], None]) -> None:
        """Call `do` with the reason as soon as a rank is gone, on another thread."""
        self._state.on_lost = do

    def load(self, share: LoadShare, devices: Sequence[torch.device]) -> Collective:
        """Load the shares on all ranks, and meet them. Raises a rank's refusal, or RankLost."""
        for p in self._state.processes:
            self._send(p, replace(share, index=p.index, device=str(devices[p.index])))
        self._state.wait_for("joins", JOIN_S)
        ranks = Collective(Rank(0, self.n), devices[0], self.store, OPERATION_S)
        ranks.why = self._state.why
        self._state.calls, self._state.call_s = ranks.calls, CALL_S[devices[0].type]
        if devices[0].type == "cuda":
            self._state.collective = weakref.ref(ranks)
        return ranks

    def wait(self) -> None:
        """Wait until all have loaded."""
        self._state.wait_for("loaded", LOAD_S)
        # NCCL may still read the file; a rank that is killed later can not remove it
        if self._state.collective() is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, call: object) -> None:
        """Send a call to all."""
        for p in self._state.processes:
            self._send(p, call)

    def _send(self, to: RankProcess, message: object) -> None:
        if self._state.error is not None:
            raise self._state.error
        try:
            to.link.send(message)
        except OSError:
            raise self._state.lost() from None

    def close(self) -> None:
        """End them."""
        self._end()


def begin_ranks(d: Description, plan: MemoryPlan, ranks: Ranks) -> Collective:
    """Load the shares on the other ranks, and meet them."""
    s = d.settings
    if not d.is_cuda:
        threads = s.threads if s.threads > 0 else max(1, torch.get_num_threads() // s.tp)
        torch.set_num_threads(threads)
        s = replace(s, threads=threads)
    log.info("each of %d ranks: %s", s.tp, plan.of_others)
    share = LoadShare(
        path=d.path,
        settings=replace(s, batch=d.batch),  # which pictures may have raised
        index=0,
        device="",
        store=ranks.store,
        n_page=d.n_page,
        width=d.width,
        dense="" if d.dense is None else str(d.dense).removeprefix("torch."),
        wide=plan.wide > 0,
        n_bytes=plan.of_others.total,
        n_attention=attention_bytes(d),
        n_arena_page=arena_pages(d) if d.is_cuda and not s.plain_loop else 0,
        log_level=logging.getLogger("pyspec").getEffectiveLevel(),
    )
    return ranks.load(share, rank_devices(d.device, s.tp))


def lead_ranks(target: Target, memory: Memory, send: Send) -> Memory:
    """Mirror all operations on the model and its memory to the other ranks, which run them once they have loaded. Returns the memory to use from
    now on."""
    assert target.ranks is not None
    leader = Leader(send, target.ranks)
    target.lead, target.memory = leader.forward, TpMemory(memory, leader)
    return target.memory


class _Watched:
    """The part of Ranks that its threads hold, so that dropping Ranks ends the processes."""

    def __init__(self, n: int, command: Sequence[str]) -> None:
        self.changed = threading.Condition()
        self.error: PyspecError | None = None
        self.on_lost: Callable[[PyspecError], None] | None = None
        self.closing = False
        # When ranks reported a loss, while the lost one is not found
        self._blind_since: float | None = None
        # set once a wait in a sum may have to be aborted
        self.collective: Callable[[], Collective | None] = lambda: None
        # the first rank's, and how long one may take
        self.calls: Calls | None = None
        self.call_s = OPERATION_S
        self.processes: list[RankProcess] = []
        for i in range(1, n):
            self.processes.append(RankProcess(i, command, self._look_soon))
        threading.Thread(target=self._watch, name="pyspec-ranks", daemon=True).start()

    def _look_soon(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _watch(self) -> None:
        while not self.closing:
            if self.look() is not None:
                return
            with self.changed:
                self.changed.wait(TICK_S)

    def look(self) -> PyspecError | None:
        """Check all ranks, and end them if one is gone. Returns the reason."""
        now, call, is_stuck = time.monotonic(), None, False
        with self.changed:
            if self.error is None and not self.closing:
                self.error, is_stuck = self._found(now)
                if self.error is not None:
                    call = self.on_lost
                    log.error("%s", self.error)
                    # no news, no call: two threads that look and wait would wake each other all the time
                    self.changed.notify_all()
            error = self.error
        if error is not None:
            if is_stuck:
                self._dump()
            self.kill()
            if call is not None:  # first, because a process with a successor does not return from it
                call(error)
            if (ranks := self.collective()) is not None:
                ranks.abort()  # a GPU does not notice the loss, and may wait long in a sum
        return error

    def _found(self, now: float) -> tuple[PyspecError | None, bool]:
        """Why all ranks end, if they do, and whether they all live and wait for each other."""
        n = len(self.processes) + 1
        if (lost := self._lost(now)) is not None:
            p, flaw = lost
            return _refusal(p) or RankLost(f"rank {p.index} of {n}: {flaw}"), False
        if self.calls is None:  # they have not met
            return None, False
        waits = [self.calls.waits(), *(p.waits for p in self.processes)]
        if max(waits)[0] <= self.call_s:
            return None, False
        said = [f"rank {i} {at}" + f", {s:.0f} s" * (s > 0) for i, (s, at) in enumerate(waits)]
        return RankLost(f"{n} ranks wait for each other: {'; '.join(said)}"), True

    def _lost(self, now: float) -> tuple[RankProcess, str] | None:
        """The rank to give up, and why. One that ended by itself comes first: the others fail because of it, and report sooner."""
        flaws = [(p, flaw) for p in self.processes if (flaw := p.flaw(now))]
        causes = [(p, flaw) for p, flaw in flaws if not isinstance(p.error, RankLost)]
        if causes or not flaws:
            return causes[0] if causes else None
        if self._blind_since is None:
            self._blind_since = now
        return flaws[0] if now - self._blind_since > BLIND_S else None

    def _dump(self) -> None:
        """Have every rank write the stacks of its threads to standard error, where `settle` sends the output of a process that ends."""
        with suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        for p in self.processes:
            with suppress(OSError, subprocess.TimeoutExpired):
                p.process.send_signal(signal.SIGABRT)
                p.process.wait(DUMP_S)

    @property
    def _is_blind(self) -> bool:
        return self._blind_since is not None and not self.closing

    def lost(self) -> PyspecError:
        """The reason, once it is known: a rank's failure shows before its cause."""
        return self._reason() or RankLost("another rank does not answer")

    def why(self) -> str:
        error = self._reason()
        return "" if error is None else str(error)

    def _reason(self) -> PyspecError | None:
        until = time.monotonic() + STOPPED_S
        while (error := self.look()) is None and (self._is_blind or time.monotonic() < until):
            with self.changed:
                self.changed.wait(TICK_S)
        return error

    def wait_for(self, state: str, limit_s: float) -> None:
        """Wait until all are in this state."""
        order, until = ("starts", "joins", "loaded"), time.monotonic() + limit_s
        while any(order.index(p.state) < order.index(state) for p in self.processes):
            if (error := self.look()) is not None:
                raise error
            if time.monotonic() > until:
                raise RankLost(f"the ranks are not there after {limit_s:.0f} s ({state})")
            with self.changed:
                self.changed.wait(TICK_S)

    def kill(self) -> None:
        """End them at once."""
        for p in self.processes:
            if p.process.poll() is None:
                p.process.kill()


def _refusal(process: RankProcess) -> PyspecError | None:
    """A rank's reason not to load, worded as the first rank's."""
    return process.error if process.state != "loaded" else None


def _close(watched: _Watched, folder: str) -> None:
    watched.closing = True
    for p in watched.processes:
        p.link.close()  # they end when they read that
    for p in watched.processes:
        try:
            p.process.wait(END_S)
        except subprocess.TimeoutExpired:
            p.process.kill()
            with suppress(subprocess.TimeoutExpired):
                p.process.wait(END_S)
    shutil.rmtree(folder, ignore_errors=True)
