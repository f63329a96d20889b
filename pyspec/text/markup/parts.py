"""What a model's answer consists of: reasoning, content and tool calls, told as they come.

A dialect's parser turns the text of an answer into these parts, and every interface (OpenAI's chat and responses, Anthropic's
messages) writes them in its own shape. Speculation commits several tokens at once, so a parser must give the same parts
wherever the text is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Tool call `index` begins, counted from 0 in each answer. Its name is complete; `CallArguments` follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`: pieces of one JSON object, in order."""

    index: int
    text: str


Part = Reasoning | Content | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Reads one answer. What may still become markup is held back until it can not, or until `finish`."""

    def push(self, text: str) -> list[Part]:
        """Parts that `text`, the next piece of the answer, completes."""
        ...

    def finish(self) -> list[Part]:
        """What was held back: the answer is over, wherever it stopped."""
        ...
