"""The part of the engine that the server uses: requests with a listener, slots, counters, the chat template. No torch."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import finalize

from pyspec.engine.arguments import callable_of, id_of, seconds_of
from pyspec.engine.aside import AsideThread
from pyspec.engine.block_events import BlockPublisher
from pyspec.engine.protocol import Core
from pyspec.engine.validate import Validator
from pyspec.errors import BadTemplate, Unavailable
from pyspec.ranges import shown
from pyspec.request import Event, Grammar, Metrics, ReplicaInfo, Request, SlotInfo, check_grammar
from pyspec.slot_action import SlotAction, SlotAnswer, check_action
from pyspec.slots.blocks import CLEARED
from pyspec.text.template import CHATML, ChatTemplate
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
LOOK_S = 0.02  # between looks at the requests of a drain


class ServedEngine:
    """A loaded model with its slots, for callers that give a listener and wait for nothing. Safe to call from any thread."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        publishers: Sequence[BlockPublisher] = (),
    ) -> None:
        self.core, self.tokenizer, self.info = core, tokenizer, core.info
        self.publishers = tuple(publishers)  # of KV events, one for each replica
        for publisher in self.publishers:
            publisher.publish(CLEARED)  # routers may know the blocks of an earlier engine there
        self.template = self._chatml() if template is None else template
        self._templates = [self.template]  # the current one; its processes end with the engine
        finalize(
            self, end_aside, core, self._templates, self.publishers
        ).atexit = False  # at the program's end, cores close themselves
        self._incoming = Validator(self.info, tokenizer)
        self._is_draining, self._n_call = False, 0  # calls that wait for their requests
        self._counting = Lock()

    def __repr__(self) -> str:
        i = self.info
        drafts = i.drafter if i.n_draft_max else "none"
        return f"<Engine {i.model_name!r} ({i.arch}) on {i.device}: np={i.n_slot}, ctx={i.n_ctx}, drafts: {drafts}, {self.state()}>"

    def _chatml(self) -> ChatTemplate:
        """The template of a file without one, as in llama-server."""
        log.warning(
            "the file has no chat template: chats are written as ChatML; --chat-template takes another one"
        )
        self.info = replace(self.info, chat_template=CHATML)
        return ChatTemplate(CHATML, self.info.bos_token, self.info.eos_token)

    def use_template(self, source: str) -> None:
        """Replace the file's chat template. Raises BadTemplate if it does not compile; the one before stays then."""
        if not isinstance(source, str):
            raise BadTemplate(f"source is {shown(source)}; want the text of a chat template")
        template = ChatTemplate(source, self.info.bos_token, self.info.eos_token)
        try:
            template.check()
        except BadTemplate:
            template.close()
            raise
        self.template, self.info = template, replace(self.info, chat_template=source)
        self._templates[:] = [template]

    def submit(self, request: Request, sink: Callable[[Event], None]) -> str:
        """Queue a request. `sink` gets its events on the engine's thread and must not block.

        Raises RequestError if it can never run, QueueFull if too many wait, Unavailable if the engine is down.
        """
        self._refuse_new()
        return self._send(request, sink)

    def _send(self, request: Request, sink: Callable[[Event], None]) -> str:
        """`submit` for a call that began before a drain."""
        return self.core.submit(self._incoming.check(request), callable_of("sink", sink))

    def _refuse_new(self) -> None:
        if self._is_draining:
            raise Unavailable("the engine is closing: running requests end, and it takes no new ones")

    def check_grammar(self, grammar: Grammar) -> Grammar:
        """Compile a grammar, which takes a while if it is new. Raises RequestError if it can not be compiled."""
        check_grammar(grammar)
        return self._incoming.grammars.compiled(grammar)

    def known_grammar(self, grammar: Grammar) -> Grammar | None:
        """The compiled grammar if it is known, without delay; None if it has to be compiled. Raises RequestError."""
        check_grammar(grammar)
        return self._incoming.grammars.known(grammar)

    def cancel(self, request_id: str) -> None:
        """End a request at the next round; unknown and finished ids are ignored."""
        self.core.cancel(id_of(request_id))

    def act_on_slot(self, action: SlotAction, hear: Callable[[SlotAnswer], None]) -> None:
        """Save, restore or erase a slot's content once it is idle. `hear` gets a report or the error, on any thread, and must not block."""
        check_action(action, self.info.n_slot)
        self.core.act_on_slot(action, callable_of("hear", hear))

    def slots(self) -> list[SlotInfo]:
        """One row per slot, for people and dashboards."""
        return self.core.slots()

    def metrics(self) -> Metrics:
        """Counters since the start, and gauges."""
        counts = self.core.metrics()
        if self.publishers:
            n, n_dropped = (
                sum(p.n_batch for p in self.publishers),
                sum(p.n_dropped for p in self.publishers),
            )
            counts = replace(counts, kv_event_batches=n, kv_event_batches_dropped=n_dropped)
        return counts

    def replicas(self, *, counts: bool = True) -> list[ReplicaInfo]:
        """One row per engine of a model that was loaded with several `replicas`; else an empty list. counts: with their metrics."""
        return self.core.replicas(counts=counts)

    def alive(self) -> bool:
        """True if requests are taken. While an isolated engine is replaced they are, and run when it is back."""
        return not self._is_draining and self.core.alive()

    def state(self) -> str:
        """ "ok", "recovering" while an isolated engine is replaced, "draining" while it closes, or "stopped"."""
        return "draining" if self._is_draining and self.core.alive() else self.core.state()

    def _is_busy(self) -> bool:
        """True while a request runs or waits, or a call still reads its answer."""
        if self.core.in_listener() or not self.core.alive():
            return False
        counts = self.core.metrics()
        return self._n_call + counts.requests_processing + counts.requests_queued > 0

    def park(self) -> None:
        """Give the device's memory back, but for what a process needs there, and keep the weights in the host's, while no request runs. Texts that
        requests left are kept there, too, the last ones within `EngineSettings.cache_ram`: a prompt that goes on with one is not read again.
        Until `wake` no request is taken.

        On a CPU the slots' memory goes back to the system. On a GPU the model was loaded for it (`EngineSettings.parks`).

        Raises NotSupported, Unavailable (a request came before), DeviceError.
        """
        self.core.park()

    def wake(self) -> None:
        """Undo `park`: weights are copied back to where they were. Raises DoesNotFit if their memory is taken; DeviceError, Unavailable."""
        self.core.wake()

    @property
    def loop(self) -> Any:
        """The loop, for tests and measurements. Only an engine of this process has one."""
        return self.core.loop  # type: ignore[attr-defined]  # that of another process has none

    def close(self, limit_s: float | None = None, *, drain: float = 0.0) -> bool:
        """Stop. Requests that run or wait get `drain` seconds to end, in which new ones are refused with Unavailable; what runs then fails
        with Unavailable. Memory is freed with the last reference.

        To exchange an engine under load: load the new one, direct new requests to it, then `old.close(drain=60)`.

        Returns False if the device's work did not end and was left behind after `limit_s` (default 30 s).
        """
        limit = () if limit_s is None else (seconds_of("limit_s", limit_s),)
        end = time.monotonic() + seconds_of("drain", drain)
        if drain:
            with self._counting:
                self._is_draining = True
            while time.monotonic() < end and self._is_busy():
                time.sleep(LOOK_S)
        is_over = self.core.close(*limit)
        for publisher in self.publishers:
            publisher.close()
        return is_over


def end_aside(
    core: Core, templates: list[ChatTemplate], publishers: Sequence[BlockPublisher] = ()
) -> None:
    """Close an engine, its templates' processes and its publishers after its last reference is gone. This may run on any thread, even the core's own, so
    nothing waits."""
    held = [core]

    def end() -> None:
        held.pop().close()  # and release it
        for template in templates:
            template.close()
        for publisher in publishers:
            publisher.close()
        gc.collect()  # errors of coroutines hold their frames in cycles, which would keep the core's memory

    with suppress(RuntimeError):  # the program ends, and the core with it
        AsideThread(end, "pyspec-end").start()
