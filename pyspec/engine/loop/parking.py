"""To park a loaded model: its weights leave the GPU, and its slots' memory goes back to the system.

Called on the engine's thread while nothing runs. Texts that requests left stay in the prefix cache: their pages and states wait in host memory,
within `--cache-ram`, and are back in their places after a wake. What that has no room for is forgotten, so that a text is read anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.movable import unlock
from pyspec.engine.loop.loop import Loop
from pyspec.errors import NotSupported
from pyspec.heap import give_back_memory
from pyspec.slots.mapped import empty
from pyspec.slots.memory import planes_of, read_planes, write_planes
from pyspec.slots.states import PIECE

log = logging.getLogger(__name__)

FLUSH_S = 2.0  # in which texts are still copied for the cache on disk


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages whose content waits on the host: of each plane a tensor, as from `read_planes`."""

    pages: Sequence[int]
    content: Sequence[Tensor]


def park(loop: Loop) -> None:
    """Give up all memory but what a wake needs. Raises NotSupported before anything has changed; DoesNotFit, and the model goes on."""
    began, worker = time.monotonic(), loop.worker
    device = worker.device
    movable = loop.movable
    if (device.type == "cuda" and movable is None) or not worker.memory.is_whole:
        raise NotSupported("this model was not loaded to be parked, or several GPUs share it")
    loop.pictures.rest()
    with worker.lock:
        if loop.disk is not None:
            loop.disk.flush(FLUSH_S)
        planes = _planes(loop)
        pages = loop.cache.leave_device(sum(plane[0].nbytes for plane in planes))
        if movable is None:
            _empty(loop, planes, pages)
        else:
            try:
                kept = [
                    KeptPages(some, read_planes(planes, some, movable.keep))
                    for some in _in_pieces(planes, pages)
                ]
            except (OSError, MemoryError, torch.OutOfMemoryError) as e:
                log.warning("texts are forgotten, for want of memory to keep them: %s", e)
                loop.cache.table.clear()
                kept = []
            movable.park()
            loop.kept_pages = kept
            torch.cuda.empty_cache()
    log.info("parked in %.2f s, with %d pages of texts", time.monotonic() - began, len(pages))


def wake(loop: Loop) -> None:
    """Undo `park`. Raises DoesNotFit if the GPU's memory is taken: the model stays parked."""
    began = time.monotonic()
    movable = loop.movable
    if movable is not None:
        with loop.worker.lock:
            movable.wake()
            planes, kept, loop.kept_pages = _planes(loop), loop.kept_pages, []
            for i in range(len(kept)):  # no name may hold one when they are unlocked
                write_planes(planes, kept[i].pages, iter(kept[i].content))
            unlock(kept)
    log.info("awake after %.2f s", time.monotonic() - began)


def _planes(loop: Loop) -> list[Tensor]:
    return planes_of(loop.worker.pools(), loop.table.page_size)


def _in_pieces(planes: Sequence[Tensor], pages: Sequence[int]) -> Iterator[Sequence[int]]:
    """Pages of which one plane's are PIECE bytes at most: the device holds a copy of them meanwhile."""
    n = max(1, PIECE // max((plane[0].nbytes for plane in planes), default=1))
    return (pages[at : at + n] for at in range(0, len(pages), n))


def _empty(loop: Loop, planes: Sequence[Tensor], pages: Sequence[int]) -> None:
    """Give a CPU's memory of slots back to the system, but for these pages, in order."""
    for part in loop.worker.memory.parts:
        for tensor in () if part.paged else part.tensors():
            empty(tensor)
    for plane in planes:
        first = 0
        for page in (*pages, len(plane)):
            if page > first:
                empty(plane[first:page])
            first = page + 1
    give_back_memory()
