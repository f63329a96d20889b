"""The interface of an engine that the server uses.

The real engine satisfies `EngineLike`; so does the fake one of the tests. The server does not know torch, drafters or architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pyspec.request import EngineInfo, Event, Grammar, Metrics, ReplicaInfo, Request, SlotInfo
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

Sink = Callable[[Event], None]
"""Takes the events of one request, in order. Called on the engine's thread; returns at once."""


class EngineLike(Protocol):
    """Submit, cancel and inspect requests. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate | None: ...

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
