"""The fit of a model to card and host: where it does not fit on the card, tables of which a token reads a few rows go to host memory, then experts, and
the rest of the card holds copies of them. Of a model without experts the feed-forwards of the first blocks go there."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch

from pyspec.cuda.machine import bandwidth
from pyspec.engine.plan.describe import LEAST_CTX, START_CTX, Description, resized
from pyspec.engine.plan.memory_plan import CUDA_BYTES, PIECE_BYTES, SPARE_BYTES, size
from pyspec.engine.plan.placement import (
    DENSE,
    EXPERTS,
    N_POOL,
    NOTHING,
    FeedForward,
    Rates,
    assumed_rates,
    bounds,
    even,
    in_host,
    placement,
    within,
)
from pyspec.engine.plan.planned_bytes import (
    experts_in,
    host_bytes,
    job_bytes,
    load_bytes,
    placed_bytes,
    plan_host,
    plan_memory,
)
from pyspec.errors import DoesNotFit
from pyspec.models.kernels import token_bytes
from pyspec.models.placement import ON_CARD
from pyspec.models.wants import HEAD, TABLES, TOKEN_INPUTS

log = logging.getLogger(__name__)


def fitted(d: Description) -> Description:
    """Tables, experts and feed-forwards where flags put them, or, where none says so and the model does not fit on the card, in host memory: tables
    first, no more than have to; then experts; where it has none and not even one slot would fit, as few feed-forwards as have to: shorter requests
    are faster. The order in which things stay: all other weights, keys and values, the drafter with its experts, states; then slots, evenly on all blocks.
    """
    if not d.is_cuda or d.settings.tp > 1:
        return d
    given = d = replace(d, placement=ON_CARD, draft_placement=ON_CARD)
    n_ctx = d.settings.ctx or min(d.settings.fit_ctx or START_CTX, d.n_ctx_train)
    d = _with_tables(resized(d, d.settings.np, n_ctx))
    given = replace(given, placement=d.placement)
    if (picked := _picked(d)) is None:
        return _without_experts(d) or given
    blocks, draft_blocks = picked
    both = blocks + draft_blocks

    def with_slots(slots: tuple[int, ...]) -> Description:
        n = len(blocks)
        return replace(
            d,
            placement=placement(blocks, slots[:n], d.wanted.dense, d.placement.tables),
            draft_placement=placement(draft_blocks, slots[n:], d.draft_wanted.dense),
        )

    room = _left(with_slots((0,) * len(both)))
    if d.settings.moe_cache_mib >= 0:
        room = min(room, d.settings.moe_cache_mib << 20)
    placed = with_slots(even(both, max(room, 0)))
    # of a small model experts on their way take more than the experts
    is_free = _is_free(d) and not d.draft_wanted
    return given if is_free and plan_memory(placed).total >= plan_memory(given).total else placed


def _with_tables(d: Description) -> Description:
    """With tables in host memory: those that flags put there, and, the largest first, those for which the card has no room beside what flags leave there."""
    asked, tensors, (blocks, draft_blocks) = d.wanted.tables, d.file.tensors, _asked(d)
    tables = tuple(name for name in asked if asked[name])
    draft = placement(draft_blocks, (0,) * len(draft_blocks), d.draft_wanted.dense)
    free = [name for name in TABLES if name in tensors and name not in asked and _may_fit(d)]
    for name in sorted(free, key=lambda name: -tensors[name].n_bytes):
        own = placement(blocks, (0,) * len(blocks), d.wanted.dense, tables)
        by_flags = replace(d, placement=own, draft_placement=draft)
        if plan_memory(by_flags).total <= d.room.usable:
            break
        if tensors[name].n_bytes <= _host_room(by_flags):
            tables = *tables, name
    return replace(d, placement=placement((), (), (), tables))


def _host_room(d: Description) -> int:
    """Bytes of the host for weights of one replica, beside those that are there."""
    room = (host_bytes(d) - SPARE_BYTES) // d.settings.replicas - job_bytes(d)
    return room - placed_bytes(d) - sum(t.n_bytes for t in d.tables_away)


def _left(d: Description) -> int:
    """Bytes of the card that neither the plan nor a load takes."""
    plan = plan_memory(d)
    later = plan.activations + plan.staging + plan.workspace - CUDA_BYTES
    return d.room.usable - plan.total - max(0, load_bytes(d) - later)


def _without_experts(d: Description) -> Description | None:
    """With as few feed-forwards in host memory as have to be there, of the first blocks; None where that is not free, or of no use."""
    room, blocks = _host_room(d), [block for block in d.blocks if block.dense]
    if not _is_free(d) or has_experts(d):
        return None
    least = resized(d, 1, d.settings.ctx or min(d.settings.fit_ctx or LEAST_CTX, d.n_ctx))
    if min(plan_memory(of).total for of in (d, least)) <= d.room.usable:
        return None

    def with_first(n: int) -> Description:
        prefixes = [block.prefix for block in blocks[:n]]
        return replace(d, placement=placement((), (), prefixes, d.placement.tables))

    most = sum(size <= room for size in accumulate(block.dense for block in blocks))
    n = bisect_left(range(1, most + 1), 0, key=lambda n: _left(with_first(n))) + 1
    return with_first(n) if n <= most else None


def has_experts(d: Description) -> bool:
    return any(block.n_expert for block in d.blocks)


def _is_free(d: Description) -> bool:
    """Whether the fit may put experts, or feed-forwards of a model without any, into host memory."""
    is_there = any(block.experts or block.dense for block in d.blocks)
    return _may_fit(d) and is_there and not d.wanted.given


def _may_fit(d: Description) -> bool:
    """Whether the fit may put anything into host memory."""
    return d.settings.fit == "on" and d.dense is None


def _asked(d: Description) -> tuple[tuple[FeedForward, ...], tuple[FeedForward, ...]]:
    """Those whose experts flags put there."""
    own = tuple(b for b in d.blocks if b.prefix in d.wanted.experts)
    return own, tuple(b for b in d.draft_blocks if b.prefix in d.draft_wanted.experts)


def _picked(d: Description) -> tuple[tuple[FeedForward, ...], tuple[FeedForward, ...]] | None:
    """Blocks of the target and of the drafter whose experts go to host memory; None: nothing goes there."""
    asked, draft_asked = _asked(d)
    with_experts = tuple(block for block in d.blocks if block.n_expert)
    if with_experts and _is_free(d) and plan_memory(d).total > d.room.usable:
        asked = within(with_experts, _host_room(d) - sum(b.experts for b in draft_asked))
    return (
        (asked, draft_asked) if asked or draft_asked or d.wanted.dense or d.draft_wanted.dense else None
    )


def check_host(d: Description) -> None:
    """Refuse experts, feed-forwards and tables that the host's memory does not hold. Raises DoesNotFit."""
    plan = plan_host(d)
    if plan is None:
        return
    free = host_bytes(d)
    log.info("host memory: %s; %s free", plan, size(free))
    if plan.total > free:
        flags = d.wanted.given or d.draft_wanted.given
        raise DoesNotFit(
            f"needs {size(plan.total)} of host memory ({plan}), {size(free)} are free; fewer blocks there are needed ({flags}), or a "
            "more quantised file. There is no third place: from a disk a token would take seconds"
        )


