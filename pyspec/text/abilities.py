"""Finds out which chats a template can write: it renders small chats and looks for their words in the text.

Each probe runs once, when a chat first needs its result. If the template fails even on plain chats, probes prove nothing. Such a
template counts as able, so it gets chats as they were sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any

HEAD = ("system", "developer")
"""Roles whose messages instruct the model."""

ARGUMENT, WORD = "pyspec_argument", "pyspecprobe"
FUNCTION, RESULT = "pyspec_function", "pyspec_result"
SECOND = "pyspec_second"
KIMI_SEP = "<|tool_call_argument_begin|>"
CALL_ID = "call00001"  # nine letters and digits: some templates accept no other form
DEVELOPER = re.compile(r"""["']developer["']""")
THINKING = re.compile(r"""\.thinking\b|["']thinking["']""")
READS_PARTS = re.compile(r"""\btext\b""")

Chat = list[dict[str, Any]]
PLAIN: Chat = [{"role": "user", "content": WORD}]
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
Render = Callable[[Chat, Sequence[Mapping[str, Any]] | None], str]
"""Renders a chat with these tools. Returns "" if the template refuses it or fails. Raises Unavailable if the sandbox got no time."""


class Abilities:
    """The abilities of one template. Safe to use from several threads: at worst a probe runs twice."""

    def __init__(self, source: str, render: Render) -> None:
        self._source, self._render = source, render
        self._shown: dict[tuple[str, ...], bool] = {}

    @cached_property
    def takes_system(self) -> bool:
        """True if the text shows a system message at the beginning."""
        return self._shows("system", "user") or not self._renders_plain

    @cached_property
    def knows_developer(self) -> bool:
        """True if the template names the role and shows such a message."""
        return bool(DEVELOPER.search(self._source)) and self._shows("developer", "user")

    @cached_property
    def reads_thinking(self) -> bool:
        """True if the template names reasoning of earlier answers `thinking`, and not `reasoning_content`."""
        return bool(THINKING.search(self._source)) and "reasoning_content" not in self._source

    @cached_property
    def takes_both(self) -> bool:
        """True if the text shows a developer message behind a system message, too."""
        return self._shows("system", "developer", "user")

    def takes_late(self, role: str) -> bool:
        """True if the text shows messages of this role, one of HEAD, at any place."""
        head = [role] if role == "developer" or self.takes_system else []
        turns = ("user", role, "assistant", role, "user", "assistant", "user", role)
        return self._shows(*head, *turns) or not self._renders_plain

    def takes_alone(self, role: str) -> bool:
        """True if the text shows a message of this role, one of HEAD, in a chat without a user message."""
        return self._shows(role) or not self._renders_plain

    @cached_property
    def takes_parts_only(self) -> bool:
        """True if the text shows content only as a list of parts."""
        if not READS_PARTS.search(self._source) or self._renders_plain:
            return False
        parts = [{"type": "text", "text": WORD}]
        return WORD in self._render([{"role": "user", "content": parts}], None)

    @cached_property
    def takes_objects(self) -> bool:
        """True if arguments that are an object appear as JSON, or as names and values."""
        text = self._called({ARGUMENT: "value"})
        return ARGUMENT in text and f"'{ARGUMENT}'" not in text  # Python's repr has such quotes

    @cached_property
    def takes_texts(self) -> bool:
        """True if arguments that are a text appear."""
        return ARGUMENT in self._called(ARGUMENT)

    @cached_property
    def needs_properties(self) -> bool:
        """True if the template fails on a tool whose parameters have no properties."""
        return not self._render(PLAIN, [tool({"type": "object"})])

    @cached_property
    def shows_tools(self) -> bool:
        """True if the text shows tools."""
        return FUNCTION in self._with_tool

    @cached_property
    def hides_tools(self) -> bool:
        """True if a chat with tools renders, but the text does not show the tools."""
        return WORD in self._with_tool.lower() and not self.shows_tools

    @cached_property
    def shows_calls(self) -> bool:
        """True if the text shows earlier calls and their results."""
        text = self._with_id(CALL_ID)
        return FUNCTION in text and RESULT in text

    @cached_property
    def takes_one_call(self) -> bool:
        """True if the template shows an answer's first call alone, or refuses answers with two."""
        arguments: Any = {} if self.takes_objects else "{}"
        calls = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
            for name, id_ in ((FUNCTION, CALL_ID), (SECOND, CALL_ID[::-1]))
        ]
        chat: Chat = [
            HELLO,
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": RESULT, "tool_call_id": call["id"]} for call in calls),
        ]
        if not self.shows_calls or SECOND in self._written(chat):
            return False
        return CALL_ID[::-1] not in self._written(chat[:-1])  # some templates write calls by their ids

    @cached_property
    def names_calls_by_id(self) -> bool:
        """True if the text shows a call's id in Kimi's form, and its name nowhere else."""
        if KIMI_SEP not in self._source:
            return False
        text = self._called({} if self.takes_objects else "{}")
        return CALL_ID in text and FUNCTION not in text

    @cached_property
    def takes_responses(self) -> bool:
        """True if results of calls stand in the message with the calls, as a list of names and responses."""
        if "tool_responses" not in self._source:
            return False
        result = {"name": FUNCTION, "response": RESULT}
        turn = {"role": "assistant", "content": "", "tool_responses": [result]}
        return RESULT in self._written([HELLO, turn])

    @cached_property
    def aside(self) -> tuple[str, str, str] | None:
        """Where a template that hides an answer's text beside a call, or the call beside it, has that text: what stands before and behind
        it, and what begins the call. None if both are shown."""
        given: Any = {} if self.takes_objects else "{}"
        both = self._called(given, said=WORD)
        if FUNCTION in both and WORD in (both.partition(FUNCTION)[0] if self.takes_responses else both):
            return None
        said, call = self._written([HELLO, {"role": "assistant", "content": WORD}]), self._called(given)
        (lead, found, behind), name = said.partition(WORD), call.find(FUNCTION)
        if not found or name < 0:
            return None
        first = len(commonprefix([said, call]))  # noqa: RUF071 - characters are meant
        if is_apart := bool(lead[first:].strip()):  # the text is another turn than the call
            first = min(first, len(self._written([HELLO])))
        opening = call[first:name]
        return lead[first:], behind * is_apart, opening.partition("{")[0].strip() or opening

    @cached_property
    def needs_turns(self) -> bool:
        """True if the template refuses two consecutive user messages."""
        return not self._written([*PLAIN, *PLAIN]) and self._renders_plain

    @cached_property
    def takes_user_behind_result(self) -> bool:
        """True if a user message may follow a tool's result."""
        return bool(self._with_id(CALL_ID, *PLAIN)) or not self._with_id(CALL_ID)

    @cached_property
    def takes_long_ids(self) -> bool:
        """True if ids of calls may have another form than nine letters and digits."""
        return bool(self._with_id("call_" + 2 * CALL_ID)) or not self._with_id(CALL_ID)

    @cached_property
    def takes_no_ids(self) -> bool:
        """True if calls need no ids."""
        return bool(self._with_id(None)) or not self._with_id(CALL_ID)

    @cached_property
    def _renders_plain(self) -> bool:
        """True if the text shows the plainest chat. Then a failure on another chat is that chat's."""
        return WORD in self._render(PLAIN, None).lower()

    @cached_property
    def _with_tool(self) -> str:
        """The plainest chat with a tool."""
        return self._written(PLAIN, [tool({"type": "object", "properties": {}})])

    def _with_id(self, id_: str | None, *behind: dict[str, Any]) -> str:
        """A chat with a call and its result, both with this id or without one, then these messages."""
        result = {"role": "tool", "name": FUNCTION, "content": RESULT}
        if id_:
            result["tool_call_id"] = id_
        return self._called({} if self.takes_objects else "{}", result, *behind, id_=id_)

    def _called(self, arguments: Any, *behind: Any, id_: str | None = CALL_ID, said: str = "") -> str:
        """A chat with a call, then these messages."""
        function = {"name": FUNCTION, "arguments": arguments}
        call = {"type": "function", "function": function} | ({"id": id_} if id_ else {})
        turn = {"role": "assistant", "content": said, "tool_calls": [call]}
        return self._written([HELLO, turn, *behind])

    def _written(self, chat: Chat, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Render a chat, with its content in the form that the template reads."""
        return self._render(in_parts(chat) if self.takes_parts_only else chat, tools)

    def _shows(self, *roles: str) -> bool:
        """True if the text of a chat of these roles shows each message of HEAD."""
        if roles not in self._shown:
            chat = [{"role": role, "content": f"{WORD}{i}x"} for i, role in enumerate(roles)]
            text = self._render(chat, None).lower()
            self._shown[roles] = all(m["content"] in text for m in chat if m["role"] in HEAD)
        return self._shown[roles]


def in_parts(chat: Chat) -> Chat:
    """The chat with its texts as lists of parts."""
    return [m | {"content": _parts(m["content"])} for m in chat]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def tool(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with these parameters."""
    function = {"name": FUNCTION, "description": "Probes.", "parameters": parameters}
    return {"type": "function", "function": function}
