"""The application: every path and its handler.

`create_app` may be mounted in another ASGI application; `pyspec.server.http.serve.run` serves it on a port.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from pyspec.errors import NotFound, PyspecError, SwitchedOff, Unavailable
from pyspec.server.api import views
from pyspec.server.api.for_routers import router_routes
from pyspec.server.api.generate import generation
from pyspec.server.api.openapi import document
from pyspec.server.api.out_of_scope import routes_not_here
from pyspec.server.api.prepared import Kind, as_read, count_tokens
from pyspec.server.api.prompts import chat_text, check_ids, mixed_ids
from pyspec.server.api.resumed import lookup_streams, read_stream, stop_stream
from pyspec.server.api.schema import DetokenizeBody, TemplateBody, TokenizeBody, validate
from pyspec.server.api.slots import slot_action
from pyspec.server.api.unsupported import refuse_unsupported
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import ClientGone, on_gone, parse_object
from pyspec.server.http.envelope import JSON, error_body, on_bug, on_error, on_http_error
from pyspec.server.http.gate import LOCAL_ORIGIN, Cors, Gate
from pyspec.server.metrics import EngineCollector, exposition
from pyspec.server.page import page
from pyspec.server.service import Service
from pyspec.server.settings import ServerSettings
from pyspec.server.stream import while_connected

ANTHROPIC = "anthropic-version"  # header of Anthropic's clients

Handler = Callable[[Request], Awaitable[ASGIApp]]


def create_app(engine: EngineLike, settings: ServerSettings) -> Starlette:
    """An ASGI application that serves `engine`. Its `state.service` is the live Service."""
    service = Service(engine, settings)

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


def _routes(service: Service) -> list[BaseRoute]:
    gets: dict[str, Handler] = {
        **({"/": page} if service.settings.page else {}),
        "/health": _health(service),
        "/v1/health": _health(service),
        "/ready": _ready(service),
        "/models": _models(service),
        "/v1/models": _models(service),
        "/v1/models/{model:path}": _model(service),
        "/props": _props(service),
        "/slots": _slots(service),
        "/metrics": _metrics(service),
        "/v1/stream": read_stream(service),
        "/openapi.json": _openapi(),
    }
    posts: dict[str, Handler] = {
        "/v1/chat/completions": generation(service, "chat"),
        "/chat/completions": generation(service, "chat"),
        "/v1/completions": generation(service, "text"),
        "/completion": generation(service, "native"),
        "/completions": generation(service, "native"),
        "/infill": generation(service, "infill"),
        "/v1/messages": generation(service, "messages"),
        "/v1/messages/count_tokens": _with_body(service, _count_tokens),
        "/v1/responses": generation(service, "responses"),
        "/responses": generation(service, "responses"),
        "/v1/responses/input_tokens": _with_body(service, partial(_input_tokens, kind="responses")),
        "/responses/input_tokens": _with_body(service, partial(_input_tokens, kind="responses")),
        "/v1/chat/completions/input_tokens": _with_body(service, _input_tokens),
        "/chat/completions/input_tokens": _with_body(service, _input_tokens),
        "/slots/{slot}": slot_action(service),
        "/v1/streams/lookup": lookup_streams(service),
        "/tokenize": _with_body(service, _tokenize),
        "/detokenize": _with_body(service, _detokenize),
        "/apply-template": _with_body(service, _apply_template),
    }
    return [
        *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        Route("/v1/stream", stop_stream(service), methods=["DELETE"]),
        *router_routes(service),
        *routes_not_here(),
    ]


def _health(service: Service) -> Handler:
    async def health(request: Request) -> Response:
        if not service.engine.alive():
            raise Unavailable("the model is not ready: it is loading or its engine has stopped")
        view: dict[str, object] = {
            "status": service.engine.state()
        }  # requests are accepted while it recovers
        if rows := service.engine.replicas(counts=False):
            view["replicas"] = [{"replica": row.replica, "state": row.state} for row in rows]
        return JSON(view)

    return health


def _ready(service: Service) -> Handler:
    async def ready(request: Request) -> Response:
        is_ready, view = views.ready_view(service, await service.in_thread(service.engine.metrics))
        failure = Unavailable(f"the server is {view['status']}")
        body = view if is_ready else view | error_body(failure)
        return JSON(body, status_code=200 if is_ready else 503)

    return ready


def _models(service: Service) -> Handler:
    async def models(request: Request) -> Response:
        is_anthropic = ANTHROPIC in request.headers
        return JSON((views.anthropic_models_view if is_anthropic else views.models_view)(service))

    return models


def _model(service: Service) -> Handler:
    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name not in service.names:
            raise NotFound(f"no model {name[:80]!r} here; there is {service.model}")
        is_anthropic = ANTHROPIC in request.headers
        return JSON((views.anthropic_model_view if is_anthropic else views.model_view)(service))

    return model


def _props(service: Service) -> Handler:
    async def props(request: Request) -> Response:
        if not service.settings.props:
            raise SwitchedOff("/props is switched off; start the server without --no-props")
        return JSON(views.props_view(service))

    return props


def _slots(service: Service) -> Handler:
    async def slots(request: Request) -> Response:
        if not service.settings.slots:
            raise SwitchedOff("/slots is switched off; start the server with --slots")
        rows = await service.in_thread(service.engine.slots)
        may_fail = request.query_params.get("fail_on_no_slot") == "1"
        if may_fail and all(row.is_processing for row in rows):
            raise Unavailable(f"all {len(rows)} slots are busy")
        salt = service.salt_of(service.client_of(request))
        rows = [row if row.cache_salt in ("", salt) else views.of_another(row) for row in rows]
        return JSON([views.slot_view(row, service.engine.info) for row in rows])

    return slots


def _metrics(service: Service) -> Handler:
    engine = service.engine
    given = engine.metrics, engine.slots, service.latencies, engine.replicas
    collector = EngineCollector(*given, engine.info.page_size)

    async def metrics(request: Request) -> Response:
        if not service.settings.metrics:
            raise SwitchedOff("/metrics is switched off; start the server with --metrics")
        accept = request.headers.get("accept", "")
        body, content_type = await service.in_thread(exposition, collector, accept)
        started = {"Process-Start-Time-Unix": str(int(service.started))}
        return Response(body, media_type=None, headers={"Content-Type": content_type, **started})

    return metrics


def _openapi() -> Handler:
    value = document()

    async def openapi(request: Request) -> Response:
        return JSON(value)

    return openapi


def _with_body(service: Service, work: Callable[[Service, bytes], object]) -> Handler:
    """A handler that runs `work` on the body in a text thread and answers with its result."""

    async def handle(request: Request) -> Response:
        raw = await service.body(request)
        client = service.client_of(request)
        with service.admitted(client):
            done = service.text(work, service, raw, n_byte=len(raw), client=client)
            return JSON(await while_connected(done, request.receive))

    return handle


def _tokenize(service: Service, raw: bytes) -> object:
    tokenizer = service.engine.tokenizer
    body = validate(TokenizeBody, parse_object(raw, service.settings.limits))
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
    body = validate(DetokenizeBody, parse_object(raw, service.settings.limits))
    check_ids(body.tokens, tokenizer.n_vocab)
    return {"content": tokenizer.decode(body.tokens, special=True)}


def _apply_template(service: Service, raw: bytes) -> object:
    value = as_read("chat", parse_object(raw, service.settings.limits), service.settings)
    refuse_unsupported(value)
    body = validate(TemplateBody, value)
    return {"prompt": chat_text(service.engine, body, service.settings)}


def _input_tokens(service: Service, raw: bytes, kind: Kind = "chat") -> object:
    return {
        "object": "response.input_tokens",
        "input_tokens": count_tokens(kind, raw, service.engine, service.settings),
    }


def _count_tokens(service: Service, raw: bytes) -> object:
    return {"input_tokens": count_tokens("messages", raw, service.engine, service.settings)}
