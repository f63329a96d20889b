"""Rows of pictures: encoded once, between rounds, and kept for texts that have them behind other beginnings.

A picture is encoded for a request that waits, once the cache has been asked and lacks a row of it. On a CPU parts of the encoder's blocks run
behind each round, with the engine's threads. Beside a GPU they have a thread, and on one a stream, too: a few blocks are launched behind a
round. Launching them can take far longer than a round: cuDNN's attention builds a plan for every number of patches, and torch takes that first
on Hopper. The thread waits for its slice, and copies rows to ordinary memory: to lock pages for each picture's held launches up for milliseconds.
The request that comes first reads the last picture's rows where they are.
An encoder that fails ends the requests that want the picture, and no other.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from pyspec.device.worker import Worker, is_device_error
from pyspec.engine.loop.job import Job, blamed
from pyspec.engine.loop.round import Work
from pyspec.errors import PyspecError, SlotError
from pyspec.repeats import limited
from pyspec.vision.encoder import Encoder
from pyspec.vision.picture import Picture

log = limited(__name__)

ALONE_S = 0.05  # most seconds that an engine without rounds waits for a step at once
MOST_KEPT = 256 << 20  # bytes of rows in host memory, besides those that requests wait with
SLICE_FLOP = 5e11  # of the blocks that a GPU is given between two rounds: some milliseconds
SLICE_S = 0.1  # in which a CPU encodes behind each round: less than it may read prompts


Rows = tuple[Tensor, Tensor]
"""Of a picture: in host memory, and where they were made."""


@dataclass(slots=True)
class Encoding:
    """A picture that is being encoded. aside: a slice that another thread takes"""

    handle: int
    steps: Iterator[Tensor | None]
    aside: Future[Rows | None] | None = None


class Pictures:
    """Encodes pictures for requests. Used on the engine's thread. encoder: None where the load sees nothing

    device     of the encoder; None: that of the worker
    are_whole  a row of a picture sees all of it, so no forward has a part of one
    has_news  a request came with pictures, or a picture was encoded, since admission looked last
    slice_s   seconds in which steps of an encoder are begun behind a round; 0: one step
    """

    def __init__(
        self,
        worker: Worker,
        encoder: Encoder | None,
        device: torch.device | None = None,
        *,
        are_whole: bool = False,
        most_bytes: int = MOST_KEPT,
    ) -> None:
        self.worker, self.encoder, self.are_whole = worker, encoder, are_whole
        self.device, self.most_bytes = device or worker.device, most_bytes
        self.has_news = False
        self.slice_s = SLICE_S if self.device.type == "cpu" else 0.0
        self.n_encoded = 0
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # by handle, the least recently used first
        self._queue: dict[int, Picture] = {}
        self._wanted: set[int] = set()  # since `forget_unwanted`
        self._failed: dict[int, PyspecError] = {}
        self._running: Encoding | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[Rows | None] | None = None  # of the thread
        self._fresh: tuple[int, Tensor] | None = None  # rows of the last picture, on the worker's GPU
        if encoder is not None and "cuda" in (self.device.type, worker.device.type):
            self._thread = ThreadPoolExecutor(1, "pyspec-pictures")
        if encoder is not None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which has the weights

    def warm_up(self) -> None:
        """Encode a large picture on a GPU: its memory is taken, and libraries are ready, before the first request. They keep handles for each
        thread."""
        if self.encoder is None or self._stream is None or self._thread is None:
            return
        p = self.encoder.projector
        side = min(isqrt(p.high) * p.step, (p.n_position or p.high) * p.patch)
        width, height = p.size_of(side, side)
        grid, pixels = p.grid(width, height), np.zeros((height, width, 3), np.uint8)
        whole = self.encoder.slices(Picture(b"", pixels, *grid, p.n_row(width, height)), p.n_block or 1)
        self._thread.submit(self._sliced, whole).result()

    def rest(self) -> None:
        """Wait for the thread, of a picture that nobody may want by now: the weights that it reads go next. Ignores errors of the device."""
        if self._last is not None:
            wait((self._last,))
        self._fresh = None

    @property
    def is_busy(self) -> bool:
        """A picture waits for its encoder, or is in it."""
        return self._running is not None or bool(self._queue)

    # -- requests ------------------------------------------------------------------------------------------------

    def ready(self, job: Job, n_have: int) -> bool:
        """True if the request holds all rows of pictures behind its first `n_have` tokens; what is missing will be encoded. Raises the error
        of a picture that can not be."""
        placed = dict(zip(job.images, job.request.images, strict=True))
        is_ready = True
        for span in job.images_behind(n_have):
            handle = span.handle
            if handle in job.rows:
                continue
            self._wanted.add(handle)
            if (rows := self._kept.get(handle)) is not None:
                self._kept.move_to_end(handle)
                job.rows[handle] = rows
            elif handle in self._failed:
                raise self._failed[handle]
            else:
                is_ready = False
                if self._running is None or self._running.handle != handle:
                    self._queue.setdefault(handle, placed[span].picture)
        return is_ready

    def bring(self, work: Iterable[Work]) -> None:
        """Bring the pictures of a round to the device: not all that its requests have, of which a long prompt may have many. SlotError if it has no
        memory for one."""
        for w in work:
            for span in w.seq.images:
                rows = w.job.rows[span.handle]
                assert isinstance(rows, Tensor)
                if self._fresh is not None and self._fresh[0] == span.handle:
                    (_, rows), self._fresh = self._fresh, None
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                try:
                    self.worker.show(span.handle, rows)
                except torch.OutOfMemoryError as e:
                    error = blamed(e)
                    assert isinstance(error, SlotError)
                    error.slot = w.slot.index
                    raise error from e

    def forget_unwanted(self) -> None:
        """Encode no picture that no request has wanted since the last call, and let failures be: they have been told."""
        wanted, self._wanted, self.has_news = self._wanted, set(), False
        self._failed.clear()
        for handle in self._queue.keys() - wanted:
            del self._queue[handle]
        if self._running is not None and self._running.handle not in wanted:
            self._running = None

    def hide_computed(self, jobs: Iterable[Job]) -> None:
        """Free rows that none of these seated requests has to read, on the device and of the requests."""
        unread: set[int] = set()
        for job in jobs:
            if job.rows and job.slot is not None:
                own = {span.handle for span in job.images_behind(job.slot.n_past)}
                for handle in job.rows.keys() - own:
                    del job.rows[handle]
                unread |= own
        if not self.worker.shown.keys() <= unread:
            self.worker.hide(unread)

    # -- beside rounds -------------------------------------------------------------------------------------------

    def step(self, *, is_alone: bool) -> None:
        """Run a slice of an encoder, if any picture waits. is_alone: no round runs, so wait for a device."""
        if not self.is_busy:
            return
        try:
            self._step(is_alone)
        except Exception as e:
            if is_device_error(e):
                raise
            assert self._running is not None
            log.exception("a picture could not be encoded")
            self._failed[self._running.handle], self._running, self.has_news = blamed(e), None, True

    @torch.inference_mode()
    def _step(self, is_alone: bool) -> None:
        running = self._running
        if running is None:
            handle = next(iter(self._queue))
            picture = self._queue.pop(handle)
            running = self._running = Encoding(handle, iter(()))
            running.steps = self._begun(picture)
        rows = None
        if running.aside is not None:
            if is_alone:
                wait((running.aside,), ALONE_S)
            if not running.aside.done():
                return
            rows, running.aside = running.aside.result(), None
        if rows is None and self._thread is not None:
            running.aside = self._last = self._thread.submit(self._sliced, running.steps)
        elif rows is None:
            rows = self._sliced(running.steps)
        if rows is not None:
            self._keep(running.handle, *rows)
            self._running, self.has_news = None, True

    @torch.inference_mode()
    def _sliced(self, steps: Iterator[Tensor | None]) -> Rows | None:
        """Take steps for a slice, and wait for a GPU. Another thread may call this: it touches nothing of this object that changes."""
        with torch.cuda.stream(self._stream):
            until = time.perf_counter() + self.slice_s
            while (rows := next(steps)) is None and time.perf_counter() < until:
                pass
            if self._stream is not None:
                self._stream.synchronize()
            return None if rows is None else (rows.cpu(), rows)

    def _begun(self, picture: Picture) -> Iterator[Tensor | None]:
        encoder = self.encoder
        assert encoder is not None, "a request with pictures came to a load without an encoder"
        flop = encoder.projector.block_flop(picture.nx * picture.ny)
        is_gpu = self.device.type == "cuda"
        return encoder.slices(picture, max(1, int(SLICE_FLOP / max(1, flop))) if is_gpu else 1)

    def _keep(self, handle: int, rows: Tensor, made: Tensor) -> None:
        self.n_encoded += 1
        self._kept[handle] = rows
        self._fresh = (handle, made) if made.is_cuda and made.device == self.worker.device else None
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > self.most_bytes:
            self._kept.popitem(last=False)


def _bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()
