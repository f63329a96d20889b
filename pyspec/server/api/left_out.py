"""What only OpenAI's or Anthropic's own servers run or can read: left out of the prompt, as llama-server does, with a line in the log for each kind.

Agents send such tools with every request, and send back what came of them. A choice that insists on one is refused where it is read.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

MOST_LOGGED = 200  # kinds: clients choose their names
ITEMS = frozenset(
    {"item_reference", "compaction", "compaction_summary", "compaction_trigger", "context_compaction"}
    | {"additional_tools", "ghost_snapshot", "tool_search_output", "program", "program_output"}
)
ITEM_ENDS = ("_call", "_call_output")
BLOCKS = frozenset(
    {"server_tool_use", "mcp_tool_use", "tool_reference", "container_upload", "compaction", "redacted_thinking"}
)
BLOCK_END = "_tool_result"

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
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == own:
        return False
    tell("tools", kind)
    return True


def is_foreign_item(item: dict[str, Any]) -> bool:
    """Whether an item of a response's input is of such a kind: a call that another server ran, what came of it, or a name for something stored."""
    kind = item.get("type")
    if not isinstance(kind, str) or "role" in item:
        return False
    if kind not in ITEMS and not kind.endswith(ITEM_ENDS) and not kind.startswith("mcp_"):
        return False
    tell("input items", kind)
    return True


def is_foreign_block(kind: str) -> bool:
    """Whether a block of a message of Anthropic's is of such a kind."""
    if kind not in BLOCKS and not kind.endswith(BLOCK_END):
        return False
    tell("blocks", kind)
    return True
