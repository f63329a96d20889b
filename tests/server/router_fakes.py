"""Several fake models behind one real port."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from server_fakes import FakeEngine, Script
from server_live import running
from waiting import wait_for

from pyspec.engine.plan.apart import LoadNeed
from pyspec.errors import DeviceError, PyspecError, Unavailable
from pyspec.server.app import create_app
from pyspec.server.http.serve import bind
from pyspec.server.models.router import Model, Router
from pyspec.server.settings import Limits, RouterSettings, ServerSettings


class NamedEngine(FakeEngine):
    """Says its model's name, and how often it was closed. Parks and wakes for as long as it is told, or fails."""

    def __init__(self, name: str, script: Script) -> None:
        super().__init__()
        self.info = replace(self.info, model_name=name)
        self.script, self.is_closed, self.word = script, False, "ok"
        self.is_parked, self.moves_s, self.fails = False, 0.02, False

    def state(self) -> str:
        return self.word

    def submit(self, request: Any, sink: Any) -> str:
        assert not self.is_parked, "a request came to a parked engine"
        return super().submit(request, sink)

    def park(self) -> None:
        self._move(True)

    def wake(self) -> None:
        self._move(False)

    def _move(self, parks: bool) -> None:
        assert self.is_parked is not parks
        self.is_parked = True
        end = time.monotonic() + self.moves_s
        while time.monotonic() < end:
            if self.is_closed:
                raise Unavailable("it was closed")
            time.sleep(0.002)
        if self.fails:
            raise DeviceError("planted")
        self.is_parked = parks

    def close(self, limit_s: float = 0.0) -> bool:
        self.is_closed = True
        super().close()
        return True


@dataclass
class World:
    """Fake models: what they need, how long their loads take, and what became of them."""

    needs: dict[str, Any]  # bytes of the host, or by place
    load_s: float = 0.05
    rests: dict[str, dict[str, int]] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)
    broken: dict[str, PyspecError] = field(default_factory=dict)
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    engines: dict[str, NamedEngine] = field(default_factory=dict)
    projectors: dict[str, str] = field(default_factory=dict)
    n_load: Counter[str] = field(default_factory=Counter)
    held: int = 0
    most_held: int = 0
    closed: list[str] = field(default_factory=list)
    settings: ServerSettings = field(
        default_factory=lambda: ServerSettings(port=0, limits=Limits(drain_s=0.2))
    )

    def models(self) -> list[Model]:
        return [self.model(name) for name in self.needs]

    def model(self, name: str) -> Model:
        def plan(budget: Mapping[str, int]) -> LoadNeed:
            need = self.needs[name]
            return LoadNeed(
                need if isinstance(need, dict) else {"host": need}, 512, "a plan", self.rests.get(name)
            )

        def load(need: LoadNeed, begun: Callable[[Any], None]) -> Any:
            core = _Core()
            begun(core)
            end = time.monotonic() + self.load_s
            while time.monotonic() < end:
                if core.is_closed:
                    raise PyspecError("ended")
                time.sleep(0.005)
            if name in self.broken:
                raise self.broken[name]
            n_bytes = need.bytes.get("host", 1)
            self.held += n_bytes
            self.most_held = max(self.held, self.most_held)
            self.n_load[name] += 1
            script = self.scripts.get(name, Script(text=f"I am {name}. " * 4))
            engine = self.engines[name] = NamedEngine(name, script)
            engine.info = replace(engine.info, mmproj=self.projectors.get(name, ""))
            end_engine = engine.close

            def close(limit_s: float = 0.0) -> bool:
                if not engine.is_closed:
                    self.held -= n_bytes
                    self.closed.append(name)
                return end_engine(limit_s)

            engine.close = close  # type: ignore[method-assign]
            return engine

        more = dict(self.more.get(name, {}))
        settings = replace(self.settings, aliases=(name, *more.pop("aliases", ())))
        return Model(name=name, plan=plan, load=load, settings=settings, words=("-m", name), **more)


class _Core:
    is_closed = False

    def close(self, limit_s: float = 0.0) -> bool:
        self.is_closed = True
        return True


@dataclass
class Client:
    """Calls to a server of several models."""

    url: str
    router: Router
    world: World
    headers: dict[str, str] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return self.http.request(method, self.url + path, **{"headers": self.headers} | more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.call("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.call("POST", path, body, **more)

    def complete(self, model: str, **more: Any) -> httpx.Response:
        return self.post("/completion", {"model": model, "prompt": "a", **more})

    def text(self, model: str, **more: Any) -> str:
        answer = self.complete(model, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["content"]

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.get("/models").json()["data"]}

    def value(self, model: str) -> str:
        return self.rows()[model]["status"]["value"]

    def wait(self, model: str, *values: str) -> None:
        wait_for(lambda: self.value(model) in values, 20.0)

    def asked(self, model: str, count: str) -> Background:
        """A request that is counted as `n_running` or `n_waiting` of the model."""
        call = Background(lambda: self.complete(model))
        wait_for(lambda: self.rows()[model][count] == 1)
        return call

    def park(self, model: str, then: str = "sleeping") -> None:
        self.post("/models/park", {"model": model})
        self.wait(model, then)

    @contextmanager
    def events(self, last: Callable[[dict[str, Any]], bool]) -> Iterator[list[dict[str, Any]]]:
        """Events from here on; all up to the one that is the `last` have come in the end."""
        seen: list[dict[str, Any]] = []

        def listen() -> None:
            with httpx.stream("GET", f"{self.url}/models/sse", timeout=20) as stream:
                for line in stream.iter_lines():
                    if line.startswith("data: "):
                        seen.append(json.loads(line[6:]))
                        if last(seen[-1]):
                            return

        reader = threading.Thread(target=listen, daemon=True)
        reader.start()
        wait_for(lambda: bool(self.router._readers))
        yield seen
        reader.join(20)


@contextmanager
def serving(
    world: World, budget: int = 100, *, alone: bool = False, card: int = 0, **options: Any
) -> Iterator[Client]:
    """A server of these models on a real port. card: bytes of a GPU, 0: there is none"""
    settings = world.settings
    budgets = {"host": budget} | ({"cuda:0": card} if card else {})
    router = Router(world.models, settings, RouterSettings(**options), budgets, alone=alone)
    if alone:
        name = next(iter(world.needs))
        model = world.model(name)
        router.adopt(name, model.load(LoadNeed({}, 512), lambda core: None), LoadNeed({}, 512))
    sock = bind(settings)
    with closing(router), running(create_app(router, settings), settings, [sock]) as (server, _):
        server.begin()
        keys = settings.api_keys
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        yield Client(f"http://127.0.0.1:{sock.getsockname()[1]}", router, world, headers)


class Background:
    """A call in a thread."""

    def __init__(self, work: Callable[[], httpx.Response]) -> None:
        self.answer: httpx.Response | None = None
        self.ended = 0.0
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.answer = self._work()
        self.ended = time.monotonic()

    def ok(self) -> httpx.Response:
        self._thread.join(60)
        assert self.answer is not None and self.answer.status_code == 200, (
            self.answer and self.answer.text
        )
        return self.answer

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()
