"""What only other services run or can read: left out, as llama-server does, with a line in the log for each kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

MOST_LOGGED = 200  # kinds: clients choose their names

_logged: set[str] = set()


def tell(what: str, kind: str) -> None:
    """Log once that things of this kind are left out."""
    line = f"{what} of type {kind[:60]!r}"
    if line not in _logged and len(_logged) < MOST_LOGGED:
        _logged.add(line)
        log.warning("%s are left out: only the service that they are made for knows them", line)


def own_tools(tools: Any, own: str) -> Any:
    """The tools whose type is `own`, or that have none. Shapes that are wrong are left for others to refuse."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_foreign(tool, own)]


def _is_foreign(tool: Any, own: str) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind == own:
        return False
    tell("tools", kind)
    return True
