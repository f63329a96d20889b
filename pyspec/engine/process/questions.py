"""Questions to an engine in another process, until it answers: its state, and actions on slots. `look`, `act` and `looked` hold the lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pyspec.engine.loop.slot_task import careful
from pyspec.engine.messages import ActOnSlot, Look, Looked, SlotActed
from pyspec.engine.process.process import EngineProcess
from pyspec.errors import Unavailable
from pyspec.slot_action import SlotAction, SlotAnswer

LOOK_S = 1.0


class Questions:
    """lock: notified at each answer, and when the engine ends. Answers come on the engine's reader thread."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._looks: dict[int, Looked | None] = {}
        self._acts: dict[int, Callable[[SlotAnswer], None]] = {}

    def look(
        self, number: int, child: EngineProcess | None, is_gone: Callable[[], bool]
    ) -> Looked | None:
        """The engine's state. None if it does not answer, or if called by a listener, which would block the answer."""
        if child is None or child.is_reader or time.monotonic() - child.received > LOOK_S:
            return None
        self._looks[number] = None
        child.send(Look(number))
        self._lock.wait_for(lambda: self._looks[number] or is_gone(), LOOK_S)
        return self._looks.pop(number)

    def act(
        self,
        number: int,
        child: EngineProcess,
        action: SlotAction,
        on_answer: Callable[[SlotAnswer], None],
    ) -> None:
        self._acts[number] = careful(on_answer)
        child.send(ActOnSlot(number, action))

    def looked(self, answer: Looked) -> None:
        if answer.number in self._looks:  # else the caller has stopped waiting
            self._looks[answer.number] = answer
        self._lock.notify_all()

    def acted(self, answer: SlotActed) -> None:
        if (on_answer := self._acts.pop(answer.number, None)) is not None:
            on_answer(answer.answer)

    def lost(self) -> None:
        """The engine has ended: nothing answers its actions any more."""
        acts, self._acts = self._acts, {}
        for on_answer in acts.values():
            on_answer(Unavailable("the engine was replaced, and its slots' content is lost"))
