"""What a chat template can write, asked of itself: it renders a small chat, and what it was given stands in the text or does not.

Each question is asked once, when a chat first needs the answer. A template that fails on plain chats, too, tells nothing: it is taken
to be able, so its chats go to it as they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

HEAD = ("system", "developer")
"""Roles whose messages say how to answer."""

ARGUMENT, WORD = "pyspec_argument", "pyspecprobe"
FUNCTION, RESULT = "pyspec_function", "pyspec_result"
CALL_ID = "call00001"  # nine letters and digits: some templates take no other
DEVELOPER = re.compile(r"""["']developer["']""")
READS_PARTS = re.compile(r"""\btext\b""")

Chat = list[dict[str, Any]]
Render = Callable[[Chat, Sequence[Mapping[str, Any]] | None], str]
"""The text of a chat with these tools; "" if the template refuses it or fails. Raises Unavailable if it could not be asked."""


class Abilities:
    """Of one template. Safe to use from several threads: at worst a question is asked twice."""

    def __init__(self, source: str, render: Render) -> None:
        self._source, self._render = source, render
        self._shown: dict[tuple[str, ...], bool] = {}

    @cached_property
    def takes_system(self) -> bool:
        """A system message at the beginning is written out."""
        return self._shows("system", "user") or not self._renders_plain

    @cached_property
    def knows_developer(self) -> bool:
        """The role is one of its own: it names it, and writes such a message out."""
        return bool(DEVELOPER.search(self._source)) and self._shows("developer", "user")

    @cached_property
    def takes_both(self) -> bool:
        """What the developer says behind a system message is written out, too."""
        return self._shows("system", "developer", "user")

    def takes_late(self, role: str) -> bool:
        """Messages of a role of HEAD are written out wherever they stand."""
        head = [role] if role == "developer" or self.takes_system else []
        turns = ("user", role, "assistant", role, "user", "assistant", "user", role)
        return self._shows(*head, *turns) or not self._renders_plain

    def takes_alone(self, role: str) -> bool:
        """A message of a role of HEAD is written out where the user says nothing."""
        return self._shows(role) or not self._renders_plain

    @cached_property
    def takes_parts_only(self) -> bool:
        """Content is written out as a list of parts, and not as text."""
        if not READS_PARTS.search(self._source) or self._renders_plain:
            return False
        parts = [{"type": "text", "text": WORD}]
        return WORD in self._render([{"role": "user", "content": parts}], None)

    @cached_property
    def takes_objects(self) -> bool:
        """Arguments of calls that are an object come out as JSON, or as names and values."""
        text = self._called({ARGUMENT: "value"})
        return ARGUMENT in text and f"'{ARGUMENT}'" not in text  # quotes like these are Python's

    @cached_property
    def takes_texts(self) -> bool:
        """Arguments of calls that are a text come out."""
        return ARGUMENT in self._called(ARGUMENT)

    @cached_property
    def needs_properties(self) -> bool:
        """It fails on a tool whose parameters have no properties."""
        return not self._render([{"role": "user", "content": WORD}], [tool({"type": "object"})])

    @cached_property
    def shows_tools(self) -> bool:
        """Tools are written out."""
        tools = [tool({"type": "object", "properties": {}})]
        return FUNCTION in self._written([{"role": "user", "content": WORD}], tools)

    @cached_property
    def hides_tools(self) -> bool:
        """A chat with tools is written out without them."""
        tools = [tool({"type": "object", "properties": {}})]
        text = self._written([{"role": "user", "content": WORD}], tools)
        return WORD in text.lower() and FUNCTION not in text

    @cached_property
    def shows_calls(self) -> bool:
        """Calls of a history are written out, and what they returned."""
        text = self._with_id(CALL_ID)
        return FUNCTION in text and RESULT in text

    @cached_property
    def needs_turns(self) -> bool:
        """It refuses two messages of the user, one behind the other."""
        user = {"role": "user", "content": WORD}
        return not self._written([user, user]) and self._renders_plain

    @cached_property
    def takes_user_behind_result(self) -> bool:
        """What the user says may stand behind what a tool returned."""
        return bool(self._with_id(CALL_ID, {"role": "user", "content": WORD})) or not self._with_id(CALL_ID)

    @cached_property
    def takes_long_ids(self) -> bool:
        """Ids of calls may be of another form than nine letters and digits."""
        return bool(self._with_id("call_" + 2 * CALL_ID)) or not self._with_id(CALL_ID)

    @cached_property
    def takes_no_ids(self) -> bool:
        """Calls need no ids."""
        return bool(self._with_id(None)) or not self._with_id(CALL_ID)

    @cached_property
    def _renders_plain(self) -> bool:
        """The plainest chat is written out: what is missing from others is missing for a reason of theirs."""
        return WORD in self._render([{"role": "user", "content": WORD}], None).lower()

    def _with_id(self, id_: str | None, *behind: dict[str, Any]) -> str:
        """A chat with a call and its result by this id, or by none, and these messages behind them."""
        result = {"role": "tool", "name": FUNCTION, "content": RESULT} | ({"tool_call_id": id_} if id_ else {})
        return self._called({} if self.takes_objects else "{}", result, *behind, id_=id_)

    def _called(self, arguments: Any, *behind: dict[str, Any], id_: str | None = CALL_ID) -> str:
        """A chat with a call, and these messages behind it."""
        function = {"name": FUNCTION, "arguments": arguments}
        call = {"type": "function", "function": function} | ({"id": id_} if id_ else {})
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._written([{"role": "user", "content": "hello"}, turn, *behind])

    def _written(self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A chat with its content as the template reads it."""
        return self._render(in_parts(chat) if self.takes_parts_only else chat, tools)

    def _shows(self, *roles: str) -> bool:
        """Whether of a chat of these roles each message of HEAD is written out."""
        if roles not in self._shown:
            chat = [{"role": role, "content": f"{WORD}{i}x"} for i, role in enumerate(roles)]
            text = self._render(chat, None).lower()
            self._shown[roles] = all(message["content"] in text for message in chat if message["role"] in HEAD)
        return self._shown[roles]


def in_parts(chat: Chat) -> Chat:
    """The chat with its texts as lists of parts."""
    return [m | {"content": [{"type": "text", "text": m["content"]}] if m["content"] else []} for m in chat]


def tool(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with these parameters."""
    function = {"name": FUNCTION, "description": "Probes.", "parameters": parameters}
    return {"type": "function", "function": function}
