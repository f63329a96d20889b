"""The interfaces that the server uses: an engine, a tokenizer and a chat template, as three narrow protocols.

The real engine satisfies `EngineLike`; so does the fake one of the tests. The server does not know torch, drafters or architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pyspec.request import EngineInfo, Event, Grammar, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.text.abilities import Abilities
from pyspec.text.vocab import FimMarks

Sink = Callable[[Event], None]
"""Takes the events of one request, in order. Called on the engine's thread; returns at once."""


class TokenizerLike(Protocol):
    """Text to ids and back. Thread-safe: the server calls it from its text threads."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def fim(self) -> FimMarks: ...

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class TemplateLike(Protocol):
    """The model's chat template. Raises RequestError when it refuses the messages."""

    def able(self, *, tools: bool) -> Abilities:
        """The features that the template can write, in chats with or without tools."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...

    def encode(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        begun: str = "",
    ) -> list[int]:
        """Ids of the rendered chat, followed by the answer's beginning `begun`. Users' text cannot become control tokens."""
        ...


class EngineLike(Protocol):
    """Submit, cancel and inspect requests. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def template(self) -> TemplateLike | None: ...

    def submit(self, request: Request, sink: Sink) -> str:
        """Queue a request and return its id. Raises RequestError, QueueFull or Unavailable at once.

        `sink` then gets Started, Progress and Delta events and, last, exactly one Done or Failed. The first event may
        arrive before this method returns.
        """
        ...

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """The grammar in the form that `submit` takes. Raises RequestError if it is not supported. May take seconds: keep it off an event loop."""
        ...

    def known_grammar(self, grammar: Grammar) -> Grammar | None:
        """As `check_grammar`, but from the cache; None if it was not compiled lately. Raises RequestError."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its Done says "cancelled". An unknown or finished id is no error."""
        ...

    def act_on_slot(self, action: SlotAction, hear: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase a slot's contents once it is idle. `hear` is called once, on any thread."""
        ...

    def slots(self) -> list[SlotInfo]: ...

    def metrics(self) -> Metrics: ...

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        """One row per engine, if there are several. counts: with metrics, which may take a second."""
        ...

    def alive(self) -> bool:
        """True if requests are accepted: not while loading, nor after the engine has stopped for good."""
        ...

    def state(self) -> str:
        """One word: "ok", "recovering" while a failed engine is replaced and requests wait, another one if it is not alive."""
        ...
