"""pyspec in Ray Serve (`pip install '.[ray]'`).

`app` builds two deployments: replicas that own an engine each, and before them the HTTP server, which keeps every request's tokens. So a
request whose replica dies continues on another one with the same text. `serve run pyspec.serve.ray:app model=demo replicas=2` starts both.

`PyspecServer` is one deployment whose replicas own an engine and serve HTTP themselves; `LLMConfig.server_cls` of Ray Serve LLM takes it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.types import Message

from pyspec.config import settings_from
from pyspec.engine.api import Engine
from pyspec.engine.aside import to_loop
from pyspec.engine.messages import pack
from pyspec.engine.served import ServedEngine
from pyspec.errors import ConfigError, PyspecError
from pyspec.gguf import open_gguf
from pyspec.request import Done, EngineInfo, Event, Failed
from pyspec.serve.remote_core import Call, Packed, RemoteCore, RemoteRun
from pyspec.server.app import create_app
from pyspec.server.service import most_inside
from pyspec.server.settings import ServerSettings
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

try:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
except ImportError as e:
    raise ConfigError(f"pyspec.serve.ray wants Ray Serve: pip install '.[ray]' ({e})") from e

PREFIX = "prefix"
# ray.serve.llm imports vLLM or SGLang, the module of its router does not
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)
KV = "kv"
KV_ROUTER = "pyspec.serve.kv_router.KVRouter"
ROUTERS = {"": "", PREFIX: PREFIX_ROUTER, KV: KV_ROUTER}
DRAIN_S = 60.0  # that requests of a replica get before it ends; later ones continue elsewhere
HEALTH_S = 5.0
STATS_S = 2.0  # between reports of a replica's KV events, by which the router gets to know a new one


class RayArgs(BaseModel):
    """Arguments of `app`, as a mapping or as name=value on the command line of `serve run`.

    model, draft   as for Engine.load
    np, ctx        slots of a replica, and tokens one request may hold
    replicas       at least these
    max_replicas   at most these: their number follows the load; 0: it stays
    gpus           GPUs of a replica; default: `tp` of the settings, or none if this Ray has no GPUs
    cpus           CPUs that Ray reserves for a replica
    autoscaling    further options of Ray's AutoscalingConfig
    router         "": Ray's choice of two; "prefix": Ray's PrefixCacheAffinityRouter; "kv": its KVAwareRouter, by KV events; or the path of
                   a router's class
    router_args    arguments of that class
    http_replicas  HTTP servers before them
    engine         further settings of Engine.load
    server         settings of the HTTP server: fields of ServerSettings
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    draft: str | None = "auto"
    np: int = 4
    ctx: int = 0
    replicas: int = Field(1, ge=1)
    max_replicas: int = Field(0, ge=0)
    autoscaling: dict[str, Any] = {}
    gpus: float | None = None
    cpus: float = 1.0
    router: str = ""
    router_args: dict[str, Any] = {}
    http_replicas: int = Field(1, ge=1)
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}


def app(args: Mapping[str, Any] | RayArgs) -> Any:
    """The Ray Serve application of a model (see RayArgs). Raises pydantic's ValidationError or ConfigError for unknown or wrong arguments."""
    a = args if isinstance(args, RayArgs) else RayArgs.model_validate(dict(args))
    settings = {"np": a.np, "ctx": a.ctx, **(kv_settings() if a.router == KV else {}), **a.engine}
    n_queue = settings_from(settings).queue_limit
    server_settings(a.server)
    most = max(a.replicas, a.max_replicas)
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={"num_cpus": a.cpus, "num_gpus": gpus_of(a.gpus, a.engine)},
        max_ongoing_requests=a.np + n_queue,  # the engine's own queue is fair
        request_router_config=router_config(a.router, a.router_args, a.np),
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        **scaling(a.replicas, a.max_replicas, a.np, a.autoscaling),
    ).bind(a.model, a.draft, settings)
    http = serve.deployment(
        serve.ingress()(HttpServer),
        name="http",
        num_replicas=a.http_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=most_inside(most * a.np, most * n_queue),  # it refuses a flood by itself
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    return http.bind(engines, most, a.server, a.router == KV)


def kv_settings() -> Mapping[str, str]:
    """Settings of engines whose replicas are chosen by KV events."""
    from pyspec.serve.kv_router import EVENTS

    return EVENTS


def server_settings(given: Mapping[str, Any]) -> ServerSettings:
    """Settings of the HTTP server; slots are not shown, because they belong to replicas. Raises ConfigError for unknown names."""
    try:
        return ServerSettings(**{"slots": False, **given})
    except TypeError as e:
        raise ConfigError(f"server: {e}; want fields of pyspec.server.settings.ServerSettings") from None


def gpus_of(given: float | None, engine: Mapping[str, Any]) -> float:
    """GPUs that Ray reserves for a replica."""
    if given is not None:
        return given
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False, ignore_reinit_error=True)
    return float(engine.get("tp", 1)) if ray.cluster_resources().get("GPU", 0) else 0.0


