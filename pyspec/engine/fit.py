"""What fits a machine: the memory plan for numbers of slots and contexts, without loading a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.engine.describe import Description, describe, plan_memory, resized
from pyspec.engine.memory_plan import RESERVE, AssumedGpu, MemoryPlan, checkpoint_bytes, room_on

SLOTS = (1, 2, 4, 8, 16, 32)
STEP = 256  # tokens that contexts are rounded to
ENOUGH = 32768  # tokens of a request that are worth more than another slot


@dataclass(frozen=True)
class Fit:
    """So many slots, the most tokens each may hold, and what that takes. n_ctx 0: not even the smallest fits."""

    np: int
    n_ctx: int
    plan: MemoryPlan


@dataclass(frozen=True)
class FitReport:
    """A model on a machine.

    asked       the plan for the slots and tokens that were asked for, or are the default
    kv_per_slot, state_per_slot, draft_per_slot, checkpoint   bytes of one slot: pages, recurrent state, the drafter's, and of one checkpoint
    usable      bytes that a plan may have: free memory less a reserve for others
    fits        for several numbers of slots, the largest context
    """

    description: Description
    asked: MemoryPlan
    kv_per_slot: int
    state_per_slot: int
    draft_per_slot: int
    checkpoint: int
    free: int
    usable: int
    fits: tuple[Fit, ...]

    def best(self, np: int = 0) -> Fit | None:
        """With `np` slots; with 0 the most, up to 8, that hold what a long chat has, else the largest context. None: nothing fits."""
        able = [f for f in self.fits if f.n_ctx and (f.np == np if np else f.np <= 8)]
        enough = min(ENOUGH, self.description.config.n_ctx_train)
        long = [f for f in able if f.n_ctx >= enough]
        return max(long, key=lambda f: f.np) if long else max(able, key=lambda f: f.n_ctx, default=None)


def fit(path: Path, settings: EngineSettings, vram: int = 0) -> FitReport:
    """Plan a load of `path`; `vram`: bytes free on a GPU that is not here. Raises what describing a load raises."""
    d = describe(path, settings, AssumedGpu(vram) if vram else None)
    free = room_on(d.device, d.assumed)
    usable = int(free * (1 - RESERVE))
    asked = plan_memory(d)
    one, two = (plan_memory(resized(d, np, d.n_ctx)) for np in (1, 2))
    counts = sorted({*SLOTS, settings.np})
    return FitReport(
        description=d,
        asked=asked,
        kv_per_slot=two.kv - one.kv,
        state_per_slot=two.state - one.state,
        draft_per_slot=two.draft_kv - one.draft_kv,
        checkpoint=checkpoint_bytes(d.config.parts(), d.sizes),
        free=free,
        usable=usable,
        fits=tuple(_largest(d, np, usable) for np in counts),
    )


def _largest(d: Description, np: int, usable: int) -> Fit:
    """The largest context that fits with so many slots, at most what the model was trained for."""

    def planned(n_ctx: int) -> MemoryPlan:
        return plan_memory(resized(d, np, n_ctx))

    most = d.config.n_ctx_train
    if (plan := planned(most)).total <= usable:
        return Fit(np, most, plan)
    low, high = 0, -(-most // STEP)  # in steps: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planned(middle * STEP).total <= usable else (low, middle)
    return Fit(np, low * STEP, planned(max(low * STEP, STEP)))
