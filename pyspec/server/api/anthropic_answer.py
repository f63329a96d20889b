"""Anthropic's answers: a message of blocks, complete or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from pyspec.errors import PyspecError
from pyspec.ranges import no_number
from pyspec.request import Done, Progress
from pyspec.server.api.answers import PartedAnswer, Sent, ending, named_event
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import anthropic_error
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer

STOP_REASON = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens"}
SIGNATURE = ""  # of thoughts: pyspec does not sign them and accepts them back unsigned


def usage(n_prompt: int, n_cached: int, n_out: int, n_thinking: int = 0) -> dict[str, Any]:
    """Usage as Anthropic reports it, with cached tokens separate. Tokens written to the cache are 0: every prompt is cached without being marked."""
    value: dict[str, Any] = {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_out,
    }
    details = {"output_tokens_details": {"thinking_tokens": n_thinking}} if n_thinking else {}
    return value | details


class MessagesAnswer(PartedAnswer):
    """`/v1/messages`. Each thought, text and call is a block, numbered in order of appearance."""

    ping = named_event({"type": "ping"})

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._blocks: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def opening(self, i: int) -> bytes:
        choice = self.choices[i]
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._head | empty | {"usage": usage(choice.n_prompt, choice.n_cached, 0)}
        return named_event({"type": "message_start", "message": message})

    def progress(self, i: int, event: Progress) -> bytes:
        return self.ping

    def error(self, error: PyspecError) -> bytes:
        return named_event(anthropic_error(error)[1])

    # -- blocks --------------------------------------------------------------------------------------------------

    def _begin(self, part: Part) -> Iterator[Sent]:
        if isinstance(part, Reasoning):
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(part, CallBegin):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        else:
            block = {"type": "text", "text": ""}
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _more(self, part: Reasoning | Content | CallArguments) -> Iterator[Sent]:
        if isinstance(part, Reasoning):
            delta = {"type": "thinking_delta", "thinking": part.text}
        elif isinstance(part, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self, kind: type[Part], text: str) -> Iterator[Sent]:
        index, block = len(self._blocks) - 1, self._blocks[-1]
        if kind is CallBegin:
            block["input"] = call_input(text)
        elif kind is Reasoning:
            block |= {"thinking": text, "signature": SIGNATURE}
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        else:
            block["text"] = text
        yield {"type": "content_block_stop", "index": index}

    # -- the end -------------------------------------------------------------------------------------------------

    def _last_events(self, done: Done) -> Iterator[Sent]:
        yield {"type": "message_delta", "delta": self._stop(done), "usage": self._usage(done)}
        yield {"type": "message_stop"}

    def _final(self, done: Done) -> Sent:
        usage = {"usage": self._usage(done)}
        return self._head | {"content": self._blocks} | self._stop(done) | usage

    def _stop(self, done: Done) -> dict[str, Any]:
        reason = STOP_REASON[ending(done)]
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": done.stop_string or None}

    def _usage(self, done: Done) -> dict[str, Any]:
        value = usage(done.n_prompt, done.timings.cache_n, done.n_predicted, self._n_reasoning)
        broke = done.timings.cache_break_at
        # not Anthropic's: this path has no timings
        return value | ({"cache_break_at": broke} if broke >= 0 else {})


def call_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; empty if they are none: cut off by the token limit, or not JSON."""
    try:
        value = json.loads(arguments, parse_constant=no_number)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be sent
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