def router_config(router: str, args: Mapping[str, Any], np: int) -> Any:
    """Ray's configuration of a router's name or path.

    Its prefix router knows prompts, not answers, and by default ignores a prefix below a tenth of the prompt, any difference of load, and
    the size of its tree: here it follows shorter ones, up to a difference of the slots of a replica, and forgets old texts.
    """
    path = ROUTERS.get(router, router)
    if not path:
        return RequestRouterConfig()
    ours = {"match_rate_threshold": 0.02, "imbalanced_threshold": np, "do_eviction": True}
    values = (ours if router == PREFIX else {}) | dict(args)
    often = {"request_routing_stats_period_s": STATS_S} if router == KV else {}
    return RequestRouterConfig(request_router_class=path, request_router_kwargs=values, **often)


def scaling(least: int, most: int, np: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a deployment: a fixed number of replicas, or one that follows their load."""
    if most <= least:
        return {"num_replicas": least}
    policy = AutoscalingPolicy(policy_function=f"{__name__}:wanted_replicas")
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            **{"target_ongoing_requests": np, "policy": policy, **more},
        )
    }


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy of Ray Serve: as many replicas as open requests fill slots, counted in engines and routers."""
    metrics = context.aggregated_metrics
    slots = metrics.get("slots", {})
    if not slots:  # none is reported yet
        return context.target_num_replicas, {}
    inside = sum(metrics.get("requests", {}).values())
    waiting = context.total_queued_requests or 0
    n = math.ceil((inside + waiting) / max(1.0, sum(slots.values()) / len(slots)))
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(n, least), most), {}


