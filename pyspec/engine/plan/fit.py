"""Fits a model to a machine: the memory plan for numbers of slots and contexts, without loading a weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pyspec.config import EngineSettings
from pyspec.cpu.kernels import planning
from pyspec.engine.plan.describe import START_CTX, Description, describe, resized
from pyspec.engine.plan.fitted import without
from pyspec.engine.plan.longest import here, usable_bytes, widened
from pyspec.engine.plan.memory_plan import AssumedGpu, HostPlan, MemoryPlan, checkpoint_bytes
from pyspec.engine.plan.planned_bytes import host_bytes, plan_host, plan_memory

SLOTS = (1, 2, 4, 8, 16, 32)
ENOUGH = 32768  # tokens of a request that are worth more than another slot
FEW = 4096  # a slot with fewer tokens is of little use


@dataclass(frozen=True)
class Fit:
    """A number of slots, the tokens of each, and their memory. n_ctx 0: not even the smallest context fits."""

    np: int
    n_ctx: int
    plan: MemoryPlan


@dataclass(frozen=True)
class FitReport:
    """A model on a machine.

    asked       the plan for the given, or default, slots and tokens
    kv_per_slot, state_per_slot, draft_per_slot, checkpoint   bytes of one slot: pages, recurrent state, the drafter's, and of one checkpoint
    usable      bytes for a plan: free memory less a reserve for other processes
    fits        for several numbers of slots, the context that a load without `-c` has
    host        memory of the host, if experts are there; host_free: what it has
    without     flags that put weights there, and without which the model fits; "": none
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
    host: HostPlan | None = None
    host_free: int = 0
    without: str = ""

    @property
    def fits_as_asked(self) -> bool:
        return self.asked.total <= self.usable and holds(self.host, self.host_free)

    def best(self, np: int = 0, n_ctx: int = 0) -> Fit | None:
        """The most slots, up to `np`, with enough tokens each. None: nothing fits.

        np     0: up to 8
        n_ctx  tokens of each slot; 0: a few thousand if `np` is given, else those of a long chat
        """
        d = self.description
        asked = [Fit(d.settings.np, d.n_ctx, self.asked)] if self.fits_as_asked else []
        able = [f for f in (*asked, *self.fits) if f.n_ctx and f.np <= (np or 8)]
        enough = n_ctx or min(FEW if np else ENOUGH, d.n_ctx_train)
        long = [f for f in able if f.n_ctx >= enough]
        return max(long, key=lambda f: f.np) if long else max(able, key=lambda f: f.n_ctx, default=None)


def fit(path: Path, settings: EngineSettings, vram: int = 0, ram: int = 0) -> FitReport:
    """Plan a load of `path`. vram: bytes free on an assumed GPU; ram: on its host, 0: as here. Raises the errors of `describe`."""
    with planning():
        return _fit(path, settings, AssumedGpu(vram, ram=ram) if vram else None)


def _fit(path: Path, settings: EngineSettings, assumed: AssumedGpu | None) -> FitReport:
    d = widened(describe(path, settings, assumed), tells=False)
    usable = usable_bytes(d)
    one, two = (plan_memory(resized(d, np, d.n_ctx)) for np in (1, 2))
    counts = sorted({*SLOTS, settings.np})
    return FitReport(
        description=d,
        asked=here(d, plan_memory(d)),
        kv_per_slot=two.kv - one.kv,
        state_per_slot=two.state - one.state,
        draft_per_slot=two.draft_kv - one.draft_kv,
        checkpoint=checkpoint_bytes(d.config.parts(), d.sizes),
        free=d.room.free,
        usable=usable,
        host=plan_host(d),
        host_free=host_bytes(d),
        without=without(d) if d.in_host or d.away else "",
        fits=tuple(_largest(d, np, usable) for np in counts),
    )


def _largest(d: Description, np: int, usable: int) -> Fit:
    """The tokens that a load with `np` slots and without `-c` gives each of them."""
    start = resized(d, np, min(START_CTX, d.n_ctx_train))
    wide = widened(replace(start, settings=replace(start.settings, ctx=0)), tells=False)
    plan = here(wide, plan_memory(wide))
    fits = plan.total <= usable and holds(plan_host(wide), host_bytes(wide))
    return Fit(np, wide.n_ctx if fits else 0, plan)


def holds(plan: HostPlan | None, free: int) -> bool:
    """Whether the host has the memory."""
    return plan is None or plan.total <= free
