"""Paths of other servers that pyspec does not serve: a 400 with the reason instead of a bare 404."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyspec.errors import NotSupported

_REASONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOT_HERE: dict[str, str] = {path: why for why, paths in _REASONS.items() for path in paths}


def routes_not_here() -> list[Route]:
    """A route for each of these paths, and for writing to `/props`."""
    both, read_only = ["GET", "POST"], "it is read-only; use the server's flags"
    routes = [Route(path, partial(_refuse, path, why), methods=both) for path, why in NOT_HERE.items()]
    return [*routes, Route("/props", partial(_refuse, "/props", read_only), methods=["POST"])]


async def _refuse(path: str, why: str, request: Request) -> Response:
    raise NotSupported(f"{request.method} {path} is not supported: {why}")
