"""Marks of pictures in texts. A template never sees a picture: a mark stands for it in a message, and its tokens replace the mark in the prompt."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyspec.errors import RequestError
from pyspec.text.tokenizer import Part, Tokenizer


class Marks:
    """Marks of the pictures of one prompt, in order.

    A mark is letters of both cases and digits: no format escapes it, and a template that changes the case becomes visible. It is random,
    so that no text can contain one.
    """

    def __init__(self) -> None:
        self._nonce = f"pC{secrets.token_hex(8)}"
        self.marks: list[str] = []

    def add(self) -> str:
        """The mark of the next picture."""
        self.marks.append(f"{self._nonce}x{len(self.marks)}y")
        return self.marks[-1]

    def is_mark(self, text: str) -> bool:
        """True for a mark of this prompt."""
        return text.startswith(self._nonce) and text in self.marks

    def joined(self, texts: Sequence[str], between: str = "\n") -> str:
        """Texts and marks as one text. As in llama-server, nothing stands between a mark and its neighbours."""
        whole, is_behind = "", True
        for text in texts:
            is_mark = self.is_mark(text)
            whole += text if is_mark or is_behind else between + text
            is_behind = is_mark
        return whole


def check_shown(text: str, marks: Sequence[str]) -> None:
    """Raise RequestError if a template left a picture out, or changed its mark."""
    for i, mark in enumerate(marks):
        if mark not in text:
            did = (
                "changes the case of contents, also of" if mark.lower() in text.lower() else "leaves out"
            )
            raise RequestError(f"the chat template {did} image {i + 1} of {len(marks)}")


def spliced(parts: Sequence[Part], rows: Mapping[str, list[int]]) -> list[Part]:
    """The parts of a text with the ids of pictures in place of their marks. Raises RequestError if one is missing."""
    if not rows:
        return list(parts)
    check_shown("".join(part[0] for part in parts if isinstance(part, tuple)), list(rows))
    cut = re.compile("(" + "|".join(rows) + ")")
    found: list[Part] = []
    for part in parts:
        if isinstance(part, tuple):
            text, parse = part
            found += [rows.get(t, (t, parse)) for t in cut.split(text) if t]
        else:
            found.append(part)
    return found


# -- control tokens' texts -------------------------------------------------------------------------------------------
# Hides the texts of control tokens in values that a template formats itself: marks replace them during the rendering.
#
# Tools, calls and a template's own values come from clients. A template may write them as JSON, sort them or leave them out. So only
# the text of a control token is replaced, or a part of one at the end of a string, because the rest could follow it in the prompt. A
# client that wants a control token writes it into the content of a system message.


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
