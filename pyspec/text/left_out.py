"""Leaves out tools and items that only other services can run or read, as llama-server does, and logs each kind once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

NO_IMAGE = "[An image is left out here: this model reads text.]\n"
"""What stands for a tool's image: refusing it would end every later turn of a conversation."""
MOST_LOGGED = 200  # a limit, because clients choose the names of kinds

_logged: set[str] = set()


def log_left_out(what: str, kind: str) -> None:
    """Log once that entries of this kind are left out."""
    line = f"{what} of type {kind[:60]!r}"
    if line not in _logged and len(_logged) < MOST_LOGGED:
        _logged.add(line)
        log.warning("%s are left out: only the service that they are made for knows them", line)


def own_tools(tools: Any, own: str) -> Any:
    """The tools of type `own`, and those without a type. A value of a wrong shape is returned as it is; a later check refuses it."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_foreign(tool, own)]


def _is_foreign(tool: Any, own: str) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind == own:
        return False
    log_left_out("tools", kind)
    return True
