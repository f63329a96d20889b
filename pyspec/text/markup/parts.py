"""The parts of a model's answer, as they arrive: reasoning, content and tool calls.

A dialect's parser turns the answer's text into these parts, and every interface (OpenAI's chat and responses, Anthropic's messages)
writes them in its own form. Speculation commits several tokens at once, so a parser must give the same parts for any split of the
text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Tool call `index` begins; calls are counted from 0 in each answer. The name is complete; `CallArguments` follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`. The pieces in order are one JSON object."""

    index: int
    text: str


Part = Reasoning | Content | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Parses one answer. Text that may still become markup is held back, at most until `finish`."""

    def push(self, text: str) -> list[Part]:
        """The parts that are complete with `text`, the next piece of the answer."""
        ...

    def finish(self) -> list[Part]:
        """The parts held back. The answer is over, complete or not."""
        ...
