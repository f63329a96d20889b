"""The fault record of a device: where kernels write the first index that left its bounds, and how the host reads it.

A kernel's guard clamps the index, records it and goes on (include/bounds.cuh). The results of its slot are garbage, all others are
right. All ops of a device share one record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cpu.kernels import here
from pyspec.cuda.context import context_of, per_device
from pyspec.cuda.op import FaultPlace, guarded_ops
from pyspec.errors import HostLost, OutOfBounds

N_FIELD = 5  # {tripped, op, slot, index, limit}
ALL_SLOTS = -1  # the slot is not known


@dataclass(frozen=True, slots=True)
class Fault:
    """The record of a guard. `place`: a slot, a row or a sequence of the batch; `names` says which."""

    op: str
    place: int
    index: int
    limit: int
    names: FaultPlace = FaultPlace.SEQUENCE

    def slot(self, slots: Sequence[int], starts: Sequence[int]) -> int:
        """The slot it concerns, in a batch whose sequence i is of slots[i] and has rows starts[i]..starts[i + 1] - 1."""
        if self.names is FaultPlace.SLOT:
            return self.place if self.place in slots else ALL_SLOTS
        at = self.place
        if self.names is FaultPlace.ROW:
            at = next((i for i in range(len(slots)) if starts[i] <= self.place < starts[i + 1]), -1)
        return slots[at] if 0 <= at < len(slots) else ALL_SLOTS

    def error(self, slot: int) -> OutOfBounds:
        whose = f"slot {slot}" if slot != ALL_SLOTS else "a slot that is not known"
        return OutOfBounds(
            f"kernel {self.op}, {whose}: index", self.index, self.limit, None if slot < 0 else slot
        )


@per_device
def record(device: torch.device) -> Tensor:
    """[5] int32, an argument of kernels; see include/bounds.cuh."""
    with torch.inference_mode(False):  # it is written inside and outside of that mode
        return torch.zeros(N_FIELD, dtype=torch.int32, device=device)


def fault_of(number: int, place: int, index: int, limit: int) -> Fault:
    """The fault of a record."""
    op = guarded_ops().get(number)
    if op is None or op.guard is None:
        return Fault(f"number {number}", place, index, limit)
    return Fault(op.name, place, index, limit, op.guard.place)


class Reader:
    """Reads a device's record without waiting for the device: call `fetch` on the stream, sync, then `take`."""

    def __init__(self, device: torch.device) -> None:
        self.context = context_of(device)  # it owns the record, which all share
        with torch.inference_mode(False):
            self.record = record(device)
            self.hosts = [
                torch.zeros(N_FIELD, dtype=torch.int32, pin_memory=device.type == "cuda")
                for _ in range(2)
            ]
        self.fetched: deque[Tensor] = deque()

    def fetch(self) -> None:
        """Enqueue the copy on the stream. At most two may be pending."""
        assert len(self.fetched) < len(self.hosts), "a third copy would go where the first is read"
        host = self.hosts[0]
        self.hosts.reverse()
        host.copy_(self.record, non_blocking=True)
        self.fetched.append(host)

    def clear(self) -> None:
        """Reset the record, in stream order."""
        if here.tape is None:  # a replay is preceded by a call of its own
            self.record.zero_()

    def take(self) -> Fault | None:
        """Result of the oldest `fetch` that was not taken; its copy must be done. Clears the record if a guard had tripped. HostLost if
        the engine can not go on."""
        if not self.fetched:
            return None
        tripped, op, place, index, limit = self.fetched.popleft().tolist()
        if not tripped:
            return None
        self.clear()
        if (own := guarded_ops().get(op)) is not None and own.guard is not None and own.guard.lost:
            raise HostLost(own.guard.lost)
        return fault_of(op, place, index, limit)


def read(device: torch.device) -> Fault | None:
    """Wait for the device, and return the fault since the last call, if any."""
    reader = Reader(device)
    reader.fetch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return reader.take()
