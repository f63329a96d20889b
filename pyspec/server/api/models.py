"""Paths of a server with several models, as llama-server has them: rows, loads and ends, events, downloads, plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import pyspec
from pyspec.errors import DoesNotFit, RequestError, SwitchedOff, Unavailable
from pyspec.server.api import views
from pyspec.server.api.generate import LookupBody, kept
from pyspec.server.api.openapi import Endpoint, Handler, get, post
from pyspec.server.api.routed import routed
from pyspec.server.api.schema import Body, validate
from pyspec.server.http.body import parse_object, read_body
from pyspec.server.http.envelope import JSON, Refused, dumps, error_body
from pyspec.server.http.gate import HAS_KEY
from pyspec.server.metrics import EngineCollector, ModelsCollector, exposition
from pyspec.server.models.router import Router
from pyspec.server.models.schedule import ModelRow
from pyspec.server.service import Service
from pyspec.server.stream import HEADERS, send_parts, while_connected

DONE = {"success": True}
YEAR_S = 365 * 86400.0  # the longest that ollama's list says of a model


class ModelBody(Body):
    """The model to load or unload, by its name; "*" for all but pinned ones; or the repository to download."""

    model: str


class NoRoom(DoesNotFit):
    """A model can not be loaded, whichever others leave."""

    status = 409


def sees(router: Router, name: str) -> bool:
    """Whether a model reads images, as far as that is known before its load."""
    service = router.services.get(name)
    return router.models[name].sees if service is None else service.media is not None


def row_view(router: Router, name: str, tells: bool) -> dict[str, Any]:
    """One row of `/models`. tells: paths and flags, too"""
    row, model, need = router.table.rows[name], router.models[name], router.needs.get(name)
    hidden, is_idle = () if tells else ("args", "reason"), row.state == "loaded" and not row.claims
    view = views.model_head(name, model.aliases, model.settings.tags, router.started) | {
        "status": {key: value for key, value in router.status(name).items() if key not in hidden},
        "architecture": {
            "input_modalities": ["text", "image"] if sees(router, name) else ["text"],
            "output_modalities": ["text"],
        },
        "source": model.source,
        "can_remove": bool(model.repo[0]),
        "memory": {
            "card": sum(n for place, n in need.bytes.items() if place != "host") if need else None,
            "host": need.bytes.get("host", 0) if need else None,
            "parked": dict(need.rest) if need and need.rest is not None else None,
        },
        "idle_s": round(time.monotonic() - row.used, 1) if is_idle else 0,
        "pinned": row.pinned,
        "n_running": len(row.claims),
        "n_waiting": len(row.waiting),
    }
    if tells:
        view["path"] = model.path
    if router.is_stale(name) and row.is_resident:
        view["stale"] = True
    if (service := router.services.get(name)) is not None:
        view["meta"] = views.model_view(service)["meta"]
    return view


def coming_view(router: Router, name: str) -> dict[str, Any]:
    """The row of a model that is being downloaded and is none yet."""
    return views.model_head(name, (), (), router.started) | {
        "status": {"value": "downloading", "progress": router.downloads[name]},
        "source": "cache",
        "can_remove": False,
    }


async def _models(router: Router, request: Request) -> Response:
    if request.query_params.get("reload") in ("1", "true"):
        if not request.scope.get(HAS_KEY, True):
            raise Refused(401, "the sources are read anew with an api key only")
        await router.reload()
    if "anthropic-version" in request.headers:
        return JSON(views.anthropic_models(router.names, router.started))
    rows = [row_view(router, name, request.scope.get(HAS_KEY, True)) for name in router.names]
    rows += [coming_view(router, name) for name in router.downloads if name not in router.models]
    named = [views.named(name, sees(router, name)) for name in router.names]
    return JSON({"object": "list", "data": rows, "models": named})


async def _model(router: Router, request: Request) -> Response:
    name = router.find(request.path_params["model"])
    if "anthropic-version" in request.headers:
        return JSON(views.anthropic_model(name, router.started))
    return JSON(row_view(router, name, request.scope.get(HAS_KEY, True)))


async def _body(router: Router, request: Request) -> str:
    raw = await read_body(request, router.settings.limits, router.reading)
    return validate(ModelBody, parse_object(raw, router.settings.limits)).model


async def _load(router: Router, request: Request) -> Response:
    """Begin a load; refused with the plan if there can be no room."""
    name = router.find(await _body(router, request))
    if name not in router.services:
        await while_connected(router.planned(name), request.receive)
        if why := router.table.never(router.table.rows[name]):
            raise NoRoom(f"no room: {why}; {router.needs[name].text}")
    router.load(name)
    return JSON(DONE)


async def _unload(router: Router, request: Request) -> Response:
    """Unload a model, or end its download."""
    if (said := await _body(router, request)) in router.downloads:
        await while_connected(router.cancel(said), request.receive)
        return JSON(DONE)
    return _named(router, said, router.unload, lambda row: row.is_resident)


def _named(
    router: Router, said: str, do: Callable[[str], None], may: Callable[[ModelRow], bool]
) -> Response:
    """Do it to the model of a name; "*" for all that may, but pinned ones."""
    every = [name for name, row in router.table.rows.items() if may(row) and not row.pinned]
    for name in every if said == "*" else [router.find(said)]:
        do(name)
    return JSON(DONE)


async def _park(router: Router, request: Request) -> Response:
    """As soon as its requests have ended."""

    def may(row: ModelRow) -> bool:
        return row.state == "loaded" and row.rest is not None

    return _named(router, await _body(router, request), router.park, may)


async def _download(router: Router, request: Request) -> Response:
    """Begin a download of USER/REPO:QUANT."""
    name = await _body(router, request)
    await while_connected(router.download(name), request.receive)
    return JSON(DONE)


async def _delete(router: Router, request: Request) -> Response:
    """Delete a model's files from the cache of downloads; it is unloaded first, and its download ends."""
    if (said := request.query_params.get("model")) in router.downloads:
        await while_connected(router.cancel(said), request.receive)
        await asyncio.to_thread(router.erase, said.partition(":")[0], "")
        router.tell("model_remove", said, {})
        return JSON(DONE)
    name = router.find(said)
    if not (repo := router.models[name].repo)[0]:
        raise RequestError(f"{name} is not in the cache of downloads; files elsewhere are not deleted")
    await while_connected(router.gone(name), request.receive)
    await asyncio.to_thread(router.erase, *repo)
    await router.reload()
    return JSON(DONE)


