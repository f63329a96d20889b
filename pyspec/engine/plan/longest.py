"""The default length of a request: as many tokens as fit beside the model, up to its training length.

Slots share the memory evenly, so that all of them may run requests without a limit at once: a request's pages are promised before it
starts. Speed goes before length: copies that would be made beside START_CTX (describe.py) tokens a slot stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pyspec.config import MAX_CTX, MAX_POOL
from pyspec.engine.plan.describe import LEAST_CTX, Description, resized
from pyspec.engine.plan.fitted import fitted
from pyspec.engine.plan.memory_plan import MemoryPlan
from pyspec.engine.plan.planned_bytes import plan_memory

log = logging.getLogger(__name__)

STEP = 256  # contexts are rounded to multiples


@dataclass(frozen=True)
class Room:
    """Memory of a device for a plan.

    usable  bytes; slots  most of these for slots' content, if others need the memory, too
    """

    usable: int
    slots: int

    def holds(self, plan: MemoryPlan) -> bool:
        """True if a plan fits."""
        return plan.total <= self.usable and plan.kv + plan.state + plan.draft_kv <= self.slots


def here(d: Description, plan: MemoryPlan) -> MemoryPlan:
    """The plan's memory on one device: GPUs have a rank each, a CPU has all ranks."""
    return plan if d.is_cuda else plan.together(d.settings.tp)


def usable_bytes(d: Description) -> int:
    """Bytes of the device for a plan: free memory less a reserve for other processes, a replica's part of it on a CPU."""
    return d.room.usable // (1 if d.is_cuda else d.settings.replicas)


def most_tokens(
    planned: Callable[[int], MemoryPlan], most: int, fits: Callable[[MemoryPlan], bool]
) -> int:
    """The most tokens whose plan fits: `most`, or a multiple of STEP below; 0 if none fits."""
    if fits(planned(most)):
        return most
    low, high = 0, -(-most // STEP)  # in steps: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(planned(middle * STEP)) else (low, middle)
    return low * STEP


def widened(d: Description, *, tells: bool = True) -> Description:
    """Place experts and feed-forwards (`fitted`), and set the length of a request to the most tokens that fit, if none is given, and log it. A plan
    for very few tokens is left for the load to refuse. Where experts are in host memory, memory goes to their copies before length."""
    s, trained, d = d.settings, d.n_ctx_train, fitted(d)
    if s.ctx or (d.in_host and (s.fit_ctx or plan_memory(d).total <= usable_bytes(d))):
        return d
    most = min(trained, MAX_CTX if s.kv_pool else max(d.n_ctx, MAX_POOL // s.np))
    if s.kv_pool:  # a fixed pool of pages: promise each slot its share, or START tokens
        most = min(most, max(d.n_ctx, d.n_page // s.np * s.page_size - d.n_overhang))
    first, usable = here(d, plan_memory(d)), usable_bytes(d)
    short = Room(usable, usable)
    rest = usable - first.total + first.kv + first.state + first.draft_kv
    # other programs, and files that are read, use the same memory
    room = short if d.is_cuda else Room(usable, rest // 2)

    def planned(n_ctx: int) -> MemoryPlan:
        return here(d, plan_memory(resized(d, s.np, n_ctx)))

    def as_fast(plan: MemoryPlan) -> bool:
        return room.holds(plan) and plan.wide >= first.wide and plan.draft_head >= first.draft_head

    n = most_tokens(planned, most, as_fast) if short.holds(first) else 0
    if n < d.n_ctx:
        n = d.n_ctx if short.holds(first) else most_tokens(planned, min(most, d.n_ctx), short.holds)
    if n < min(LEAST_CTX, most):
        return d
    if not tells:
        return resized(d, s.np, n)
    why = (
        "as the model was trained"
        if n == d.config.n_ctx_train
        else "as rope is stretched"
        if n == trained
        else "as the free memory allows"
        if n < most
        else "as -np leaves"
    )
    each = "each of the" if s.np > 1 else "the"
    log.info("-c %d: tokens a request, %s, for %s %d slot%s", n, why, each, s.np, "s" * (s.np > 1))
    return resized(d, s.np, n)
