"""Work on what a slot holds, which the loop does between two rounds, once the slot is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspec.errors import PyspecError
from pyspec.repeats import limited
from pyspec.request import SlotAnswer

log = limited(__name__)

OnAnswer = Callable[[SlotAnswer], None]


@dataclass(frozen=True)
class SlotTask:
    """`do` runs on the engine's thread while nothing is in flight that touches the slot; `failed` hears if it can not, or does not."""

    slot: int
    do: Callable[[], None]
    failed: Callable[[PyspecError], None]


def careful(on_answer: OnAnswer) -> OnAnswer:
    """A listener is the caller's code: whatever it raises must not end a round, or the thread that reads for all."""

    def safe(answer: SlotAnswer) -> None:
        try:
            on_answer(answer)
        except BaseException:
            log.exception("whoever asked for a slot's file could not be told")

    return safe
