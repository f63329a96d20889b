"""What only OpenAI's or Anthropic's own servers run or can read: left out of the prompt, as such tools are (`text/left_out.py`).

Agents send such tools with every request, and send back what came of them. A choice that insists on one is refused where it is read.
"""

from __future__ import annotations

from typing import Any

from pyspec.text.left_out import tell

ITEMS = frozenset(
    {"item_reference", "compaction", "compaction_summary", "compaction_trigger", "context_compaction"}
    | {"additional_tools", "ghost_snapshot", "tool_search_output", "program", "program_output"}
)
ITEM_ENDS = ("_call", "_call_output")
BLOCKS = frozenset(
    {"server_tool_use", "mcp_tool_use", "tool_reference", "container_upload", "compaction", "redacted_thinking"}
)
BLOCK_END = "_tool_result"


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
