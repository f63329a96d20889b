"""The guard of an op's kernels: what a fault record of theirs means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FaultPlace(Enum):
    """Meaning of the `slot` field of a fault record."""

    SLOT = "slot"
    ROW = "row of the batch"
    SEQUENCE = "sequence of the batch"


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of an op's kernels. `number` stands in compiled kernels, so it never changes.

    lost: what HostLost says, of a record after which the process can not go on; "": it concerns a request
    """

    number: int
    place: FaultPlace = FaultPlace.SEQUENCE
    lost: str = ""
