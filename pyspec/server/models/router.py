"""Several models behind one port: a service for each that is loaded. The scheduler (`schedule.py`) decides, this carries it out.

All state belongs to one event loop, so no two threads choose a model to unload. Plans, loads and ends of engines run in threads; their
results come back to the loop as events of the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyspec import progress
from pyspec.errors import (
    ConfigError,
    EngineBug,
    NotFound,
    NotSupported,
    PyspecError,
    RequestError,
    Unavailable,
)
from pyspec.hub.names import bare_name
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import Reading
from pyspec.server.models.schedule import (
    Action,
    AskNeed,
    Changed,
    Grant,
    ModelRow,
    Park,
    Refuse,
    Schedule,
    Start,
    Stop,
    Wake,
)
from pyspec.server.resume import StreamSessions
from pyspec.server.service import Service
from pyspec.server.settings import RouterSettings, ServerSettings

if TYPE_CHECKING:
    from pyspec.engine.api import Engine
    from pyspec.engine.plan.apart import LoadNeed
    from pyspec.engine.protocol import Core

log = logging.getLogger(__name__)

TICK_S, REST_S = 0.1, 1.0  # between looks at the clock, while something waits and else
MEASURE_S = 20.0  # between measurements of the budget
CLOSE_S = 5.0
MOST_EVENTS = 256  # that a slow reader of events is behind; the oldest are dropped
QUIET_S = 5.0  # then a reader of events gets a sign of life
END: dict[str, Any] = {}  # wakes readers of events at the end
UNLOADED = "the model is unloaded"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be loaded.

    words   its flags, as its row shows them
    path    its file; "" if it is not downloaded
    source  "cache", "models_dir" or "preset"
    starts  it is loaded when the server starts
    parks   it is parked where it would be unloaded, if there is room: its plan says what it keeps
    repo    it is in the cache of downloads: repository and file
    hidden  no row of lists
    sees    its options name a projector
    plan    finds its needs beside a budget; load: loads it with them, and hands out its core first. Both take seconds and raise PyspecError
    """

    name: str
    plan: Callable[[Mapping[str, int]], LoadNeed]
    load: Callable[[LoadNeed, Callable[[Core], None]], Engine]
    settings: ServerSettings
    words: tuple[str, ...] = ()
    path: str = ""
    source: str = "preset"
    pinned: bool = False
    starts: bool = False
    parks: bool = False
    idle_s: float = -1.0
    stop_s: float = 10.0
    repo: tuple[str, str] = ("", "")
    hidden: bool = False
    sees: bool = False

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names."""
        return tuple(name for name in self.settings.aliases if name != self.name)

    @property
    def stamp(self) -> tuple[int, int]:
        """Size and time of its file, which change if it is replaced."""
        with contextlib.suppress(OSError):
            found = Path(self.path).stat()
            return found.st_size, found.st_mtime_ns
        return 0, 0


@dataclass(frozen=True)
class Download:
    """Files to download: bytes of all that their repository has, by name, and the download, which takes as long as it does. Raises PyspecError"""

    sizes: Mapping[str, int]
    fetch: Callable[[], None]


@dataclass
class Loading:
    """A load in a thread. `end` ends it, at any time."""

    core: Core | None = None
    is_ended: bool = False
    stage: tuple[str, float] = ("", 0.0)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begun(self, core: Core) -> None:
        """Remember the core. Called on the load's thread."""
        with self.lock:
            self.core = core
            if self.is_ended:
                core.close(0.0)

    def end(self) -> Core | None:
        """From now on the load fails; the core to close for that, if there is one."""
        with self.lock:
            self.is_ended = True
            return self.core


def _as_error(e: Exception, work: str) -> PyspecError:
    """The error of work on a thread, as requests are told of it."""
    if isinstance(e, PyspecError):
        return e
    if isinstance(e, OSError) and e.strerror:  # a full disk
        return Unavailable(f"{work} failed: {e.strerror.lower()}")
    log.error("%s failed", work, exc_info=e)
    return EngineBug(f"{work} failed: {type(e).__name__}: {e}")


