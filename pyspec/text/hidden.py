"""Hides the texts of control tokens in values that a template formats itself: marks replace them during the rendering.

Tools, calls and a template's own values come from clients. A template may write them as JSON, sort them or leave them out. So only
the text of a control token is replaced, or a part of one at the end of a string, because the rest could follow it in the prompt. A
client that wants a control token writes it into the content of a system message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from pyspec.errors import RequestError
from pyspec.text.tokenizer import Tokenizer


class Hidden:
    """Marks and the texts that they replace. `texts`: by mark.

    A mark is letters of both cases and digits: no format escapes it, and a template that changes the case becomes visible.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = f"hB{secrets.token_hex(8)}"  # random, so that no value can contain a mark
        self.texts: dict[str, str] = {}
        self._marks: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """The value with marks in its strings and in the names of its fields."""
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
        """Raise RequestError if the template changed a mark."""
        nonce = self._nonce.lower()
        if any(piece not in self.texts and nonce in piece.lower() for piece in pieces):
            raise RequestError(
                "tools, tool calls or chat_template_kwargs contain the text of a control token,"
                " and the chat template changes it"
            )
