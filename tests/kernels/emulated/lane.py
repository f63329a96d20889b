"""A lane beside an emulated card. Kernels run one after the other there, so its jobs are computed just before a gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyspec.cuda.context import per_device
from pyspec.cuda.ops.moe import host, lane
from pyspec.cuda.ops.moe.lane import HostLane


@contextmanager
def served_lane() -> Iterator[list[HostLane]]:
    """Within it `emulated_gpu` has a lane without a thread; the list of those that are made."""
    lanes: list[HostLane] = []

    def made(device: torch.device) -> HostLane:
        lanes.append(HostLane(device, 2, has_thread=False))
        return lanes[-1]

    real = lane.lane_kernels

    def kernels(device: torch.device) -> tuple[Any, Any]:
        split, gate = real(device)

        def launch(*args: Any, **more: Any) -> None:
            for own in lanes:
                own.serve()
            gate.launch(*args, **more)

        return split, SimpleNamespace(launch=launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "lane_of", per_device(made))
        patch.setattr(lane, "lane_kernels", kernels)
        yield lanes
