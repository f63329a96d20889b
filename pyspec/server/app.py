"""The application: every path and its handler.

`create_app` may be mounted in another ASGI application; `pyspec.server.http.serve.run` serves it on a port.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import pyspec
from pyspec.errors import NotFound, PyspecError, SwitchedOff, Unavailable
from pyspec.request import Metrics
from pyspec.server.api import views
from pyspec.server.api.anthropic import MessagesBody
from pyspec.server.api.generate import generate, lookup_streams, read_stream, stop_stream
from pyspec.server.api.models import ROUTER_ENDPOINTS, endpoint_of, scraped
from pyspec.server.api.openapi import Endpoint, Handler, document, get, post
from pyspec.server.api.out_of_scope import refuse_unsupported, routes_not_here
from pyspec.server.api.pictures import SentPictures
from pyspec.server.api.prepared import Kind, as_read, count_tokens
from pyspec.server.api.prompts import chat_text, check_ids, mixed_ids
from pyspec.server.api.responses import ResponsesBody
from pyspec.server.api.schema import (
    Body,
    ChatBody,
    DetokenizeBody,
    InfillBody,
    NativeBody,
    TemplateBody,
    TextBody,
    TokenizeBody,
    validate,
)
from pyspec.server.api.slots import SlotFileBody, act_on_slot
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import ClientGone, on_gone, parse_object
from pyspec.server.http.envelope import JSON, error_body, on_bug, on_error, on_http_error
from pyspec.server.http.gate import LOCAL_ORIGIN, Cors, Gate
from pyspec.server.metrics import EngineCollector
from pyspec.server.models.router import Router
from pyspec.server.page import page
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings

ANTHROPIC = "anthropic-version"  # header of Anthropic's clients


def create_app(served: EngineLike | Router, settings: ServerSettings) -> Starlette:
    """An ASGI application that serves an engine, or several models. Its `state.service` is the live Service or Router."""
    service = served if isinstance(served, Router) else Service(served, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.shut_down()

    app = Starlette(
        routes=_routes(service),
        lifespan=lifespan,
        middleware=[_cors(settings), Middleware(Gate, settings=settings)],
        exception_handlers={
            PyspecError: on_error,
            HTTPException: on_http_error,
            ClientGone: on_gone,
            Exception: on_bug,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _cors(settings: ServerSettings) -> Middleware:
    origins = frozenset(settings.cors_origins)

    def is_known(origin: str) -> bool:
        return bool({"*", origin} & origins or re.fullmatch(LOCAL_ORIGIN, origin))

    return Middleware(Cors, is_known=is_known)


def _routes(service: Service | Router) -> list[BaseRoute]:
    """The routes of one service, or of several models. Handlers get it with each request."""
    return [
        *(
            Route(path, partial(one.handler, service), methods=one.methods)
            for one in (*([get("/", page)] if service.settings.page else ()), *endpoints_of(service))
            for path in one.paths
        ),
        *routes_not_here(),
    ]


def endpoints_of(service: Service | Router) -> tuple[Endpoint, ...]:
    """The endpoints of one model; with several, first those of their server, then those of each, which find its service."""
    if isinstance(service, Service):
        return ENDPOINTS
    own = {path for one in ROUTER_ENDPOINTS for path in one.paths}
    others = (one for one in ENDPOINTS if one.paths[0] not in own)
    return (*ROUTER_ENDPOINTS, *(replace(one, handler=endpoint_of(one)) for one in others))


async def _health(service: Service, request: Request) -> Response:
    _check_alive(service)
    # requests are accepted while it recovers
    view: dict[str, object] = {"status": service.engine.state()}
    if rows := service.engine.replicas(counts=False):
        view["replicas"] = [{"replica": row.replica, "state": row.state} for row in rows]
    return JSON(view)


async def _ping(service: Service, request: Request) -> Response:
    _check_alive(service)
    return Response(status_code=200)


def _check_alive(service: Service) -> None:
    if not service.engine.alive():
        raise Unavailable("the model is not ready: it is loading or its engine has stopped")


async def _ready(service: Service, request: Request) -> Response:
    is_ready, view = views.ready_view(service, await service.in_thread(service.engine.metrics))
    failure = Unavailable(f"the server is {view['status']}")
    body = view if is_ready else view | error_body(failure)
    return JSON(body, status_code=200 if is_ready else 503)


async def _models(service: Service, request: Request) -> Response:
    is_anthropic = ANTHROPIC in request.headers
    if is_anthropic:
        return JSON(views.anthropic_models(service.names[:1], service.started))
    return JSON(views.models_view(service))


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name not in service.names:
        raise NotFound(f"no model {name[:80]!r} here; there is {service.model}")
    is_anthropic = ANTHROPIC in request.headers
    if is_anthropic:
        return JSON(views.anthropic_model(service.model, service.started))
    return JSON(views.model_view(service))


async def _props(service: Service, request: Request) -> Response:
    if not service.settings.props:
        raise SwitchedOff("/props is switched off; start the server without --no-props")
    return JSON(views.props_view(service))


async def _slots(service: Service, request: Request) -> Response:
    if not service.settings.slots:
        raise SwitchedOff("/slots is switched off; start the server with --slots")
    rows = await service.in_thread(service.engine.slots)
    may_fail = request.query_params.get("fail_on_no_slot") == "1"
    if may_fail and all(row.is_processing for row in rows):
        raise Unavailable(f"all {len(rows)} slots are busy")
    salt = service.salt_of(service.client_of(request))
    rows = [row if row.cache_salt in ("", salt) else views.of_another(row) for row in rows]
    return JSON([views.slot_view(row, service.engine.info) for row in rows])


async def _metrics(service: Service, request: Request) -> Response:
    if not service.settings.metrics:
        raise SwitchedOff("/metrics is switched off; start the server with --metrics")
    collector = EngineCollector(service.engine, service.latencies)
    return await scraped(service, request, collector)


async def _openapi(service: Service, request: Request) -> Response:
    return JSON(await service.in_thread(_document, type(service)))


@cache
def _document(kind: type[Service | Router]) -> dict[str, Any]:
    return document((*ROUTER_ENDPOINTS, *ENDPOINTS) if kind is Router else ENDPOINTS)


async def _version(service: Service | Router, request: Request) -> Response:
    return JSON({"version": pyspec.__version__})


def _shown(view: Callable[[Service, Metrics], Any]) -> Handler:
    """The handler of a view of the engine's metrics."""

    async def show(service: Service, request: Request) -> Response:
        return JSON(await service.in_thread(lambda: view(service, service.engine.metrics())))

    return show