async def _plan(router: Router, request: Request) -> Response:
    """What a load would do now."""
    name = router.find(request.query_params.get("model"))
    need = await while_connected(router.planned(name), request.receive)
    table, row = router.table, router.table.rows[name]
    victims = [] if row.state not in ("unloaded", "parked") else table.victims(row, time.monotonic())
    before = table.used()
    after = table.used(but=[*(victims or ()), row])
    parks = [one for one in victims or () if table.may_park(one, row, victims or ())]
    for place in need.bytes:
        after[place] = after.get(place, 0) + sum((one.rest or {}).get(place, 0) for one in parks)
    rows = [
        {
            "place": place,
            "budget": table.budget.get(place, 0),
            "needs": n,
            "before": before.get(place, 0),
            "after": after.get(place, 0) + n,
        }
        for place, n in need.bytes.items()
    ]
    return JSON(
        {
            "model": name,
            "n_ctx": need.n_ctx,
            "plan": need.text,
            "fits": not table.never(row),
            "why": table.never(row),
            "waits": victims is None,
            "evicts": [victim.name for victim in victims or ()],
            "parks": [victim.name for victim in parks],
            "memory": rows,
        }
    )


async def _sse(router: Router, request: Request) -> ASGIApp:
    async def parts() -> AsyncGenerator[bytes, None]:
        async with aclosing(router.events()) as events:
            async for event in events:
                yield b": \n\n" if event is None else f"data: {dumps(event)}\n\n".encode()

    class Events:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await while_connected(send_parts(send, parts()), receive)

    return Events()


