"""What the CUDA kernels of `attend`, and Triton's, share: the room of a multiprocessor, and the memory of partial sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.context import context_of, per_device
from pyspec.slots.kv import KVPool

MAX_SEQ = 128  # sequences of a launch of attend.cu, as in attend_fold.cuh


def room_of(arch: str) -> int:
    """Bytes of shared memory of a multiprocessor; a block takes 1 KB more than it asks for."""
    return {"sm_80": 164, "sm_87": 164, "sm_90a": 228, "sm_100a": 228}.get(arch, 100) * 1024


class Workspace:
    """Partial sums, shared by all layers of a device. Outgrown buffers stay, because captured graphs may hold them. An engine reserves
    `workspace_bytes` before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Tensor] = []
        self.plan = torch.zeros(1 + 3 * MAX_SEQ, dtype=torch.int32, device=device)

    @property
    def room(self) -> int:
        """Floats that `take` gives without an allocation."""
        return self.buffers[-1].numel() if self.buffers else 0

    def take(self, n_float: int) -> Tensor:
        if not self.buffers or self.buffers[-1].numel() < n_float:
            with context_of(self.device).outside():
                self.buffers.append(torch.empty(n_float, dtype=torch.float32, device=self.device))
        return self.buffers[-1]


workspace = per_device(Workspace)


@dataclass(frozen=True, slots=True)
class AttendTiles:
    """One build. keys: of a step; stages: steps under way; warps: of a program."""

    columns: int
    keys: int
    stages: int
    warps: int


def planes_of(pool: KVPool) -> tuple[Tensor, ...]:
    """Keys, values and their scales; as bytes where Triton does not have torch's type on all devices."""
    codes = [t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t for t in (pool.k, pool.v)]
    scales = zip(codes, (pool.k_scale, pool.v_scale), strict=True)
    return *codes, *(own if scale is None else scale for own, scale in scales)
