"""The three generation routes: one path, three formats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pyspec.server.api.answers import Answer
from pyspec.server.api.ask import Ask, Kind, prepare
from pyspec.server.api.native import NativeAnswer
from pyspec.server.api.openai import ChatAnswer, TextAnswer
from pyspec.server.bridge import Submission
from pyspec.server.http.body import read_body
from pyspec.server.http.envelope import JSON
from pyspec.server.service import Service
from pyspec.server.stream import EventStream, chunks, gather, while_connected

Handler = Callable[[Request], Awaitable[ASGIApp]]


def generation(service: Service, kind: Kind) -> Handler:
    """The handler of one generation route."""

    async def handle(request: Request) -> ASGIApp:
        service.check_ready()
        with service.admitted():
            raw = await read_body(request, service.settings.limits)
            return await while_connected(_answer(service, kind, raw), request.receive)

    return handle


async def _answer(service: Service, kind: Kind, raw: bytes) -> ASGIApp:
    ask = await service.text(prepare, kind, raw, service.engine, service.settings)
    submission = await service.start(ask)
    answer = _format(ask, service)
    if ask.stream:
        return EventStream(submission, chunks(submission, ask, answer), lambda: service.end(submission))
    return await _whole(service, submission, ask, answer)


async def _whole(service: Service, submission: Submission, ask: Ask, answer: Answer) -> Response:
    try:
        choices = await gather(submission, ask, service.settings.limits.total_s)
    finally:
        service.end(submission)
    return JSON(answer.whole(choices))


def _format(ask: Ask, service: Service) -> Answer:
    tokenizer = service.engine.tokenizer
    if ask.kind == "chat":
        return ChatAnswer(ask, service.model, tokenizer)
    if ask.kind == "text":
        return TextAnswer(ask, service.model, tokenizer)
    return NativeAnswer(ask, service.model, tokenizer)
