"""Tasks on the content of a slot, run by the loop between two rounds, once the slot is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspec.errors import PyspecError
from pyspec.repeats import limited
from pyspec.slot_action import SlotAnswer

log = limited(__name__)

OnAnswer = Callable[[SlotAnswer], None]


@dataclass(frozen=True)
class SlotTask:
    """`do` runs on the engine's thread while no launched round touches the slot. `failed` is called if it raises, or never runs."""

    slot: int
    do: Callable[[], None]
    failed: Callable[[PyspecError], None]


def careful(on_answer: OnAnswer) -> OnAnswer:
    """Wrap a caller's listener so that its exceptions end neither a round nor a reader thread."""

    def safe(answer: SlotAnswer) -> None:
        try:
            on_answer(answer)
        except BaseException:
            log.exception("the listener of a slot action failed")

    return safe
