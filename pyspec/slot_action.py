"""Actions on a slot's contents: save, restore, erase. Plain data, without torch, picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pyspec.errors import PyspecError, RequestError
from pyspec.ranges import INT32, Doc, OneOf, Text, Whole, check


@dataclass(frozen=True, slots=True)
class SlotAction:
    """An action on a slot's contents, run once the slot is idle. `path`: the file, for all but "erase". client, cache_salt: as of a request;
    texts of other salts are not touched."""

    kind: Annotated[Literal["save", "restore", "erase"], OneOf(("save", "restore", "erase"))]
    slot: Annotated[int, Whole(0, INT32)]
    path: Annotated[str, Text(r"[^\0]*", "the name of a file")] = ""
    client: Annotated[str, Text()] = ""
    cache_salt: Annotated[str, Text()] = ""


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The result of a SlotAction."""

    slot: Annotated[int, Doc("its number")]
    n_tokens: Annotated[int, Doc("tokens saved, restored or erased")]
    n_bytes: Annotated[int, Doc("bytes of the file")] = 0
    ms: Annotated[float, Doc("milliseconds that it took")] = 0.0


SlotAnswer = SlotReport | PyspecError


def check_action(action: SlotAction, n_slot: int) -> None:
    """Raise RequestError for an invalid action, or a slot that does not exist."""
    if not isinstance(action, SlotAction):
        raise RequestError(
            f"an action is a pyspec.slot_action.SlotAction, not a {type(action).__name__}"
        )
    check(action, RequestError)
    if action.slot >= n_slot:
        raise RequestError(f"slot {action.slot} does not exist; slots are 0..{n_slot - 1} (-np)")
