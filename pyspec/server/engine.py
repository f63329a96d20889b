"""The interface of an engine that the server uses.

The real engine satisfies `EngineLike`; so does the fake one of the tests. The server does not know torch, drafters or architectures.
"""

from __future__ import annotations

from typing import Protocol

from pyspec.engine.protocol import RunsRequests, Sink
from pyspec.request import Grammar
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

__all__ = ["EngineLike", "Sink"]


class EngineLike(RunsRequests, Protocol):
    """An engine with its texts and grammars."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate | None: ...

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """The grammar in the form that `submit` takes. Raises RequestError if it is not supported. May take seconds: keep it off an event loop."""
        ...

    def known_grammar(self, grammar: Grammar) -> Grammar | None:
        """As `check_grammar`, but from the cache; None if it was not compiled lately. Raises RequestError."""
        ...
