"""The state of a loop as plain data: a row for each slot, and the counters with their gauges."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.expert_cache import ExpertCache
from pyspec.engine.loop.job import Job
from pyspec.engine.loop.speculator import Speculator
from pyspec.engine.loop.stats import Stats
from pyspec.request import Metrics, SlotInfo
from pyspec.slots.cache import PrefixCache
from pyspec.slots.table import Slot, SlotTable


def slot_rows(
    table: SlotTable, jobs: Mapping[int, Job], speculator: Speculator, n_ctx: int
) -> list[SlotInfo]:
    """One row per slot. A round may pass while it is read."""
    return [_slot_row(slot, jobs.get(slot.index), speculator, n_ctx) for slot in table.slots]


def _slot_row(slot: Slot, job: Job | None, speculator: Speculator, n_ctx: int) -> SlotInfo:
    controller, window = speculator.controller, speculator.window(slot)
    row = SlotInfo(
        slot=slot.index,
        n_ctx=n_ctx,
        is_processing=job is not None,
        n_past=slot.n_past,
        speculative=controller.n_max > 0,
    )
    if job is None:
        return row
    lane = controller.lanes[slot.index]
    experts_per_row, miss_rate, row_ms = controller.rows.of_slot(slot.index)
    return replace(
        row,
        request=job.id,
        state="decode" if job.is_decoding else "prefill",
        n_prompt=job.n_prompt,
        n_prompt_processed=min(slot.n_past, job.n_prompt),
        n_cached=job.n_cached,
        n_decoded=job.n_predicted,
        n_remain=job.n_left,
        n_draft=lane.n_draft,
        draft_reason=lane.reason,
        draft_window=window,
        draft_window_reason=f"drafts see the last {window} tokens, half of the drafter's trained length"
        if window
        else "",
        acceptance=lane.acceptance,
        experts_per_row=experts_per_row,
        miss_rate=miss_rate,
        row_ms=row_ms,
        draft_n=sum(job.drafted),
        draft_n_accepted=sum(job.accepted),
        drafted_per_pos=tuple(job.drafted),
        accepted_per_pos=tuple(job.accepted),
        params=job.request.params,
        cache_salt=job.request.cache_salt,
    )


def metrics_of(
    stats: Stats,
    cache: PrefixCache,
    disk: DiskTier | None,
    processing: int,
    queued: int,
    suffix_bytes: int,
    experts: ExpertCache | None,
) -> Metrics:
    """The counters, with the gauges of pages, caches and queue. processing, queued: requests"""
    table, states = cache.table, cache.states
    on_device, on_host = states.n_bytes
    is_busy = processing or queued
    return replace(
        stats.counted(),
        requests_processing=processing,
        requests_queued=queued,
        seconds_since_step=time.monotonic() - stats.last_step if is_busy else 0.0,
        pages_used=table.n_page_used,
        pages_total=table.n_page,
        pages_cached=table.n_page_cached,
        states=len(states),
        states_device_bytes=on_device,
        states_host_bytes=on_host,
        suffix_bytes=suffix_bytes,
        disk_bytes=0 if disk is None else disk.n_bytes,
        disk_read_bytes=0 if disk is None else disk.read_bytes,
        disk_written_bytes=0 if disk is None else disk.written_bytes,
        expert_hits=0 if experts is None else experts.hits,
        expert_misses=0 if experts is None else experts.misses,
        expert_uploads=0 if experts is None else experts.n_upload,
        expert_caches_frozen=0 if experts is None else int(bool(experts.frozen)),
    )