async def _ps(router: Router, request: Request) -> Response:
    """ollama's list of what is loaded."""
    found = []
    for name, service in router.services.items():
        row, need = router.table.rows[name], router.needs[name]
        rested_s = 0.0 if row.claims else time.monotonic() - row.used
        left_s = min(max(0.0, row.idle_s - rested_s), YEAR_S) if row.idle_s >= 0 else YEAR_S
        info = service.engine.info
        found.append(
            {
                "name": name,
                "model": name,
                "size": sum(need.bytes.values()),
                "size_vram": sum(n for place, n in need.bytes.items() if place != "host"),
                "context_length": info.n_ctx,
                "details": {"format": "gguf", "family": info.arch, "quantization_level": info.file_type},
                "expires_at": (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat(),
            }
        )
    return JSON({"models": found})


async def _health(router: Router, request: Request) -> Response:
    router.begin()
    rows = router.table.rows.values()
    view: dict[str, Any] = {"status": "ok"}
    view["models_loading"] = sum(row.state == "loading" for row in rows)
    view["models_failed"] = sum(row.failed is not None and not row.is_resident for row in rows)
    return JSON(view)


async def _ready(router: Router, request: Request) -> Response:
    """Would new work be taken."""
    router.begin()
    word = "draining" if router.is_draining else "ready"
    view: dict[str, Any] = {"status": word, "draining": router.is_draining}
    view |= {"requests_processing": router.n_jobs, "requests_queued": router.table.n_waiting}
    if not router.is_draining:
        return JSON(view)
    return JSON(view | error_body(Unavailable("the server is shutting down")), status_code=503)


async def _ping(router: Router, request: Request) -> Response:
    return Response(status_code=200)


async def _props(router: Router, request: Request) -> Response:
    if not router.settings.props:
        raise SwitchedOff("/props is switched off; start the server without --no-props")
    if router.alone or "model" in request.query_params:
        name = router.find(request.query_params.get("model"), answers=True)
        service = router.services.get(name)
        if service is None and router.alone:
            known = views.props_view(router.last) if router.last else {}
            return JSON(known | {"is_sleeping": True})
        return JSON(views.props_view(router.loaded(name)))
    return JSON(
        {
            "role": "router",
            "max_instances": router.options.models_max,
            "models_autoload": router.options.models_autoload,
            "build_info": f"b0-pyspec {pyspec.__version__}",
            "is_sleeping": False,
            "model_alias": "",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "memory_budget": router.table.budget,
            "memory_used": router.table.used(),
        }
    )


async def _metrics(router: Router, request: Request) -> Response:
    if not router.settings.metrics:
        raise SwitchedOff("/metrics is switched off; start the server with --metrics")
    if asked := request.query_params.get("model"):
        router.loaded(router.find(asked))
    wanted = [router.find(asked)] if asked else list(router.services)
    collectors = {
        name: EngineCollector(service.engine, service.latencies)
        for name, service in router.services.items()
        if name in wanted
    }
    table = router.table
    own = {
        "models_loaded": (len(router.services), "models that are loaded"),
        "models_waiting_requests": (table.n_waiting, "requests that wait for a model"),
        "models_loads": (router.n_load, "loads of models"),
        "models_wakes": (router.n_wake, "wakes of parked models"),
        "models_loads_failed": (router.n_failed, "loads of models, and plans, that failed"),
    }
    return await scraped(router, request, ModelsCollector(collectors, {} if asked else own))


async def scraped(served: Router | Service, request: Request, collector: Collector) -> Response:
    """The answer to a scrape, from a thread."""
    accept = request.headers.get("accept", "")
    body, kind = await served.in_thread(exposition, collector, accept)
    started = {"Process-Start-Time-Unix": str(int(served.started))}
    return Response(body, media_type=None, headers={"Content-Type": kind, **started})


async def _lookup(router: Router, request: Request) -> Response:
    """The streams of the named conversations, of all models."""
    raw = await read_body(request, router.settings.limits, router.reading)
    return kept(router, request, validate(LookupBody, parse_object(raw, router.settings.limits)))


_NAME = ({"name": "model", "in": "query", "required": True, "schema": {"type": "string"}},)
# fmt: off
ROUTER_ENDPOINTS: tuple[Endpoint, ...] = (
    get("/health /v1/health", _health, "Does the server take requests"),
    get("/ready", _ready, "Would new work be taken", (401, 503)),
    get("/v1/models /models", _models, "All models and their states"),
    get("/v1/models/{model:path}", _model),
    post("/models/load", _load, ModelBody, "Begin to load a model", "success"),
    post("/models/unload", _unload, ModelBody, "Unload a model", "success"),
    post("/models/park", _park, ModelBody, "Park a model in host memory", "success"),
    post("/models", _download, ModelBody, "Begin to download a model", "success"),
    get("/models", _delete, methods=("DELETE",)),
    get("/models/sse", _sse, "States of models as events", (401,), content_type="text/event-stream"),
    get("/models/plan", _plan, "What a load would need and unload", (400, 401, 404), parameters=_NAME),
    get("/api/ps", _ps, "Models that are loaded (ollama)", (401,)),
    get("/ping", _ping, "Does the server run (vLLM)", content_type="", methods=("GET", "POST")),
    get("/props", _props, "Settings of the server, or of ?model=", (400, 401, 404, 501)),
    get("/v1/streams/lookup", _lookup, methods=("POST",)),
    get("/metrics", _metrics, "Counters for Prometheus, by model", (400, 401, 404, 501), content_type="text/plain"),
)
# fmt: on
SAME = ("/openapi.json", "/version", "/v1/stream")
"""Endpoints of one model that a server of several answers in the same way."""


def endpoint_of(one: Endpoint) -> Handler:
    """The handler of an endpoint of one model, for a server of several."""
    return one.handler if one.paths[0] in SAME else partial(routed, one=one)
