"""A lane beside an emulated card. Kernels run one after the other there, so its jobs are computed just before a gate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.ops.moe import host, lane
from pyspec.cuda.ops.moe.lane import HostLane


class Patience:
    """Seconds that a gate waits for a lane's thread before it is launched, and gives up."""

    seconds = 60.0


@contextmanager
def served_lane(*, has_thread: bool = False) -> Iterator[list[HostLane]]:
    """Within it `emulated_gpu` has a lane; the list of those that are made. has_thread: its own thread computes, as beside a GPU; else the one
    that launches."""
    lanes: list[HostLane] = []

    def made(device: torch.device) -> HostLane:
        lanes.append(HostLane(device, 2, has_thread=has_thread))
        return lanes[-1]

    real = lane.lane_kernels

    def kernels(device: torch.device) -> tuple[Any, Any]:
        split, gate = real(device)
        if has_thread:
            return SimpleNamespace(launch=_ringing(split, lanes)), SimpleNamespace(
                launch=_waiting(gate, lanes)
            )

        def launch(*args: Any, **more: Any) -> None:
            for own in lanes:
                own.serve()
            gate.launch(*args, **more)

        return split, SimpleNamespace(launch=launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "lane_of", per_device(made))
        patch.setattr(lane, "lane_kernels", kernels)
        yield lanes


def _ringing(split: Any, lanes: list[HostLane]) -> Any:
    """Launches whose number comes to the thread when all of the job is there: an emulated launch writes its memory back in any order."""

    def launch(grid: Any, block: int, args: list[Any], **more: Any) -> None:
        ((i, head),) = _heads(lanes, args)
        args[i] = head.clone()
        split.launch(grid, block, args, **more)
        head[1:4] = args[i][1:4]
        head[0] = args[i][0]

    return launch


def _waiting(gate: Any, lanes: list[HostLane]) -> Any:
    """Launches behind the thread's answer."""

    def launch(grid: Any, block: int, args: list[Any], **more: Any) -> None:
        for i, head in _heads(lanes, args):
            end = time.monotonic() + Patience.seconds
            while int(head[16]) != int(head[0]) and time.monotonic() < end:
                time.sleep(1e-4)
            args[i] = head.clone()
        gate.launch(grid, block, args, **more)

    return launch


def _heads(lanes: list[HostLane], args: list[Any]) -> list[tuple[int, Tensor]]:
    """The arguments that are heads of jobs, by their numbers."""
    own = [job.head for one in lanes for job in one._jobs.values()]
    return [(i, a) for i, a in enumerate(args) if any(a is head for head in own)]
