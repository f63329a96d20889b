"""The generation routes, one path for all with a format per API, and the streams that they keep."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyspec.errors import PyspecError, RequestError
from pyspec.server.api.answers import Answer
from pyspec.server.api.anthropic_answer import MessagesAnswer
from pyspec.server.api.constrained import NotCompiled
from pyspec.server.api.native import NativeAnswer
from pyspec.server.api.openai import ChatAnswer, TextAnswer
from pyspec.server.api.prepared import Kind, PreparedBody, prepare
from pyspec.server.api.responses_answer import ResponsesAnswer
from pyspec.server.api.schema import Body
from pyspec.server.bridge import Submission
from pyspec.server.http.envelope import JSON
from pyspec.server.models.router import Router
from pyspec.server.resume import ReplayStream, SessionKey, owner_of, session_key
from pyspec.server.service import Service
from pyspec.server.stream import EventStream, chunks, gather, while_connected
from pyspec.text.tokenizer import Tokenizer

ANSWERS: dict[Kind, Callable[[PreparedBody, str, Tokenizer], Answer]] = {
    "chat": ChatAnswer,
    "text": TextAnswer,
    "native": NativeAnswer,
    "infill": NativeAnswer,
    "messages": MessagesAnswer,
    "responses": ResponsesAnswer,
}


async def generate(service: Service, request: Request, *, kind: Kind) -> ASGIApp:
    """One generation route."""
    service.check_ready()
    raw = await service.body(request)
    client = service.client_of(request)
    conversation = request.headers.get("x-conversation-id", "")
    key = session_key(conversation, request.headers, service.settings) if conversation else None
    with service.admitted(client):
        return await while_connected(_answer(service, kind, raw, key, client), request.receive)


async def _answer(
    service: Service,
    kind: Kind,
    raw: bytes,
    key: SessionKey | None,
    client: str,
) -> ASGIApp:
    prepared = await _prepared(service, kind, raw, client)
    submission = await service.start(prepared, client)
    answer = ANSWERS[prepared.kind](prepared, service.model, service.engine.tokenizer)
    headers = _headers(prepared)
    if not prepared.stream:
        return await _complete(service, submission, answer, headers)
    source = chunks(submission, prepared.ping_s, answer)
    if key is not None:
        return _resumable(service, submission, source, key, headers)
    return EventStream(submission, source, partial(service.end, submission), answer, headers)


async def _prepared(service: Service, kind: Kind, raw: bytes, client: str) -> PreparedBody:
    """The prepared body. A new grammar is compiled in a thread of its own, so that other clients' texts do not wait for it."""
    given = kind, raw, service.engine, service.settings, service.media
    has_pictures = service.has_pictures(raw)
    try:
        return await service.text(
            prepare, *given, False, n_byte=len(raw), client=client, has_pictures=has_pictures
        )
    except NotCompiled:
        return await service.text(prepare, *given, True, compiles=True, client=client)


def _resumable(
    service: Service,
    submission: Submission,
    source: AsyncGenerator[bytes, None],
    key: SessionKey,
    headers: dict[str, str],
) -> ASGIApp:
    """A stream that continues after the client leaves."""
    try:
        session = service.sessions.begin(key, source, lambda: service.end(submission))
    except PyspecError:
        service.end(submission)
        raise
    return ReplayStream(session, 0, headers)


async def _complete(
    service: Service, submission: Submission, answer: Answer, headers: dict[str, str]
) -> Response:
    try:
        await gather(submission, answer, service.settings.limits.total_s)
    finally:
        service.end(submission)
    return JSON(answer.complete(), headers=headers)


def _headers(prepared: PreparedBody) -> dict[str, str]:
    """Headers that report changes to the prompt which the client did not request."""
    return {"X-Pyspec-Moved-Lines": str(prepared.n_moved)} if prepared.n_moved else {}


# -- streams that outlive their connection, with llama-server's parameters and answers ------------------------------------


class LookupBody(Body):
    """The conversations to look up."""

    conversation_ids: Annotated[list[str], Field(max_length=1024, fail_fast=True)]


def _session_of(service: Service | Router, request: Request) -> SessionKey:
    conversation = request.query_params.get("conv_id", "")
    if not conversation:
        raise RequestError("conv_id is missing; want /v1/stream?conv_id=ID")
    return session_key(conversation, request.headers, service.settings)


async def read_stream(service: Service | Router, request: Request) -> ASGIApp:
    """The stream of a conversation from byte `from` on, followed live."""
    at = request.query_params.get("from", "") or "0"
    if not re.fullmatch(r"[0-9]{1,15}", at):
        raise RequestError(f"from: {at[:40]!r} is not a byte number")
    session = service.sessions.get(_session_of(service, request), int(at))
    return ReplayStream(session, int(at))


async def stop_stream(service: Service | Router, request: Request) -> Response:
    """End a conversation's generation and delete its stream; 204 also if there is none."""
    service.sessions.stop(_session_of(service, request))
    return Response(status_code=204)


async def lookup_streams(service: Service, request: Request) -> Response:
    """The streams of the named conversations."""
    body = await service.on_body(request, lambda service, raw: service.checked(LookupBody, raw))
    return kept(service, request, body)


def kept(service: Service | Router, request: Request, body: LookupBody) -> Response:
    """Rows of those streams that the request's key may read."""
    owner = owner_of(request.headers, service.settings)
    return JSON(service.sessions.rows(owner, list(dict.fromkeys(body.conversation_ids))))
