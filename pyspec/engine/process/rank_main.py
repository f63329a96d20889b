"""The process of a rank other than the first: it loads its share of the model, joins the others and runs calls.

It ends with the first rank: a thread watches the link. Nothing is decided here.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress

import torch

from pyspec import draft
from pyspec.config import EngineSettings
from pyspec.cuda import checker, kernel_context, prepare
from pyspec.cuda.collective import Collective
from pyspec.cuda.context import context_of, gpu_lock
from pyspec.cuda.kernel_context import KernelContext
from pyspec.cuda.op import tiers_of
from pyspec.cuda.ops.attend import plan as attend_plan
from pyspec.cuda.rank import Rank
from pyspec.device.follow import Follower, RankTable
from pyspec.device.worker import failure_of
from pyspec.draft.choice import plan_draft
from pyspec.draft.drafter import Drafter, DraftOptions, DraftPlan, TargetFile
from pyspec.engine.load.ranks import OPERATION_S
from pyspec.engine.messages import Link, LoadShare, ShareFailed, ShareState, portable
from pyspec.engine.plan.describe import batch_of
from pyspec.engine.plan.memory_plan import DeviceRoom, cap_memory, size
from pyspec.engine.process.engine_main import log_to, settle
from pyspec.errors import DoesNotFit, PyspecError
from pyspec.gguf import open_gguf
from pyspec.models import read_config
from pyspec.models.decoder import Decoder
from pyspec.models.ropes import flags_of
from pyspec.models.target import Target
from pyspec.models.weights import Weights, cuts_of
from pyspec.slots.arena import Arena
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import allocate
from pyspec.slots.parts import CacheSizes
from pyspec.slots.recurrent import late_rows
from pyspec.slots.table import SlotTable

log = logging.getLogger(__name__)

BEAT_S = 0.5
FAILED = 70  # exit status after ShareFailed was sent


def sizes_of(s: EngineSettings, table: SlotTable, width: int, device: torch.device) -> CacheSizes:
    """Sizes of this rank's memory, as on the first rank (`Description.sizes`)."""
    kv, n_late = KvFormat.named(s.kv_type, s.kv_type_v), late_rows(device)
    n_chunk = 0 if s.swa_full else batch_of(s, device)
    return CacheSizes(s.np, table.n_alloc_row, s.page_size, width, kv, n_late, n_chunk)


def load(share: LoadShare, link: Link) -> Follower:
    """Load this rank's part of the model, and join the others."""
    s, device = share.settings, torch.device(share.device)
    tiers, demoted = tiers_of(s.kernels), frozenset(s.demoted)
    kernel_context.use(KernelContext(tiers, s.exact, demoted, cpu_rows=s.cpu_activations))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if (room := DeviceRoom.of(device, s)).usable < share.n_bytes:
            raise DoesNotFit(
                f"rank {share.index} needs {size(share.n_bytes)}, {size(room.free)} are free on {device}"
            )
        cap_memory(device, s)
    else:
        torch.set_num_threads(s.threads)
    file = open_gguf(share.path)
    config, table = read_config(file), RankTable(s.np, share.n_page, s.page_size)
    link.send(ShareState("joins"))
    ranks = Collective(Rank(share.index, s.tp), device, share.store, OPERATION_S)
    memory = allocate(config.share(s.tp).parts(), sizes_of(s, table, share.width, device), device)
    dense = getattr(torch, share.dense) if share.dense else None
    cuts = cuts_of(config.tensors(file))
    weights = Weights(file, device, dense, wide=share.wide, ranks=ranks, cuts=cuts, rope=flags_of(s))
    target = Decoder(config, weights, memory)
    drafter, plan = _load_drafter(share, target, table)
    attend_plan.reserve(device, share.n_attention)
    prepare.settle(attend_plan.late(device))
    checker.close()
    arena = _arena(share, target, share.width)
    return Follower(target, memory, table, drafter, arena, plan)


def _load_drafter(
    share: LoadShare, target: Target, table: SlotTable
) -> tuple[Drafter | None, DraftPlan]:
    """This rank's part of a drafter that ranks divide, and the plan of it, which is the first rank's."""
    s = share.settings
    own_file = None if s.draft_path is None else open_gguf(s.draft_path)
    plan = plan_draft(own_file, TargetFile(open_gguf(share.path), target.config, target.device), s)
    if not plan.is_divided:
        return None, plan
    dense = getattr(torch, share.dense) if share.dense else None
    options = DraftOptions(settings=s, dense=dense, wide=share.wide)
    drafter: Drafter = draft.find(plan.kind).load(plan, target, table, options)
    drafter.use_graphs(lambda: _arena(share, target, max(share.width, plan.overhang, plan.n_waiting)))
    return drafter, plan


def _arena(share: LoadShare, target: Target, width: int) -> Arena | None:
    """A place for the batches that the first rank has in its own: they are padded alike, in a graph or not."""
    if not share.n_arena_page or not target.capturable:
        return None
    return Arena(share.settings.np, share.n_arena_page, target.device, width)


def run(link: Link, descriptor: int) -> None:
    """Load the share in the first message, and run the calls that follow."""
    share = link.receive()
    if not isinstance(share, LoadShare):
        return
    log_to(link, share.log_level)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    met: list[Collective] = []
    threading.Thread(target=_beat, args=(link, met), daemon=True).start()
    context = context_of(torch.device(share.device))
    try:
        with context.current():
            follower = load(share, link)
            met.append(follower.ranks)
            link.send(ShareState("loaded"))
            while (call := link.receive()) is not None:
                with gpu_lock(follower.device):
                    follower.obey(call)
    except PyspecError as e:
        _fail(link, e)
    except Exception as e:
        log.exception("a rank failed")
        _fail(link, failure_of(e))


def _fail(link: Link, error: PyspecError) -> None:
    with suppress(OSError):
        link.send(ShareFailed(portable(error)))
    logging.shutdown()
    os._exit(FAILED)


def _beat(link: Link, met: list[Collective]) -> None:
    """Send heartbeats, and what this rank waits in once it has loaded."""
    with suppress(OSError):
        while True:
            link.send(ShareState("alive", met[0].calls.waits()) if met else ShareState("alive"))
            time.sleep(BEAT_S)


def _end_with(descriptor: int) -> None:
    """End as soon as the first rank has: this one may be waiting for it in a sum."""
    watched = select.poll()
    watched.register(descriptor, select.POLLRDHUP)
    watched.poll()
    os._exit(0)


def main(descriptor: int) -> None:
    """Run the process. `descriptor` is its end of the link."""
    run(Link(settle(descriptor)), descriptor)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
