"""Answers that consist of blocks: the common parts of Anthropic's messages and OpenAI's responses.

Both put reasoning, text and calls into blocks that begin, grow and end. A block ends when a part of another kind arrives. The same steps
write the events of a stream and, without sending them, build the complete object.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyspec.request import Delta, Done
from pyspec.server.api.answers import Answer
from pyspec.server.api.prepared import PreparedBody
from pyspec.server.http.envelope import dumps
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.tokenizer import Tokenizer

Sent = dict[str, Any]
"""One event of a stream, with its name as its type."""


def named_event(event: Sent) -> bytes:
    """One server-sent event that has a name."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


class PartedAnswer(Answer):
    """The answer of one choice. `open` is the kind of the growing block, None between blocks."""

    def __init__(self, prepared: PreparedBody, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        self._parser = prepared.markup.parser()
        self._open: type[Part] | None = None
        self._texts: list[str] = []  # of the open block
        self._n_reasoning = 0  # tokens, estimated from the text

    def complete(self) -> Sent:
        text = "".join(self.choices[0].text)
        for _ in self._grow([*self._parser.push(text), *self._parser.finish()]):
            pass
        for _ in self._end_block():
            pass
        return self._final(self.choices[0].ended)

    def delta(self, i: int, event: Delta) -> bytes:
        return self._bytes(self._grow(self._parser.push(event.text)), event)

    def finish(self, i: int, done: Done) -> bytes:
        def events() -> Iterator[Sent]:
            yield from self._grow(self._parser.finish())
            yield from self._end_block()
            yield from self._last_events(done)

        return self._bytes(events())

    def _grow(self, parts: Sequence[Part]) -> Iterator[Sent]:
        """Add parts to the open block, or to new ones."""
        for part in parts:
            if isinstance(part, CallArguments):
                kind: type[Part] = CallBegin
            else:
                kind = type(part)
            if kind is not self._open or isinstance(part, CallBegin):
                yield from self._end_block()
                self._open = kind
                yield from self._begin(part)
            if isinstance(part, Reasoning | Content | CallArguments) and part.text:
                self._texts.append(part.text)
                yield from self._more(part)

    def _end_block(self) -> Iterator[Sent]:
        if self._open is None:
            return
        text, kind = "".join(self._texts), self._open
        self._texts.clear()
        self._open = None
        if kind is Reasoning:
            ids = self._tokenizer.encode(text, add_special=False, parse_special=False)
            self._n_reasoning += len(ids)
        yield from self._end(kind, text)

    def _bytes(self, events: Iterable[Sent], event: Delta | None = None) -> bytes:
        return b"".join(named_event(sent) for sent in events)

    @abstractmethod
    def _begin(self, part: Part) -> Iterator[Sent]:
        """Open a block with its first part `part`."""

    @abstractmethod
    def _more(self, part: Reasoning | Content | CallArguments) -> Iterator[Sent]:
        """Add to the open block."""

    @abstractmethod
    def _end(self, kind: type[Part], text: str) -> Iterator[Sent]:
        """Close the block; `text` is its full text."""

    @abstractmethod
    def _last_events(self, done: Done) -> Iterator[Sent]:
        """The last events of a stream."""

    @abstractmethod
    def _final(self, done: Done) -> Sent:
        """The answer as one object."""
