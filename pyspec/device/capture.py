"""Before the first round: capture the graphs of every batch size, and reserve the memory of forwards."""

from __future__ import annotations

import logging

import torch

from pyspec import progress
from pyspec.device.worker import Worker
from pyspec.slots.arena import BUCKETS, PROMPTS, Arena, graph_shapes
from pyspec.slots.batch import Seq, SeqMode, lay_out

log = logging.getLogger(__name__)

N_SMALL = 32  # pieces of half a megabyte, for smaller tensors


def hold(device: torch.device, n_bytes: int) -> None:
    """Reserve `n_bytes` in one piece of the GPU allocator's memory, and a few small pieces.

    Forwards of prompts allocate differently for each chunk. One large piece serves them all; without it the allocator would at times have
    to ask the driver for a size that it has not kept.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()  # frees pieces of other sizes, from earlier forwards
    try:
        pieces = [torch.empty(512 << 10, dtype=torch.uint8, device=device) for _ in range(N_SMALL)]
        pieces.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        del pieces
    except torch.OutOfMemoryError:  # a shared card, for example: forwards then allocate as they run
        log.info("the GPU has no %.2f GiB in one piece", n_bytes / (1 << 30))


def _capture_prompts(worker: Worker, arena: Arena, most: int) -> None:
    """Capture graphs of single prompts: launching a thousand kernels one by one takes the host longer than some devices need to run them.

    Each is captured at its full number of rows, because a graph keeps the host's numbers. most: rows of the longest.
    """
    try:
        for n_row in (rows for rows in reversed(PROMPTS) if rows <= most):
            arena.prompts.add(n_row)
            for _ in range(2):
                seq = Seq(0, 0, [0] * n_row, mode=SeqMode.KEEP, n_out=1)
                worker.forward(lay_out(worker.table, [seq], worker.device, arena=arena))
    except Exception:  # another library's attention may not support graphs; prompts are then only slower
        if worker.target.ranks is not None:  # the other ranks wait in this forward
            raise
        log.exception("prompts run without graphs")
        arena.prompts.clear()


@torch.inference_mode()
def capture(worker: Worker, n_prompt_row: int, n_bytes: int = 0, n_beside: int = 0) -> None:
    """Capture the graphs of every batch size. These forwards run on empty slots, and their results are not used.

    The largest come first (cuda/graph.py). A graph is captured at the second call, and kernels are chosen for the captured widths: rows are
    split evenly. n_prompt_row: rows of the largest forward of prompts; n_beside: of one with decoding slots; n_bytes: see `hold`.
    """
    table, plan, device = worker.table, worker.plan, worker.device
    slots, width = table.slots, max(worker.n_draft + 1, plan.overhang)
    if (
        worker.arena is None
        or not worker.arena.pads
        or table.n_page < len(slots) * table.pages_for(width)
    ):
        return  # no graphs, or too few pages to try them all: they are captured at their first use
    shapes = sorted(
        graph_shapes(len(slots), worker.n_draft + 1, singles=plan.n_held > 0, most=worker.arena.n_row),
        reverse=True,
    )
    for i_shape, (n_row, n_seq) in enumerate(shapes):
        progress.report("graphs", i_shape / len(shapes))
        shares = [n_row // n_seq + (i < n_row % n_seq) for i in range(n_seq)]
        seqs = [Seq(i, 0, [0] * n, n_out=n) for i, n in enumerate(shares)]
        for _ in range(2):
            worker.forward(lay_out(table, seqs, device, arena=worker.arena))
    if worker.drafter is not None:
        worker.drafter.capture()
    most = min(n_prompt_row, table.n_row // len(slots), worker.target.most_captured_prompt)
    if most and device.type == "cuda":
        _capture_prompts(worker, worker.arena, most)
    worker.forward.seal()
    # Run prompts once: their memory is allocated, and libraries are loaded, before the first request.
    hold(device, n_bytes)
    n_row = min(n_prompt_row, table.n_row // len(slots))
    while n_row > BUCKETS[-1]:
        worker.forward(lay_out(table, [Seq(0, 0, [0] * n_row, mode=SeqMode.KEEP, n_out=1)], device))
        n_row //= 2
    n_row = min(n_beside - 1, table.n_row // len(slots))
    if len(slots) > 1 and n_row > BUCKETS[-1]:  # beside a decoding slot, a prompt takes other kernels
        seqs = [Seq(0, 0, [0] * n_row, mode=SeqMode.KEEP, n_out=1), Seq(1, 0, [0], n_out=1)]
        for _ in range(2):
            worker.forward(lay_out(table, seqs, device))
    worker.memory.reset(0)
    for slot in slots:
        table.drop(slot)
