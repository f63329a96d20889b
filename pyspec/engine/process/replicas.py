"""Several engines of one model behind the interface of one (`--replicas`): each is supervised, with its own GPUs or CPU threads.

A request goes to the engine that has most of its prompt in its cache, unless that one is much busier (policy/affinity.py). When an engine
ends, its requests continue on the others at once, by the tokens that were delivered. No torch here.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pyspec import progress
from pyspec.cache import n_cores
from pyspec.config import EngineSettings
from pyspec.engine.policy.affinity import BLOCK, Affinity, chain_of
from pyspec.engine.policy.evict import evict_for
from pyspec.engine.process.metrics_sum import metrics_together
from pyspec.engine.process.supervised_request import Sink, SupervisedRequest
from pyspec.engine.process.supervisor import CLOSE_S, ReplicaPlace, Supervisor
from pyspec.errors import NotSupported, Unavailable
from pyspec.request import EngineInfo, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.slot_action import SlotAction, SlotAnswer, SlotReport
from pyspec.slots.blocks import BlockChange
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
SERVING = ("ok", "recovering")
"""States of replicas that get requests: those that are being replaced get some only if all are."""


class Replicas:
    """A Core over several supervisors. Safe to call from any thread.

    Slots are numbered through: those of the first engine, then those of the second.

    on_blocks  for each engine, what is called with the changes of its prefix cache; must not block. Empty: nothing
    """

    def __init__(
        self,
        path: Path,
        settings: EngineSettings,
        *,
        command: Sequence[str] = (),
        on_blocks: Sequence[Callable[[Sequence[BlockChange]], None]] = (),
    ) -> None:
        self.path, self.settings, self._on_blocks = path, settings, on_blocks
        self._command, self._ids, self._pid = command, itertools.count(1), os.getpid()
        self._lock = (
            threading.RLock()
        )  # held while a request gets or changes its replica, or is cancelled
        self._n_moved = [0] * settings.replicas
        self._n_known = [0] * settings.replicas  # prompt tokens
        self._looks = ThreadPoolExecutor(settings.replicas, thread_name_prefix="pyspec-replicas")
        self._affinity = Affinity(settings.replicas, 0, settings.np)
        self.supervisors = [self._start(0, shared_settings(settings))]

    def _start(self, i: int, settings: EngineSettings) -> Supervisor:
        place = ReplicaPlace(
            ids=self._ids,
            first_slot=i * settings.np,
            label=f"replica {i}: ",
            reports=i == 0,
            shares_queue=True,
            texts=(lambda: self.supervisors[0].texts) if i else None,
            on_loss=partial(self._move_from, i),
            on_stop=partial(self._leave, i),
        )
        on_blocks = self._on_blocks[i] if self._on_blocks else None
        return Supervisor(self.path, settings, command=self._command, on_blocks=on_blocks, place=place)

    # -- loading -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self.supervisors[0].tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self.supervisors[0].template

    def wait(self) -> None:
        """Wait until all engines are loaded. Raises the reason if one can not be.

        The first loads alone: it decides the length of requests, reads the file into memory, and compiles kernels for all.
        """
        self.supervisors[0].wait()
        info, n = self.supervisors[0].info, self.settings.replicas
        settings = replace(self.supervisors[0].settings, ctx=info.n_ctx, replicas=1)
        rows = info.n_row or info.n_slot * info.n_ctx
        with self._lock:
            self._affinity = Affinity(n, rows // BLOCK, info.n_slot)
            for i in range(1, n):
                device = later_device(info.device, i * settings.tp)
                self.supervisors.append(self._start(i, replace(settings, device=device)))
        for i, supervisor in enumerate(self.supervisors):
            progress.report("replicas", i / n)
            supervisor.wait()

    @property
    def info(self) -> EngineInfo:
        infos, n = [s.info for s in self.supervisors], self.settings.replicas
        devices = ", ".join(dict.fromkeys(i.device for i in infos))
        first = infos[0]
        return replace(first, n_slot=n * first.n_slot, n_queue=n * first.n_queue, device=devices)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> str:
        """See Engine.submit. The places to wait are shared: a conversation returns to its replica though that one has more than its part.

        Raises QueueFull if no place is left.
        """
        keys = chain_of(request)
        with self._lock:
            n = sum(load is not None for load in self._loads(*SERVING))
            limit = max(1, n) * self.settings.queue_limit
            waiting = [r for s in self.supervisors for r in s.waiting()]
            waiting.sort(key=lambda r: r.number)
            asking = SupervisedRequest("r0", request, 0, sink)
            goes_on = lambda: any(s.left.goes_on(keys) for s in self.supervisors)  # noqa: E731
            other = evict_for(asking, waiting, limit, goes_on)
            name = self._submit(request, keys, sink)
            if other is not None:
                for supervisor in self.supervisors:
                    supervisor.oust(other, len(waiting))
        return name

    def _submit(self, request: Request, keys: list[int], sink: Sink) -> str:
        """Give a request to its replica. keys: `chain` of its prompt. Called with the lock."""
        if request.slot >= 0:
            i, slot = divmod(request.slot, self.settings.np)
            return self.supervisors[i].submit(replace(request, slot=slot), sink, keys)
        error = Unavailable("the engine has stopped: none of its replicas runs")
        for i in self._affinity.order(keys, self._loads(*SERVING)):
            try:
                name = self.supervisors[i].submit(request, sink, keys)
            except Unavailable as e:
                error = e
            else:
                self._n_known[i] += self._affinity.chose(i, keys)
                return name
        raise error

    def _loads(self, *wanted: str, but: int = -1) -> list[int | None]:
        """Open requests by replica, None for one that gets no request: those in the first of these states that any has get some.

        but  a replica that is left out
        """
        states = ["" if i == but else s.state() for i, s in enumerate(self.supervisors)]
        found = next((state for state in wanted if state in states), None)
        pairs = zip(self.supervisors, states, strict=True)
        return [s.n_open if state == found else None for s, state in pairs]

    def cancel(self, name: str) -> None:
        """See Engine.cancel."""
        with self._lock:
            for supervisor in self.supervisors:
                supervisor.cancel(name)

    def _move_from(self, i: int) -> None:
        """An engine has ended: its requests continue elsewhere, if any other engine runs. On the supervisor's thread.

        Those of which a crash is suspected stay, and run alone when the engine is back (supervised_request.py).
        """
        with self._lock:
            self._affinity.known[i].clear()
            self._move(i, self.supervisors[i].movable(), ("ok",))

    def _leave(self, i: int) -> str:
        """An engine has failed to load for long: its requests wait for one that may still come. On the supervisor's thread.

        Suspects of crashes wait only for an engine that runs nothing else yet. Returns the subject of the reason for those that stay.
        """
        with self._lock:
            self._move(i, self.supervisors[i].movable(), ("ok", "recovering"))
            self._move(i, self.supervisors[i].movable(suspects=True), ("recovering",))
            states = [s.state() for j, s in enumerate(self.supervisors) if j != i]
        n = len(self.supervisors)
        return f"replica {i}" if {"ok", "recovering"} & set(states) else f"each of {n} replicas"

    def _move(self, i: int, records: Sequence[SupervisedRequest], to: tuple[str, ...]) -> None:
        """Give an engine's requests to others in the first of the states `to` that any other has. Called with the lock."""
        n = 0
        for record in records:
            keys = chain_of(record.request)
            others = self._affinity.order(keys, self._loads(*to, but=i))
            if not others:
                break
            if self.supervisors[i].release(record):
                self.supervisors[others[0]].adopt(record)
                self._affinity.chose(others[0], keys)
                n += 1
        self._n_moved[i] += n
        if n:
            fields = {"event": "requests_moved", "replica": i, "requests": n}
            log.warning("%d requests of replica %d continue on others", n, i, extra={"fields": fields})

    # -- slots, counters, state ------------------------------------------------------------------------------------

    def act_on_slot(self, action: SlotAction, on_answer: Callable[[SlotAnswer], None]) -> None:
        """See Engine.act_on_slot."""
        i, slot = divmod(action.slot, self.settings.np)

        def answered(answer: SlotAnswer) -> None:
            if isinstance(answer, SlotReport):
                answer = replace(answer, slot=action.slot)
            on_answer(answer)

        self.supervisors[i].act_on_slot(replace(action, slot=slot), answered)

    def slots(self) -> list[SlotInfo]:
        """The slots of all engines."""
        return [row for rows in self._each(Supervisor.slots) for row in rows]

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        """One row per engine."""
        looked = self._each(Supervisor.metrics) if counts else ()
        metrics: list[Metrics | None] = [*looked] or [None] * len(self.supervisors)
        return [
            ReplicaInfo(
                replica=i,
                state=s.state(),
                device=s.info.device,
                metrics=metrics[i],
                requests=self._affinity.n_chosen[i],
                prompt_tokens_known=self._n_known[i],
                requests_moved=self._n_moved[i],
            )
            for i, s in enumerate(self.supervisors)
        ]

    def metrics(self) -> Metrics:
        """The sum of all engines' counters and gauges."""
        return metrics_together(self._each(Supervisor.metrics))

    def park(self) -> None:
        raise NotSupported("several replicas are not parked")

    def wake(self) -> None:
        raise NotSupported("several replicas are not parked")

    def in_listener(self) -> bool:
        return any(s.in_listener() for s in self.supervisors)

    def alive(self) -> bool:
        return any(s.alive() for s in self.supervisors)

    def state(self) -> str:
        """ "ok" if one engine runs."""
        states = [s.state() for s in self.supervisors]
        return next((s for s in ("ok", "recovering", "loading") if s in states), "stopped")

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """End all processes at once; running requests fail with Unavailable."""
        self._looks.shutdown(wait=False)
        if os.getpid() == self._pid:
            for supervisor in self.supervisors:
                supervisor.begin_close()
        ends = [supervisor.close(limit_s) for supervisor in self.supervisors]
        return all(ends)

    def _each(self, ask: Callable[[Supervisor], T]) -> list[T]:
        """Ask all at once, because each may wait for its engine."""
        try:
            return list(self._looks.map(ask, self.supervisors))
        except RuntimeError:  # closed, or the program ends: nothing is waited for
            return [ask(supervisor) for supervisor in self.supervisors]


def shared_settings(settings: EngineSettings) -> EngineSettings:
    """The settings of the first of several engines: its part of the CPU's threads and of the host's memory for checkpoints."""
    n = settings.replicas
    threads = settings.threads
    if threads <= 0 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, n_cores() // (n * settings.tp))
    return replace(settings, threads=threads, cache_ram=settings.cache_ram // n)


def later_device(first: str, n: int) -> str:
    """The device `n` GPUs behind the first one; on a CPU the same."""
    kind, _, index = first.partition(":")
    return f"{kind}:{int(index or 0) + n}" if kind == "cuda" else first
