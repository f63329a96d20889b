"""The bytes of a load beside other models, by place. A router asks for it before it loads one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyspec.config import MAX_CTX, MAX_POOL, EngineSettings
from pyspec.cpu.kernels import planning
from pyspec.engine.plan.apart import LoadNeed
from pyspec.engine.plan.describe import LEAST_CTX, Description, describe, resized
from pyspec.engine.plan.fitted import fitted
from pyspec.engine.plan.longest import here, most_tokens, widened
from pyspec.engine.plan.memory_plan import AssumedGpu, MemoryPlan, size
from pyspec.engine.plan.planned_bytes import plan_host, plan_memory

HOST = "host"
PROCESS_BYTES = 256 << 20  # of an engine's process beside its plan: 205 MiB with the demo pair on a CPU
SHARE = 0.5  # of a budget that a model takes for contexts without a named length


def need_of(path: Path, settings: EngineSettings, budget: Mapping[str, int]) -> LoadNeed:
    """Plan a load of `path` on a machine where all models together may use `budget`. Raises the errors of `describe`.

    Without a context in `settings`, requests get as much as leaves half of the budget to other models, but no less than usual.
    """
    device = settings.device
    card = "cuda:0" if device in ("auto", "cuda") else device
    with planning():
        assumed = AssumedGpu(budget[card], ram=budget[HOST]) if card in budget else None
        given = describe(path, settings, assumed)
        d = fitted(given)
        place = card if d.is_cuda else HOST
        if d.in_host:
            d = widened(given, tells=False)
        elif not settings.ctx:
            d = _shared(d, int(SHARE * budget.get(place, 0)))
        plan, host = plan_memory(d), plan_host(d)
    n_rank, n_replica = d.settings.tp, settings.replicas
    found = {
        HOST: n_replica * (PROCESS_BYTES + (settings.cache_ram << 20 if settings.prefix_cache else 0))
    }
    if host is not None:
        found[HOST] += n_replica * host.total
    if d.is_cuda:
        first = int(card.partition(":")[2])
        for i in range(n_rank * n_replica):
            found[f"cuda:{first + i}"] = (plan.of_others if i % n_rank else plan).total
    else:
        found[HOST] += n_replica * here(d, plan).total
    return LoadNeed(
        found,
        d.n_ctx,
        f"{plan}; -np {settings.np} -c {d.n_ctx}; {size(sum(found.values()))} with its process",
        _rest(plan, found, card if d.is_cuda else "", d.settings) if settings.parks else None,
    )


def _rest(
    plan: MemoryPlan, found: Mapping[str, int], card: str, settings: EngineSettings
) -> dict[str, int] | None:
    """Bytes by place while it is parked: slots have none, weights lie in the host's memory, and texts within what the prefix cache may have
    there. A process keeps its graphs and workspaces on a card. None for several GPUs and replicas."""
    if settings.tp > 1 or settings.replicas > 1:
        return None
    slots = plan.kv + plan.state + plan.draft_kv
    if not card:
        return {HOST: found[HOST] - slots}
    stays = plan.activations + plan.workspace
    return {HOST: found[HOST] + plan.total - slots - stays, card: stays}


def _shared(d: Description, room: int) -> Description:
    """With requests as long as the room allows, and no longer than the model was trained for."""
    most = min(d.n_ctx_train, MAX_CTX, max(d.n_ctx, MAX_POOL // d.settings.np))

    def planned(n_ctx: int) -> MemoryPlan:
        return here(d, plan_memory(resized(d, d.settings.np, n_ctx)))

    n = most_tokens(planned, most, lambda plan: plan.total <= room)
    return resized(d, d.settings.np, max(n, min(d.n_ctx, max(LEAST_CTX, n))))
