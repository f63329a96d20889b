"""Paths of other servers that pyspec does not serve: a 400 with the reason instead of a bare 404."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyspec.errors import NotSupported

_EMBEDDINGS = "embeddings are out of scope: pyspec generates text; run an embedding server beside it"
_RERANK = "reranking is out of scope: pyspec generates text; run a reranking server beside it"
_AUDIO = "audio is out of scope: pyspec reads and writes text"
_IMAGES = "images are out of scope: pyspec reads and writes text"
_OLLAMA = "Ollama's interface is not served; /v1/chat/completions and /v1/completions are"
_LORA = "LoRA adapters are out of scope; merge them into the model's file"
_ROUTER = "one server has one model; start one for each and put a router before them"
_JOBS = "files, batches and training are out of scope: requests are answered when they come"
_THREADS = "conversations are not stored; send them whole to /v1/responses or /v1/chat/completions"

NOT_HERE: dict[str, str] = {
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings", "/pooling", "/encode", "/api/embed"), _EMBEDDINGS),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank"), _RERANK),
    **dict.fromkeys(("/score", "/v1/score", "/classify", "/v1/moderations"), "classifying texts is out of scope"),
    **dict.fromkeys(
        ("/audio/transcriptions", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"), _AUDIO
    ),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"), _IMAGES),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/tags", "/api/show"), _OLLAMA),
    **dict.fromkeys(("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
    **dict.fromkeys(("/models/load", "/models/unload", "/models/sse"), _ROUTER),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/fine_tuning/jobs"), _JOBS),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/conversations"), _THREADS),
    "/v1/chat/completions/control": "a running answer cannot be changed; close its connection to cancel it",
    **dict.fromkeys(("/mcp", "/v1/mcp", "/cors-proxy"), "MCP is out of scope: clients call MCP servers"),
    "/v1/responses/{response}": "responses are not kept; a conversation is sent whole as input",
    "/tools": "built-in tools are out of scope; a client's own are given in `tools`",
}


def routes_not_here() -> list[Route]:
    """A route for each of these paths, and for writing to `/props`."""
    return [
        *(Route(path, _refusal(path, why), methods=["GET", "POST"]) for path, why in NOT_HERE.items()),
        Route("/props", _refusal("/props", "it is read-only; use the server's flags"), methods=["POST"]),
    ]


def _refusal(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotSupported(f"{request.method} {path} is not supported: {why}")

    return refuse
