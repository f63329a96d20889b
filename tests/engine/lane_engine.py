"""An engine process beside an emulated card, with all experts in host memory and the lane's own thread; pyspec.engine.process.engine_main.

`python lane_engine.py FOLDER DESCRIPTOR`. FOLDER/lane plants something before the next job of the lane, once:
dead     its thread ends, and no other one comes
late     its thread is at other work for seconds
raises   its thread throws
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from emulated import lane as emulated_lane
from emulated.ops import of_a_card, only

from pyspec.cuda.ops.moe import lane
from pyspec.cuda.ops.moe.lane import _JOB, HostLane, LaneJob
from pyspec.cuda.ops.moe.op import moe
from pyspec.engine.process import engine_main
from pyspec.engine.process.core import EngineCore
from pyspec.models.binding import Binding

N_LATE, LATE_ROWS = 40, 50_000  # jobs, and rows of each: minutes
KEPT: list[object] = []


def ring(own: HostLane, n_row: int, room: int, n_job: int = 1) -> None:
    """Jobs of rows of zeros for the first layer, which no kernel sent. room: rows that their memory is said to have."""
    n_in, n_used = next(iter(own._jobs))
    heads, ids = (torch.zeros(n, m, dtype=torch.int32) for n, m in ((n_job, 64), (n_row, n_used)))
    weights, x, y = (torch.zeros(n_row, n) for n in (n_used, n_in, n_in))
    KEPT.append((heads, ids, weights, x, y))
    for head in heads:
        at = (t.data_ptr() for t in (head, ids, weights, x, y))
        own.native.pyspec_lane_job(own.handle, _JOB.pack(*at, room, n_used, n_in))
    heads[:, 2], heads[:, 3] = n_row, n_row * n_used
    heads[:, 0] = 1
    own.wake()


def suffer(own: HostLane, what: str) -> None:
    emulated_lane.Patience.seconds = 0.5
    if what == "dead":
        own.stop()  # it joins the thread
        KEPT.append(without := HostLane(own.device, 1, has_thread=False))
        own.handle = without.handle
    elif what == "late":
        ring(own, LATE_ROWS, LATE_ROWS, N_LATE)
    elif what == "raises":
        ring(own, 1, 1 << 48)  # it wants more memory than there is


def plant(folder: Path, lanes: list[HostLane]) -> None:
    """Have the lane suffer, and no forward recorded: replays would not launch."""
    begin, load = lane.Split.__init__, EngineCore.load.__func__  # type: ignore[attr-defined]
    place = folder / "lane"

    def begun(self: lane.Split, job: LaneJob, *given: Any, **more: Any) -> None:
        if place.exists():
            what = place.read_text()
            place.unlink()
            suffer(lanes[0], what)
        begin(self, job, *given, **more)

    def loaded(cls: type[EngineCore], *given: Any, **more: Any) -> EngineCore:
        core: EngineCore = load(cls, *given, **more)
        core.loop.worker.arena = None
        return core

    lane.Split.__init__ = begun  # type: ignore[method-assign]
    EngineCore.load = classmethod(loaded)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    stack = ExitStack()
    made = stack.enter_context(emulated_lane.served_lane(has_thread=True))
    stack.enter_context(only("lane", (moe,), of_a_card))
    Binding.slots = property(lambda binding: 2)  # type: ignore[method-assign, assignment]
    lane.LIMIT = 20_000  # of an emulated clock, behind Patience
    plant(Path(sys.argv[1]), made)
    engine_main.main(int(sys.argv[2]))