class Router:
    """A table of models, and the services of those that are loaded. Lives on the event loop that first serves it.

    read     reads the sources; raises ConfigError
    budget   bytes for all models by place; measure: the same for GPUs, measured anew beside `used` bytes of our own, or None
    alone    one model, named on the command line: paths without `model` are its own
    ahead    starts the process of the next engine, so that a load finds it ready; closing: called at the end
    find     looks for USER/REPO:QUANT, None: nothing is downloaded; raises PyspecError. erase: deletes a file of a repository from the cache
    """

    def __init__(
        self,
        read: Callable[[], list[Model]],
        settings: ServerSettings,
        options: RouterSettings,
        budget: Mapping[str, int],
        *,
        measure: Callable[[Mapping[str, int]], Mapping[str, int]] | None = None,
        alone: bool = False,
        ahead: Callable[[], None] = lambda: None,
        closing: Callable[[], None] = lambda: None,
        find: Callable[[str], Download] | None = None,
        erase: Callable[[str, str], None] = lambda repo, file: None,
    ) -> None:
        # a body is read before its model is known, which may see
        self.settings, self.options, self.alone = settings.for_pictures(), options, alone
        self._read, self._measure, self._ahead, self._closing = read, measure, ahead, closing
        self._find, self.erase = find, erase
        most = 0 if alone else options.models_max
        self.table = Schedule(budget, most=most, queue=options.models_queue, wait_s=options.models_wait)
        self.models: dict[str, Model] = {}
        self.needs: dict[str, LoadNeed] = {}
        self.services: dict[str, Service] = {}
        self.sessions = StreamSessions(settings)
        self.last: Service | None = None  # the last one that was made
        self.started = time.time()
        self.downloads: dict[str, dict[str, dict[str, int]]] = {}  # done and all bytes by name and file
        self._cancelled: set[str] = set()  # downloads that are to end
        self.n_load = self.n_failed = self.n_wake = 0
        self.stamps: dict[str, tuple[int, int]] = {}
        self.is_draining = False
        self._names: dict[str, str] = {}
        self._engines: dict[str, Engine] = {}
        self._parked: dict[str, Service] = {}  # those of models that are parked, or on their way
        self._loads: dict[str, Loading] = {}
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._tickets, self._version = count(1), 0
        self._readers: set[asyncio.Queue[dict[str, Any]]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._showing: asyncio.Task[None] | None = None
        self.reading = Reading(settings.limits.reading)
        self._take(read())

    # -- models ------------------------------------------------------------------------------------------------------

    def _take(self, models: list[Model]) -> None:
        """Have these models, with rows of the table for new ones. Raises ConfigError for a name that two have."""
        names: dict[str, str] = {}
        for model in models:
            for name in (model.name, *model.aliases):
                if names.setdefault(name, model.name) != model.name:
                    raise ConfigError(
                        f"the models {names[name]!r} and {model.name!r} are both called {name!r}"
                    )
        self._names = names
        for model in models:
            row = self.table.rows.get(model.name)
            if row is None:
                row = self.table.rows[model.name] = ModelRow(model.name)
            row.pinned, row.stop_s, row.idle_s = model.pinned, model.stop_s, model.idle_s
            self.models[model.name] = model

    async def reload(self) -> None:
        """Read the sources anew: models that are gone or have changed are unloaded. Raises ConfigError; all stays as it was then."""
        models = await asyncio.to_thread(self._read)
        old = dict(self.models)
        self._take(models)
        for name, before in old.items():
            if (
                name not in self._names.values()
                or (self.models[name].words, self.models[name].parks) != (before.words, before.parks)
                or self.is_stale(name)
            ):
                self.stamps.pop(name, None)
                self._do(self.table.unload(name, time.monotonic()))
                if name not in self._names.values() and not self.table.rows[name].is_resident:
                    self._forget(name)
        self.tell("models_reload", "*", {})

    def is_stale(self, name: str) -> bool:
        """The file is not the one that was planned."""
        return name in self.stamps and self.stamps[name] != self.models[name].stamp

    def _forget(self, name: str) -> None:
        del self.table.rows[name], self.models[name]
        self.needs.pop(name, None)
        self.stamps.pop(name, None)
        self.tell("model_remove", name, {})

    @property
    def names(self) -> list[str]:
        """The models that lists show."""
        return [name for name, model in self.models.items() if not model.hidden and name in self._names]

    def find(self, name: object, *, answers: bool = False) -> str:
        """The model of a name or an alias; if none has just this one, that of the only one like it. Raises RequestError without a name, NotFound for
        an unknown one. answers: a lone model takes any name"""
        if isinstance(name, str) and name in self._names:
            return self._names[name]
        alike = {
            self._names[one]
            for one in self._names
            if isinstance(name, str) and bare_name(one) == bare_name(name)
        }
        if len(alike) == 1:
            return alike.pop()
        if answers and len(self._names) and len(self.models) == 1:
            return next(iter(self.models))
        some = ", ".join(self.names[:8]) or "none: the folders and the cache have no GGUF"
        if not isinstance(name, str) or not name:
            raise RequestError(f"model name is missing from the request; there are {some}")
        by_bare = {bare_name(one): one for one in self._names}
        near = [by_bare[one] for one in get_close_matches(bare_name(name), by_bare, 3, 0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {some}"
        raise NotFound(f"no model {name[:80]!r} here; {hint}")

    @property
    def engine(self) -> EngineLike:
        """Of the model that was loaded last."""
        assert self.last is not None
        return self.last.engine

    def loaded(self, name: str, *, was: bool = False) -> Service:
        """The service of a model. Raises RequestError if it is not loaded. was: it had been, so Unavailable"""
        if (service := self.services.get(name)) is None:
            raise Unavailable(UNLOADED) if was else RequestError("model is not loaded")
        return service

    # -- requests ----------------------------------------------------------------------------------------------------

    def claim(self, name: str, idle_s: float | None, autoload: bool) -> tuple[int, asyncio.Future[None]]:
        """A ticket for a model, and a future that ends when the request may run, or with its error. Call `end` with the ticket."""
        self.begin()
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        if not autoload and name not in self.services and name not in self._parked:
            raise RequestError("model is not loaded")
        self._look_at(name)
        ticket, loop = next(self._tickets), asyncio.get_running_loop()
        future = self._futures[ticket] = loop.create_future()
        self._do(self.table.request(name, ticket, time.monotonic(), idle_s))
        return ticket, future

    def end(self, ticket: int) -> None:
        """A request has ended, or its client has left."""
        if (future := self._futures.pop(ticket, None)) is not None:
            future.cancel()
        self._do(self.table.end(ticket, time.monotonic()))

    def _look_at(self, name: str) -> None:
        """Notice an engine that has stopped for good, and a file that was replaced since its plan."""
        engine, row = self._engines.get(name), self.table.rows[name]
        if (
            not row.is_resident
            and row.need is not None
            and self.stamps.get(name) != self.models[name].stamp
        ):
            row.need = None
        if engine is not None and engine.state() == "stopped":
            error = Unavailable(f"the engine of {name} has stopped; it is loaded again")
            self._do(self.table.died(name, error, time.monotonic()))

    def load(self, name: str) -> None:
        """Begin a load. Raises RequestError if it is loaded or on its way."""
        self.begin()
        self._look_at(name)
        row = self.table.rows[name]
        if row.state in ("loading", "loaded", "waking") or row.asked is not None:
            state = "loaded" if row.state == "loaded" else "loading"
            raise RequestError(f"model {name} is {state} already")
        self._do(self.table.load(name, time.monotonic()))

    def unload(self, name: str) -> None:
        """Begin to unload. Raises RequestError if it is neither loaded nor on its way."""
        self.begin()
        row = self.table.rows[name]
        if not row.is_resident and row.asked is None and not row.waiting:
            raise RequestError(f"model {name} is not loaded")
        self._do(self.table.unload(name, time.monotonic()))

    def park(self, name: str) -> None:
        """Begin to park a model. Raises RequestError if it is not loaded, or is none that is parked."""
        self.begin()
        row = self.table.rows[name]
        if row.state not in ("loaded", "draining"):
            raise RequestError(f"model {name} is not loaded")
        if row.rest is None:
            raise RequestError(
                f"model {name} is not parked, but unloaded: its section has no `park = 1`"
            )
        self._do(self.table.park(name, time.monotonic()))

    async def planned(self, name: str) -> LoadNeed:
        """The needs of a model. Raises PyspecError for a file that can not be loaded."""
        self._look_at(name)
        if self.table.rows[name].need is None:
            self.stamps[name] = self.models[name].stamp
            need = await asyncio.to_thread(self.models[name].plan, dict(self.table.budget))
            if name not in self.table.rows:
                raise NotFound(f"the model {name!r} is gone")
            self._is_planned(name, need)
        return self.needs[name]

    # -- actions -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Belong to the running event loop, from its first call on."""
        if self._task is not None or self.is_draining:
            return
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._live())
        for model in self.models.values():
            if model.starts and not self.table.rows[model.name].is_resident:
                self._do(self.table.load(model.name, time.monotonic()))

    async def _live(self) -> None:
        measured = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S if self.table.is_timed else REST_S)
            try:
                for name in list(self._engines):
                    self._look_at(name)
                if self._measure is not None and time.monotonic() - measured > MEASURE_S:
                    measured = time.monotonic()
                    await self._remeasure(self._measure)
                self._do(self.table.tick(time.monotonic()))
            except Exception:  # the clock goes on
                log.exception("a look at the models failed")

    async def _remeasure(self, measure: Callable[[Mapping[str, int]], Mapping[str, int]]) -> None:
        """Measure the budget, if no model comes or leaves meanwhile."""
        rows, used = self.table.rows.values(), self.table.used()
        if all(row.state in ("unloaded", "loaded", "parked") for row in rows):
            found = await asyncio.to_thread(measure, used)
            if used == self.table.used():
                self.table.budget |= found

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant(ticket):
                    if (future := self._futures.pop(ticket, None)) is not None and not future.done():
                        future.set_result(None)
                case Refuse(ticket, error):
                    if (future := self._futures.pop(ticket, None)) is not None and not future.done():
                        future.set_exception(error)
                case AskNeed(name):
                    self.stamps[name] = self.models[name].stamp
                    plan = partial(self.models[name].plan, dict(self.table.budget))
                    self._work(f"planning {name}", plan, partial(self._is_planned, name))
                case Start(name):
                    loading = self._loads[name] = Loading()
                    self.n_load += 1
                    load = partial(self._load, name, self.models[name], self.needs[name], loading)
                    self._work(f"loading {name}", load, partial(self._is_loaded, name, loading))
                case Stop(name):
                    self._stop(name)
                case Park(name):
                    self._parked[name] = self.services.pop(name)
                    self._move(name, parks=True)
                case Wake(name):
                    self._move(name, parks=False)
                case Changed(name):
                    self.tell_status(name)

    def _work(self, about: str, do: Callable[[], T], then: Callable[[T | PyspecError], None]) -> None:
        """Do something on a thread. `then` gets what came of it, or its error, on the loop. about: names it in errors"""

        def run() -> None:
            try:
                found: T | PyspecError = do()
            except Exception as e:  # noqa: BLE001 - whatever it is, nobody waits for ever
                found = _as_error(e, about)
            self._post(partial(then, found))

        threading.Thread(target=run, name="pyspec-models", daemon=True).start()

    def _post(self, event: Callable[[], None]) -> None:
        """Run on the loop, from another thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(event)

    def _is_planned(self, name: str, need: LoadNeed | PyspecError) -> None:
        if isinstance(need, PyspecError):
            self._has_failed(name, need)
        elif name in self.table.rows:  # else its source is gone
            self.needs[name] = need
            found = need.bytes if name in self.stamps else None  # it has other flags since it was asked
            self._do(self.table.planned(name, found, time.monotonic(), need.rest))

    def _load(self, name: str, model: Model, need: LoadNeed, loading: Loading) -> Engine | None:
        """Load on a thread. If the load is ended, or fails, nothing of it stays."""

        def report(stage: str, fraction: float) -> None:
            if len(self._loads) == 1:  # reports do not say whose they are
                loading.stage = stage, fraction
                self._post(partial(self.tell_status, name))

        log.info("loading %s: %s", name, need.text)
        began = time.monotonic()
        with progress.listening(report):
            engine = model.load(need, loading.begun)
        if loading.is_ended:
            engine.close(CLOSE_S)
            return None
        log.info("%s is loaded after %.1f s", name, time.monotonic() - began)
        return engine

    def _is_loaded(self, name: str, loading: Loading, found: Engine | PyspecError | None) -> None:
        del self._loads[name]
        if not self.is_draining:
            self._ahead()
        if loading.is_ended:
            if found is None or isinstance(found, PyspecError):
                self._has_gone(name)
            else:  # it was ended in the last moment
                self._close(name, found)
            return
        assert found is not None
        if isinstance(found, PyspecError):
            self._has_failed(name, found)
            return
        try:
            self.add(name, found)
        except Exception as e:  # noqa: BLE001 - `_as_error` logs it
            self._work(f"closing {name}", partial(found.close, CLOSE_S), lambda closed: None)
            self._has_failed(name, _as_error(e, f"serving {name}"))
        else:
            self._do(self.table.loaded(name, time.monotonic()))

    def _move(self, name: str, *, parks: bool) -> None:
        """Park or wake a model."""
        engine = self._engines[name]
        do, then = engine.park if parks else engine.wake, partial(self._has_moved, name, engine, parks)
        self._work(f"parking or waking {name}", do, partial(then, time.monotonic()))

    def _has_moved(
        self, name: str, engine: Engine, parks: bool, began: float, error: PyspecError | None
    ) -> None:
        if self._engines.get(name) is not engine:  # it was stopped meanwhile
            return
        now = time.monotonic()
        if error is not None:
            log.error("%s could not be %s: %s", name, "parked" if parks else "woken", error)
            self._do(self.table.died(name, error, now))
            return
        log.info("%s is %s after %.2f s", name, "parked" if parks else "awake", now - began)
        if parks:
            self._do(self.table.parked(name, now))
        else:
            self.n_wake += 1
            self.services[name] = self.last = self._parked.pop(name)
            self._do(self.table.loaded(name, now))

    def add(self, name: str, engine: Engine) -> None:
        """Serve a loaded engine as a model."""
        self.services[name] = self.last = Service(engine, self.models[name].settings, self.sessions)
        self._engines[name] = engine

    def adopt(self, name: str, engine: Engine, need: LoadNeed) -> None:
        """Have a model that was loaded already."""
        row = self.table.rows[name]
        row.state, row.need = "loaded", need.bytes
        row.loaded_at = row.used = time.monotonic()
        self.needs[name], self.stamps[name] = need, self.models[name].stamp
        self.add(name, engine)

    def _has_failed(self, name: str, error: PyspecError) -> None:
        log.error("%s can not be loaded: %s", name, error)
        self.n_failed += 1
        if name in self.table.rows:
            self._do(self.table.failed(name, error, time.monotonic()))

    def _stop(self, name: str) -> None:
        if name in self._loads:
            if (core := self._loads[name].end()) is not None:
                self._work(f"ending the load of {name}", partial(core.close, 0.0), lambda closed: None)
            return
        engine = self._engines.pop(name)
        service = self._parked.pop(name, None) or self.services.pop(name)
        service.abort_all(Unavailable(UNLOADED))
        service.close()
        self._close(name, engine)

    def _close(self, name: str, engine: Engine) -> None:
        log.info("unloading %s", name)
        self._work(
            f"closing {name}", partial(engine.close, CLOSE_S), lambda closed: self._has_gone(name)
        )

    def _has_gone(self, name: str) -> None:
        if self.stamps.get(name) != self.models[name].stamp:
            self.table.rows[name].need = None  # another file, or other flags
        self._do(self.table.gone(name, time.monotonic()))
        if name not in self._names.values():
            self._forget(name)

    async def gone(self, name: str) -> None:
        """Unload a model and return when its memory is free. Raises RequestError if requests load it again."""
        row = self.table.rows[name]
        if row.is_resident or row.asked is not None or row.waiting:
            self.unload(name)
        until = time.monotonic() + row.stop_s + CLOSE_S + CLOSE_S
        while row.is_resident:
            if time.monotonic() > until:
                raise RequestError(f"model {name} is in use")
            await asyncio.sleep(TICK_S)

    # -- downloads ---------------------------------------------------------------------------------------------------

    async def download(self, name: str) -> None:
        """Begin to download USER/REPO:QUANT; events tell its progress and its end. Raises PyspecError for an unknown one."""
        if self._find is None:
            raise NotSupported("this server downloads nothing")
        if name in self.downloads:
            raise RequestError(f"{name} is being downloaded already")
        self.begin()
        self.downloads[name] = {}
        try:
            found = await asyncio.to_thread(self._find, name)
        except BaseException as e:
            del self.downloads[name]
            self._cancelled.discard(name)
            if not isinstance(e, Exception):  # its client has left
                raise
            raise RequestError(f"{name} can not be downloaded: {_as_error(e, 'looking for it')}") from e

        def report(stage: str, fraction: float) -> None:
            file = stage.removeprefix(progress.DOWNLOAD).strip()
            if stage.startswith(progress.DOWNLOAD) and (size := found.sizes.get(file)):
                done = {file: {"done": int(fraction * size), "total": size}}
                self._post(partial(self._has_come, name, done))

        def fetch() -> None:
            progress.is_stopped.set(lambda: name in self._cancelled)
            with progress.listening(report):
                found.fetch()

        self._work(f"the download of {name}", fetch, partial(self._is_downloaded, name))

    def _has_come(self, name: str, done: dict[str, dict[str, int]]) -> None:
        if name in self.downloads:
            self.downloads[name] = self.downloads[name] | done
            self.tell("download_progress", name, {"progress": self.downloads[name]})

    async def cancel(self, name: str) -> None:
        """End a download; returns when it has ended. Its bytes are kept."""
        self._cancelled.add(name)
        while name in self.downloads:
            await asyncio.sleep(TICK_S)

    def _is_downloaded(self, name: str, failed: PyspecError | None) -> None:
        assert self._loop is not None
        self._showing = self._loop.create_task(self._show(name, failed))

    async def _show(self, name: str, failed: PyspecError | None) -> None:
        """List the files of a download and send its last event."""
        del self.downloads[name]
        self._cancelled.discard(name)
        try:
            if failed is None:
                await self.reload()
        except Exception as e:  # noqa: BLE001 - readers of events wait for an end
            failed = _as_error(e, "reading the sources")
        if failed is None:
            self.tell("download_finished", name, {})
        else:
            log.error("the download of %s failed: %s", name, failed)
            self.tell("download_failed", name, {"error": str(failed)})

    # -- what is shown -----------------------------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        """llama-server's `status` of a model."""
        row, model = self.table.rows[name], self.models[name]
        value = "loaded" if row.is_resident else "unloaded"
        is_wanted = bool(row.waiting) or row.asked is not None
        if row.state in ("loading", "waking") or (is_wanted and row.state in ("unloaded", "parked")):
            value = "loading"
        elif row.state == "parked" or (self.alone and not row.is_resident and row.failed is None):
            value = "sleeping"
        found: dict[str, Any] = {"value": value, "args": list(model.words)}
        if name in self.downloads:
            found |= {"value": "downloading", "progress": self.downloads[name]}
        elif loading := self._loads.get(name):
            stage, fraction = loading.stage
            found["progress"] = {"stages": ["load"], "current": stage, "value": round(fraction, 3)}
        if row.failed is not None and not row.is_resident:
            found |= {"failed": True, "exit_code": row.failed.exit_code, "reason": str(row.failed)}
        return found

    def tell_status(self, name: str) -> None:
        """Send a model's state, as llama-server does: `status` is a word there."""
        status = self.status(name)
        said = {"status": status["value"]} | ({"exit_code": 0} if status["value"] == "unloaded" else {})
        self.tell(
            "model_status", name, said | {k: v for k, v in status.items() if k not in ("value", "args")}
        )

    def tell(self, event: str, name: str, data: Mapping[str, Any]) -> None:
        """Send an event to all readers; those that are slow lose their oldest."""
        self._version += 1
        for reader in self._readers:
            if reader.full():
                reader.get_nowait()
            reader.put_nowait({"model": name, "event": event, "data": dict(data), "id": self._version})

    async def events(self) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Events from now on, until the server ends; None after some seconds without any."""
        self.begin()
        reader: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MOST_EVENTS)
        self._readers.add(reader)
        try:
            while not self.is_draining:
                try:
                    event = await asyncio.wait_for(reader.get(), QUIET_S)
                except TimeoutError:
                    event = None
                if event != END:
                    yield event
        finally:
            self._readers.discard(reader)

    # -- as one service, for the server ------------------------------------------------------------------------------

    @property
    def n_jobs(self) -> int:
        """Requests that run, of all models."""
        return sum(service.n_jobs for service in self.services.values())

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run work off the event loop."""
        return await asyncio.to_thread(work, *args)

    def abort_all(self, error: PyspecError) -> None:
        """End all requests, those that wait and readers of events among them."""
        for reader in self._readers:
            with contextlib.suppress(asyncio.QueueFull):
                reader.put_nowait(END)
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)
        for service in self.services.values():
            service.abort_all(error)

    def shut_down(self) -> None:
        """End all requests because the server ends."""
        self.is_draining = True
        if self._task is not None:
            self._task.cancel()
        for service in self.services.values():
            service.shut_down()

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """End all engines at once. Returns False if one does not end."""
        for loading in list(self._loads.values()):
            if (core := loading.end()) is not None:
                core.close(0.0)
        ends: list[bool] = []

        def end(engine: Engine) -> None:
            ends.append(engine.close(limit_s))

        engines = self._engines.values()
        threads = [threading.Thread(target=end, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s + CLOSE_S)
        self._closing()
        return len(ends) == len(threads) and all(ends)