def without(d: Description) -> str:
    """The flag or the memory that would put experts, or feed-forwards, into host memory where they are all on the card; where flags put them there,
    the flags without which the model fits; "" where there are none."""
    if not d.is_cuda or d.settings.tp > 1:
        return ""
    if d.in_host or d.away:
        flags = " ".join(filter(None, (d.wanted.given, d.draft_wanted.given)))
        bare = fitted(replace(d, wanted=NOTHING, draft_wanted=NOTHING)) if flags else d
        host, fits = plan_host(bare), plan_memory(bare).total <= d.room.usable
        return (
            f"without {flags}"
            if flags and fits and (host is None or host.total <= host_bytes(d))
            else ""
        )
    what = "experts" if has_experts(d) else "feed-forwards"
    weights = sum(block.experts if what == "experts" else block.dense for block in d.blocks)
    if not weights:
        return ""
    if _is_free(d):
        need = weights + job_bytes(d) + SPARE_BYTES
        free = host_bytes(d)
        return (
            f"{size(need)} of host memory for {what}, where {size(free)} are free" if need > free else ""
        )
    if d.settings.fit == "off":
        return f"-fit on, which puts {what} into host memory"
    return f"without {d.wanted.given}, so that {what} may go to host memory" if d.wanted.given else ""


