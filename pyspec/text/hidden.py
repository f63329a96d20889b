"""Control tokens' texts inside values that a template writes out as it likes: marks stand for them while it renders.

Tools, calls and a template's own values come from clients. A template may write them as JSON, sort them, or leave them out, so only
the text of a control token is replaced, and half a one at the end of a string: it could find its other half there. What a client
wants to be a control token it has to say in the content of a system message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from pyspec.errors import RequestError
from pyspec.text.tokenizer import Tokenizer


class Hidden:
    """Marks and the texts they stand for. `texts`: by mark.

    Marks are letters of both cases and digits: no way of writing a value escapes them, and a template that changes the case shows by it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._nonce = tokenizer, f"hB{secrets.token_hex(8)}"  # no value can hold a mark of its own
        self.texts: dict[str, str] = {}
        self._marks: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """The value with marks in its strings. Names of fields count as strings."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        spans = self._tokenizer.special_spans(text)
        if not spans:
            return text
        out, at = [], 0
        for start, end in spans:
            out += [text[at:start], self._mark(text[start:end])]
            at = end
        return "".join([*out, text[at:]])

    def _mark(self, text: str) -> str:
        if text not in self._marks:
            mark = self._marks[text] = f"{self._nonce}x{len(self.texts)}y"
            self.texts[mark] = text
        return self._marks[text]

    def check(self, pieces: Iterable[str]) -> None:
        """Raise RequestError if a mark came out otherwise than it went in."""
        nonce = self._nonce.lower()
        if any(piece not in self.texts and nonce in piece.lower() for piece in pieces):
            raise RequestError(
                "tools, tool calls or chat_template_kwargs contain the text of a control token, and the chat template changes it"
            )