class OwnsEngine:
    """A replica that owns an engine, in a process of its own that is replaced when it fails."""

    engine: Engine

    def check_alive(self) -> None:
        """Raise if the engine has stopped for good."""
        if not self.engine.alive():
            raise RuntimeError(f"the engine is {self.engine.state()}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Its load, for `wanted_replicas`, and for dashboards."""
        m = self.engine.metrics()
        return {
            "slots": float(self.engine.info.n_slot),
            "requests": float(m.requests_processing + m.requests_queued),
            "cache_usage": m.pages_used / m.pages_total if m.pages_total else 0.0,
        }

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


class EngineReplica(OwnsEngine):
    """A deployment whose replicas give others their engines."""

    def __init__(self, model: str, draft: str | None, settings: Mapping[str, Any]) -> None:
        self.engine = Engine.load(model, draft, isolated=True, **dict(settings))

    def about(self) -> tuple[EngineInfo, dict[str, object]]:
        """The engine, and the metadata of its file, by which others build its tokenizer and template."""
        with open_gguf(Path(self.engine.info.model_path)) as file:
            return self.engine.info, dict(file.metadata)

    async def run(self, call: Call) -> AsyncGenerator[Packed, None]:
        """The events of one request, packed, those of a moment together. Closing the generator ends the request."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        listener = to_loop(asyncio.get_running_loop(), events, self.engine.cancel)
        try:
            name = self.engine.submit(call.request, listener)
        except PyspecError as e:
            yield [pack(Failed("", e))]
            return
        try:
            last: Event | None = None
            while not isinstance(last, Done | Failed):
                batch = [await events.get()]
                while not events.empty():
                    batch.append(events.get_nowait())
                last = batch[-1]
                yield [pack(event) for event in batch]
        finally:
            self.engine.cancel(name)

    def check_health(self) -> None:
        """Ray replaces the replica if this raises: not while the engine's process is replaced."""
        self.check_alive()

    def record_routing_stats(self) -> dict[str, Any]:
        """Where the replica publishes its KV events, for `router=kv`; else nothing."""
        if not self.engine.publishers:
            return {}
        from pyspec.serve.kv_router import routing_stats

        return routing_stats(self.engine)


class HttpServer:
    """The HTTP server before the replicas. It needs neither the model's files nor torch."""

    def __init__(
        self, engines: Any, n_replica: int, settings: Mapping[str, Any], by_events: bool = False
    ) -> None:
        self._engines, self._n_replica, self._by_events = engines, n_replica, by_events
        self._settings = server_settings(settings)
        self._core: RemoteCore | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """pyspec's own application; Ray calls it once the first replica answers."""
        follow = None
        if self._by_events:
            from pyspec.serve.kv_router import follower

            follow = follower(self._engines)  # before the first call
        info, metadata = await self._engines.about.remote()
        tokenizer, template = Tokenizer.from_metadata(metadata), ChatTemplate.from_metadata(metadata)
        runs = self._engines.options(stream=True)

        def run(call: Call) -> RemoteRun:
            running: RemoteRun = runs.run.remote(call)
            return running if follow is None else follow(running)

        n = self._n_replica
        info = replace(info, n_slot=n * info.n_slot, n_queue=n * info.n_queue)
        self._core = RemoteCore(run, info, tokenizer, (BackPressureError,))
        return create_app(ServedEngine(self._core, tokenizer, template), self._settings)

    def check_health(self) -> None:
        if self._core is not None and not self._core.alive():
            raise RuntimeError("the HTTP server was closed")


class PyspecServer(OwnsEngine):
    """A deployment whose replicas own an engine and serve HTTP themselves: the class that `LLMConfig.server_cls` takes.

    llm_config  Ray's LLMConfig: `model_loading_config` names the model (id, and source: a GGUF file or a name), `engine_kwargs` are
                settings of Engine.load (np, ctx, draft, tp ...), `server` among them those of the HTTP server
    """

    def __init__(self, llm_config: Any) -> None:
        self._llm_config = llm_config
        settings = dict(llm_config.engine_kwargs)
        server = settings.pop("server", {})
        target = getattr(llm_config.model_loading_config, "model_source", None) or llm_config.model_id
        if not isinstance(target, str):
            raise ConfigError("model_source: want the path of a GGUF file, or a name of `pyspec models`")
        draft = settings.pop("draft", "auto")
        self.engine = Engine.load(target, draft, isolated=True, **settings)
        self._settings = ServerSettings(**{"aliases": (llm_config.model_id,), **server})
        self._app = create_app(self.engine, self._settings)

    async def start(self) -> None:
        """The engine is loaded by the constructor."""

    async def check_health(self) -> None:
        self.check_alive()

    async def llm_config(self) -> Any:
        """Ray asks its own configuration back."""
        return self._llm_config

    async def __serve_build_asgi_app__(self) -> Starlette:
        """The engine's own application, for RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and for `serve.ingress()(PyspecServer)`."""
        return self._app

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Options of the deployment: the GPUs of a replica, where none are given."""
        options = dict(llm_config.deployment_config)
        actor = dict(options.get("ray_actor_options") or {})
        if "num_gpus" not in actor and llm_config.accelerator_type:
            actor["num_gpus"] = llm_config.engine_kwargs.get("tp", 1)
        if llm_config.runtime_env:
            actor.setdefault("runtime_env", {}).update(llm_config.runtime_env)
        return options | {"ray_actor_options": actor}

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Ray's ingress calls this for /v1/chat/completions: events of a stream as text, else the answer."""
        async for part in self._answer(
            "/v1/chat/completions", "ChatCompletionResponse", request, raw_request_info
        ):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """As `chat`, for /v1/completions."""
        async for part in self._answer(
            "/v1/completions", "CompletionResponse", request, raw_request_info
        ):
            yield part

    async def _answer(self, path: str, kind: str, request: Any, info: Any) -> AsyncGenerator[Any, None]:
        """Send the body through the application, as if it had come over HTTP."""
        body = request.model_dump(mode="json", exclude_unset=True)
        headers = dict(info.headers) if info is not None else {}
        parts: list[bytes] = []
        status = 0
        stream = ask(self._app, path, json.dumps(body).encode(), headers)
        async for message in stream:
            if message["type"] == "http.response.start":
                status = message["status"]
            elif body.get("stream") and status == 200:
                if message.get("body"):
                    yield message["body"].decode()
            else:
                parts.append(message.get("body", b""))
        if parts and (answer := b"".join(parts)):
            from ray.llm._internal.serve.core.configs import openai_api_models as models

            value = json.loads(answer)
            if status == 200:
                yield getattr(models, kind).model_validate(value)
            else:
                error = {"code": status, "message": "", "type": ""} | value["error"]
                yield models.ErrorResponse.model_validate({"error": error | {"code": status}})


HOP_HEADERS = ("content-length", "content-type", "transfer-encoding", "connection")


async def ask(
    asgi: Starlette, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncGenerator[Message, None]:
    """POST a body to an application of this process, and yield its messages. Closing the generator is a client that leaves."""
    given = [(k.lower(), v) for k, v in headers.items() if k.lower() not in HOP_HEADERS]
    given += [("content-type", "application/json"), ("content-length", str(len(body)))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in given],
        "client": None,
        "server": None,
    }
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def answer() -> None:
        try:
            await asgi(scope, receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(answer())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        has_left.set()
        if not task.done():
            task.cancel()
