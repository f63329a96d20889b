"""`GET` and `DELETE /v1/stream`, `POST /v1/streams/lookup`: stored streams, with llama-server's parameters and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyspec.errors import RequestError
from pyspec.server.api.schema import Body, validate
from pyspec.server.http.body import parse_object
from pyspec.server.http.envelope import JSON
from pyspec.server.resume import ReplayStream, SessionKey, owner_of, session_key
from pyspec.server.service import Service

Handler = Callable[[Request], Awaitable[ASGIApp]]


class LookupBody(Body):
    """The conversations to look up."""

    conversation_ids: Annotated[list[str], Field(max_length=1024, fail_fast=True)]


def _lookup(raw: bytes, service: Service) -> LookupBody:
    return validate(LookupBody, parse_object(raw, service.settings.limits))


def _session_of(service: Service, request: Request) -> SessionKey:
    conversation = request.query_params.get("conv_id", "")
    if not conversation:
        raise RequestError("conv_id is missing; want /v1/stream?conv_id=ID")
    return session_key(conversation, request.headers, service.settings)


def read_stream(service: Service) -> Handler:
    """The stream of a conversation from byte `from` on, followed live."""

    async def handle(request: Request) -> ASGIApp:
        at = request.query_params.get("from", "") or "0"
        if not re.fullmatch(r"[0-9]{1,15}", at):
            raise RequestError(f"from: {at[:40]!r} is not a byte number")
        session = service.sessions.get(_session_of(service, request), int(at))
        return ReplayStream(session, int(at))

    return handle


def stop_stream(service: Service) -> Handler:
    """End a conversation's generation and delete its stream; 204 also if there is none."""

    async def handle(request: Request) -> Response:
        service.sessions.stop(_session_of(service, request))
        return Response(status_code=204)

    return handle


def lookup_streams(service: Service) -> Handler:
    """The streams of the named conversations."""

    async def handle(request: Request) -> Response:
        raw, client = await service.body(request), service.client_of(request)
        with service.admitted(client):
            body = await service.text(_lookup, raw, service, n_byte=len(raw), client=client)
        owner = owner_of(request.headers, service.settings)
        return JSON(service.sessions.rows(owner, list(dict.fromkeys(body.conversation_ids))))

    return handle
