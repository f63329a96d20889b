"""Engines with threads of this process as their other ranks: all but the processes is real."""

from __future__ import annotations

import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from engine_rig import Rig

from pyspec.config import EngineSettings
from pyspec.cuda.collective import Collective
from pyspec.cuda.rank import Rank
from pyspec.device.follow import Follower
from pyspec.draft.dflash import DFlash
from pyspec.engine.load.load import build
from pyspec.engine.messages import LoadShare
from pyspec.engine.plan.describe import arena_pages, describe
from pyspec.engine.plan.planned_bytes import plan_memory
from pyspec.engine.process import rank_main
from pyspec.errors import PyspecError
from pyspec.slots.arena import Arena


def is_first() -> bool:
    """This is the first rank's thread."""
    return threading.current_thread() is threading.main_thread()


class NoLink:
    """A rank that is a thread sends no messages."""

    def send(self, message: object) -> None:
        pickle.dumps(message)


class ThreadRanks:
    """As `Ranks`. followers: run by the threads."""

    def __init__(self, n: int) -> None:
        self.n, self.followers, self.failures = n, dict[int, Follower](), list[Exception]()
        self._ends = ExitStack()
        self.store = str(Path(self._ends.enter_context(tempfile.TemporaryDirectory())) / "meet")
        self._inboxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(n - 1)]
        self._threads: list[threading.Thread] = []
        self._loaded = threading.Semaphore(0)

    def load(self, share: LoadShare, devices: Sequence[torch.device]) -> Collective:
        for i in range(1, self.n):
            own = replace(pickle.loads(pickle.dumps(share)), index=i, device=str(devices[i]))
            self._threads.append(
                threading.Thread(target=self._run, args=(own, self._inboxes[i - 1]), daemon=True)
            )
            self._threads[-1].start()
        return Collective(Rank(0, self.n), devices[0], self.store, 60.0)

    def _run(self, share: LoadShare, inbox: queue.Queue[bytes]) -> None:
        try:
            follower: Follower = rank_main.load(share, NoLink())  # type: ignore[arg-type]
            self.followers[share.index] = follower
            self._loaded.release()
            while message := inbox.get():
                follower.obey(pickle.loads(message))
                inbox.task_done()
        except Exception as e:  # noqa: BLE001 - the test fails with any exception
            self.failures.append(e)
            self._loaded.release()

    def wait(self) -> None:
        for _ in range(self.n - 1):
            assert self._loaded.acquire(timeout=60)
        assert not self.failures, self.failures

    def send(self, command: object) -> None:
        message = pickle.dumps(command)
        for inbox in self._inboxes:
            inbox.put(message)

    def settle(self) -> None:
        """Wait until they have run all their commands."""
        while not self.failures and any(inbox.unfinished_tasks for inbox in self._inboxes):
            time.sleep(0.001)

    def when_lost(self, do: Callable[[PyspecError], None]) -> None:
        pass

    def close(self) -> None:
        """Let them run their commands, and end them."""
        for inbox in self._inboxes:
            inbox.put(b"")
        for thread in self._threads:
            thread.join(60)
        self._ends.close()
        assert not self.failures, self.failures


class RankRig(Rig):
    """A rig over `n` ranks. padded: batches lie in arenas, and rounds are launched ahead, as on GPUs."""

    def __init__(self, path: Path, n: int, *, padded: bool = False, **settings: object) -> None:
        values: dict[str, object] = {"np": 1, "ctx": 256, "kv_type": "f32", "warm_up": False, "device": "cpu"}  # fmt: skip
        d = describe(path, EngineSettings(tp=n, **(values | settings)))  # type: ignore[arg-type]
        self.ranks = ThreadRanks(n)
        super().__init__(build(d, plan_memory(d), self.ranks))  # type: ignore[arg-type]
        if padded:
            self.loop.lookahead.on = True
            for worker in (self.loop.worker, *self.ranks.followers.values()):
                worker.arena = Arena(d.settings.np, arena_pages(d), d.device, d.width)
                if isinstance(drafter := worker.drafter, DFlash) and drafter.plan.is_divided:
                    drafter.use_graphs(
                        lambda: Arena(d.settings.np, arena_pages(d), d.device, d.draft_width)
                    )

    def __enter__(self) -> RankRig:
        return self

    def __exit__(self, *error: object) -> None:
        self.ranks.close()
