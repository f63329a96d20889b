"""OpenAI's responses: a list of items, complete or as numbered events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pyspec.errors import PyspecError
from pyspec.request import Delta, Done, Progress
from pyspec.server.api.answers import (
    PartedAnswer,
    Sent,
    measured,
    named_event,
    progress_dict,
    timings_dict,
)
from pyspec.server.api.prepared import PreparedBody
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer


class ResponsesAnswer(PartedAnswer):
    """`/v1/responses`. Reasoning, text and each call are items; every event of a stream has its own number and its item's."""

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._items: list[dict[str, Any]] = []
        self._n_sent = 0
        self._answer = _answer(prepared, model)

    def opening(self, i: int) -> bytes:
        names = ("created", "in_progress")
        return self._bytes({"type": f"response.{name}", "response": self._answer} for name in names)

    def progress(self, i: int, event: Progress) -> bytes:
        sent: Sent = {"type": "response.in_progress", "response": self._answer}
        return self._bytes([sent | {"prompt_progress": progress_dict(event)}])

    def error(self, error: PyspecError) -> bytes:
        if self._open is not None:
            for _ in self._end_block():
                pass
            self._items[-1]["status"] = "incomplete"
        code = "server_error" if error.status >= 500 else error.kind
        failed = {"code": code, "message": str(error)}
        answer = self._answer | {"status": "failed", "error": failed, "output": self._items}
        return self._bytes([{"type": "response.failed", "response": answer}])

    def _bytes(self, events: Iterable[Sent], event: Delta | None = None) -> bytes:
        sent = list(events)
        if sent and event is not None and self._prepared.timings_per_token and event.timings:
            sent[-1]["timings"] = timings_dict(event.timings)
        out: list[bytes] = []
        for each in sent:
            out.append(named_event(each | {"sequence_number": self._n_sent}))
            self._n_sent += 1
        return b"".join(out)

    # -- items ---------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> dict[str, Any]:
        """The item that an event belongs to."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, part: Part) -> Iterator[Sent]:
        name = secrets.token_hex(12)
        if isinstance(part, CallBegin):
            item: dict[str, Any] = {"id": f"fc_{name}", "type": "function_call"}
            item |= {"status": "in_progress"}
            item |= {"arguments": "", "call_id": part.id, "name": part.name}
        elif isinstance(part, Reasoning):
            more: dict[str, Any] = {"status": "in_progress", "summary": [], "content": []}
            item = {"id": f"rs_{name}", "type": "reasoning", **more}
        else:
            more = {"status": "in_progress", "role": "assistant", "content": []}
            item = {"id": f"msg_{name}", "type": "message", **more}
        self._items.append(item)
        index = len(self._items) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        if not isinstance(part, CallBegin):
            part_0 = _content(type(part), "")
            place = {**self._place, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": part_0}

    def _more(self, part: Reasoning | Content | CallArguments) -> Iterator[Sent]:
        place, delta = self._place, {"delta": part.text}
        if isinstance(part, CallArguments):
            yield {"type": "response.function_call_arguments.delta", **place, **delta}
        elif isinstance(part, Reasoning):
            yield {"type": "response.reasoning_text.delta", **place, "content_index": 0, **delta}
        else:
            sent: Sent = {"type": "response.output_text.delta", **place, "content_index": 0}
            yield sent | delta | {"logprobs": []}

    def _end(self, kind: type[Part], text: str) -> Iterator[Sent]:
        item = self._items[-1]
        item["status"] = "completed"
        if kind is CallBegin:
            item["arguments"] = text
            kind_of_event = "response.function_call_arguments.done"
            done: Sent = {"type": kind_of_event, **self._place, "name": item["name"]}
            yield done | {"arguments": text}
        else:
            name = "reasoning_text" if kind is Reasoning else "output_text"
            item["content"] = [_content(kind, text)]
            place = {**self._place, "content_index": 0}
            done = {"type": f"response.{name}.done", **place, "text": text}
            yield done if kind is Reasoning else done | {"logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
        index = len(self._items) - 1
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    # -- the end -------------------------------------------------------------------------------------------------

    def _last_events(self, done: Done) -> Iterator[Sent]:
        final = self._final(done)
        timings = final.pop("timings", None)
        more = {"timings": timings} if timings else {}
        yield {"type": f"response.{final['status']}", "response": final} | more

    def _final(self, done: Done) -> Sent:
        usage = {
            "input_tokens": done.n_prompt,
            "input_tokens_details": {
                "cached_tokens": done.timings.cache_n,
                "cache_write_tokens": 0,
            },
            "output_tokens": done.n_predicted,
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
            "total_tokens": done.n_prompt + done.n_predicted,
        }
        end: Sent = {"status": "completed", "completed_at": int(time.time())}
        if done.finish == "length":
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            if self._items and self._items[-1]["type"] != "reasoning":
                self._items[-1]["status"] = "incomplete"
        return self._answer | end | {"output": self._items, "usage": usage} | measured(done.timings)


def _content(kind: type[Part], text: str) -> dict[str, Any]:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _answer(prepared: PreparedBody, model: str) -> dict[str, Any]:
    """The object before any token was generated, with the repeated fields of the body."""
    params = prepared.requests[0].params
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    } | dict(prepared.repeated)