def share_on_card(d: Description) -> float:
    """Of the target's experts, those that have a place on the card."""
    total = sum(block.n_expert for block in d.blocks)
    away = sum(
        block.n_expert - n for block in d.blocks if (n := d.placement.slots(block.prefix)) is not None
    )
    return 1 - away / total if total else 1.0


def rates_of(d: Description) -> Rates:
    """Measured on this machine, or assumed for a GPU that is not here."""
    if d.assumed is not None:
        return assumed_rates(d.assumed.free)
    return _measured(d.device)


@cache
def _measured(device: torch.device) -> Rates:
    card, host = bandwidth(device), bandwidth(torch.device("cpu"))
    torch.cuda.empty_cache()  # the plan has all of the card
    return Rates(card, host, f"measured: GPU {card / 1e9:,.0f} GB/s, host {host / 1e9:,.0f} GB/s")


def expected(d: Description, rates: Rates, n_row: int = 1) -> dict[str, float]:
    """`placement.bounds` of the model as it is placed. n_row: of a forward, in which feed-forwards in host memory are read once"""
    tensors = {name: d.file.tensors[name] for name in d.config.tensors(d.file) if name in d.file.tensors}
    away = in_host(d.placement, d.file.tensors)
    stays = {name: t for name, t in tensors.items() if not EXPERTS.fullmatch(name) and name not in away}
    for name in (
        TABLES if HEAD in tensors else (TOKEN_INPUTS,)
    ):  # a token reads a few rows; without a head the embedding is it, too
        stays.pop(name, None)
    trunk = sum(t.n_bytes for t in stays.values())
    dense = sum(block.dense for block in d.blocks if block.prefix in d.placement.dense)
    products = n_row * sum(
        t.n_elements for name, t in tensors.items() if name in away and DENSE.fullmatch(name)
    )
    active = sum(
        block.experts * spec.n_used // spec.n_expert
        for block, parts in zip(d.blocks, d.config.blocks, strict=True)
        for spec in experts_in(parts.specs)
    )
    return bounds(trunk, active, share_on_card(d), rates, dense, products)


def fit_lines(d: Description) -> list[str]:
    """Where tables, experts and feed-forwards are, and the rates that memory allows, in a few lines; nothing if all is on the card."""
    tables = [
        f"table: {t.name}, {size(t.n_bytes)}, is in host memory; a token reads {token_bytes(d.config, d.file, d.on, t.name):,} bytes of it over the link"
        for t in d.tables_away
    ]
    lines = [*tables, *(_lines_of_experts(d) if d.in_host else [])]
    if d.away:
        there, all = (sum(block.dense for block in of) for of in (d.away, (*d.blocks, *d.draft_blocks)))
        lines.append(
            f"feed-forwards: {size(there)} of {len(d.away)} blocks, {there / all:.0%} of all without experts, are in host memory, where the CPU "
            "multiplies with them"
        )
    if not d.in_host and not d.away:
        return lines
    rates = rates_of(d)
    one, four = (expected(d, rates, n_row) for n_row in (1, 4))
    rate = one["uniform"]
    found = ", ".join(f"{one[name]:.0f} {name}" for name in one) if d.in_host else f"{rate:.1f}"
    by = ", by routing" if d.in_host else ""
    lines.append(
        f"forecast of what memory allows at most{by}: {found} tokens/s, one stream without drafts ({rates.said})"
    )
    if d.away and not d.in_host:
        lines.append(
            f"a forward of four rows, one and three drafts, takes about {rate / four['uniform']:.2f} times as long as one of one row"
        )
    return lines


def _lines_of_experts(d: Description) -> list[str]:
    blocks, slots = zip(*d.in_host, strict=True)
    host = size(sum(block.experts for block in blocks))
    n_block, alone = len(slots), sum(block.n_expert > 0 for block in (*d.blocks, *d.draft_blocks))
    least = sum(block.expert + N_POOL * PIECE_BYTES for block in blocks)
    why = "" if any(slots) or not d.settings.moe_cache_mib else f" (one of each takes {size(least)})"
    return [
        f"experts: {host} of {n_block} of {alone} blocks are in host memory; of each block {_span(slots)} of {_span([b.n_expert for b in blocks])} "
        f"are on the GPU as well{why}, so {share_on_card(d):.0%} of the model's have a place there"
    ]


def _span(numbers: Sequence[int]) -> str:
    """Of numbers that may differ."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} or {high}" if high == low + 1 else f"{low} to {high}"