def _worked(work: Callable[[Service, bytes], object]) -> Handler:
    """A handler that runs `work` on the body in a text thread and answers with its result."""

    async def handle(service: Service, request: Request) -> Response:
        return JSON(await service.on_body(request, work))

    return handle


def _tokenize(service: Service, raw: bytes) -> object:
    tokenizer = service.engine.tokenizer
    body = service.checked(TokenizeBody, raw)
    ids = mixed_ids(
        tokenizer,
        body.content,
        add_special=bool(body.add_special),
        parse_special=body.parse_special is not False,
    )
    if not body.with_pieces:
        return {"tokens": ids}
    pieces = [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids]
    return {"tokens": pieces}


def _piece(raw: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not valid text on their own."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def _detokenize(service: Service, raw: bytes) -> object:
    tokenizer = service.engine.tokenizer
    body = service.checked(DetokenizeBody, raw)
    check_ids(body.tokens, tokenizer.n_vocab)
    return {"content": tokenizer.decode(body.tokens, special=True)}


def _apply_template(service: Service, raw: bytes) -> object:
    value = as_read("chat", parse_object(raw, service.settings.limits), service.settings)
    refuse_unsupported(value)
    body = validate(TemplateBody, value)
    return {"prompt": chat_text(service.engine, body, service.settings, SentPictures(service.media))}


def _input_tokens(service: Service, raw: bytes, kind: Kind = "chat") -> object:
    return {
        "object": "response.input_tokens",
        "input_tokens": count_tokens(kind, raw, service.engine, service.settings, service.media),
    }


def _count_tokens(service: Service, raw: bytes) -> object:
    given = service.engine, service.settings, service.media
    return {"input_tokens": count_tokens("messages", raw, *given)}


_CHAT, _SLOT = "Answer a chat", "Save, restore or erase a slot's contents"
_COUNT = "Count the tokens of a chat"
SLOT_PARAMETERS = (
    {"name": "slot", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
    {
        "name": "action",
        "in": "query",
        "required": True,
        "schema": {"type": "string", "enum": ["save", "restore", "erase"]},
    },
)


def _generates(paths: str, kind: Kind, body: type[Body], about: str, *fields: str) -> Endpoint:
    return post(paths, partial(generate, kind=kind), body, about, *fields, streams=True)


# fmt: off
ENDPOINTS: tuple[Endpoint, ...] = (
    get("/health /v1/health", _health, "Is the engine alive", (503,)),
    get("/ready", _ready, "Would new work be served soon", (401, 503)),
    get("/v1/models /models", _models, "The model and its drafter"),
    get("/v1/models/{model:path}", _model),
    get("/props", _props, "Settings and model facts", (401, 501)),
    get("/slots", _slots, "The state of every slot", (401, 501, 503)),
    get("/metrics", _metrics, "Counters for Prometheus", (401, 501), content_type="text/plain"),
    get("/version", _version, "The version of pyspec (vLLM)", (401,)),
    get("/load", _shown(views.server_load_view), "Requests that run and wait (vLLM)", (401,)),
    get("/ping", _ping, "Is the engine alive (vLLM)", (503,), content_type="", methods=("GET", "POST")),
    get("/get_load", _shown(views.load_view), "Requests and tokens that are held (SGLang)", (401,)),
    get("/get_server_info /server_info", _shown(views.server_view), "Settings and rates (SGLang); /server_info, too", (401,)),
    get("/get_model_info /model_info", _shown(views.served_model_view), "The served model (SGLang); /model_info, too", (401,)),
    get("/openapi.json", _openapi, "This document", (401,)),
    get("/v1/stream", read_stream),
    get("/v1/stream", stop_stream, methods=("DELETE",)),
    get("/v1/streams/lookup", lookup_streams, methods=("POST",)),
    _generates("/v1/chat/completions /chat/completions", "chat", ChatBody, f"{_CHAT} (OpenAI)", "choices", "usage", "timings"),
    _generates("/v1/completions", "text", TextBody, "Continue a prompt (OpenAI)", "choices", "usage"),
    _generates("/completion /completions", "native", NativeBody, "Continue a prompt (llama-server)"),
    _generates("/infill", "infill", InfillBody, "Fill a gap in a text (llama-server)"),
    _generates("/v1/messages", "messages", MessagesBody, f"{_CHAT} (Anthropic)", "content", "stop_reason", "usage"),
    _generates("/v1/responses /responses", "responses", ResponsesBody, f"{_CHAT} (OpenAI's responses)", "id", "output", "usage"),
    post("/v1/chat/completions/input_tokens /chat/completions/input_tokens", _worked(_input_tokens), ChatBody, _COUNT, "input_tokens"),
    post("/v1/messages/count_tokens", _worked(_count_tokens), MessagesBody, f"{_COUNT} (Anthropic)", "input_tokens"),
    post("/v1/responses/input_tokens /responses/input_tokens", _worked(partial(_input_tokens, kind="responses")), ResponsesBody, f"{_COUNT} (OpenAI's responses)", "input_tokens"),
    post("/slots/{slot}", act_on_slot, SlotFileBody, _SLOT, "id_slot", parameters=SLOT_PARAMETERS),
    post("/tokenize", _worked(_tokenize), TokenizeBody, "Text to token ids", "tokens"),
    post("/detokenize", _worked(_detokenize), DetokenizeBody, "Token ids to text", "content"),
    post("/apply-template", _worked(_apply_template), TemplateBody, "Render a chat to its prompt", "prompt"),
)
# fmt: on
