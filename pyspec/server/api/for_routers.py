"""Endpoints that routers and probes of vLLM and SGLang call: version, load and served model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import pyspec
from pyspec.errors import Unavailable
from pyspec.request import Metrics
from pyspec.server.http.envelope import JSON
from pyspec.server.service import Service

View = Callable[[Service, Metrics], Any]


def router_routes(service: Service) -> list[Route]:
    """`/version`, `/load` and `/ping` as in vLLM, the rest as in SGLang."""
    views: dict[str, View] = {
        "/version": lambda service, metrics: {"version": pyspec.__version__},
        "/load": lambda service, metrics: {
            "server_load": metrics.requests_processing + metrics.requests_queued
        },
        "/get_load": _load_view,
        "/get_server_info": _server_view,
        "/server_info": _server_view,
        "/get_model_info": _model_view,
        "/model_info": _model_view,
    }
    return [
        *(Route(path, _shown(service, view), methods=["GET"]) for path, view in views.items()),
        Route("/ping", _ping(service), methods=["GET", "POST"]),
    ]


def _shown(service: Service, view: View) -> Callable[[Request], Awaitable[Response]]:
    async def show(request: Request) -> Response:
        return JSON(await service.in_thread(lambda: view(service, service.engine.metrics())))

    return show


def _ping(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def ping(request: Request) -> Response:
        if not service.engine.alive():
            raise Unavailable("the model is not ready: it is loading or its engine has stopped")
        return Response(status_code=200)

    return ping


def _load_view(service: Service, metrics: Metrics) -> list[dict[str, Any]]:
    """One row: there is one queue of requests, even if several devices share the model."""
    n_token = sum(slot.n_past for slot in service.engine.slots() if slot.is_processing)
    n = metrics.requests_processing
    n_waiting = metrics.requests_queued
    row = {"dp_rank": 0, "num_reqs": n + n_waiting, "num_waiting_reqs": n_waiting}
    return [row | {"num_tokens": n_token}]


def _model_view(service: Service, metrics: Metrics) -> dict[str, Any]:
    info = service.engine.info
    return {
        "model_path": info.model_path,
        "tokenizer_path": info.model_path,
        "served_model_name": service.model,
        "model_type": info.arch,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _server_view(service: Service, metrics: Metrics) -> dict[str, Any]:
    """SGLang's names for equal settings; drafting under pyspec's names."""
    info, settings = service.engine.info, service.settings
    return _model_view(service, metrics) | {
        "version": pyspec.__version__,
        "device": info.device,
        "context_length": info.n_ctx,
        "vocab_size": info.n_vocab,
        "max_running_requests": info.n_slot,
        "dp_size": 1,
        "speculative_algorithm": info.drafter,
        "speculative_num_draft_tokens": info.n_draft_max,
        "tool_call_parser": settings.tool_call_parser,
        "reasoning_format": settings.reasoning_format,
        "enable_metrics": settings.metrics,
        "internal_states": _load_view(service, metrics),
    }
