"""CUDA graphs over batches in an arena: a whole forward for the price of one launch.

A graph is captured per bucket of rows and of sequences, from the second call on: the first runs eagerly, because a forward changes state and must
run exactly once per round, and because libraries set themselves up on first use. Capturing runs nothing. Nothing is captured
after warm-up, because a capture takes memory and the time of many rounds.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cpu.kernels import here
from pyspec.cpu.tape import CannotRecord, Recorded, TapeMemory
from pyspec.cuda.context import context_of
from pyspec.slots.batch import Batch

log = logging.getLogger(__name__)

N_TAPE = 64  # recorded forwards that are kept

Out = TypeVar("Out")
# Rows and sequences with padding, whether no sequence has two rows, whether it is a prompt
Key = tuple[int, int, bool, bool]


class GraphPool:
    """Memory of graphs that never run at the same time: they share one workspace. A graph may overwrite the results of another, so
    kinds of graphs share a pool only if each copies its results to a place of its own. Capture the graphs with the most rows first:
    smaller ones fit into their blocks, and larger ones would not.
    """

    def __init__(self) -> None:
        self.handle: Any = None  # torch has no public name for its type

    def taken(self) -> Any:
        """torch's handle, made on first use."""
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle


class Graphed(Generic[Out]):
    """`fn(batch)`, replayed for batches in an arena; other batches, and devices without graphs, run kernel by kernel.

    The result of a replay is overwritten by the next one of the same bucket, on a CPU by the next one of any.

    by_single: `fn` differs for batches of one row a sequence, which have graphs of their own
    pool: memory shared with other graphs
    """

    def __init__(
        self, fn: Callable[[Batch], Out], *, by_single: bool = False, pool: GraphPool | None = None
    ) -> None:
        self.fn, self.by_single, self.pool = fn, by_single, pool or GraphPool()
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Out]] = {}
        self._seen: set[Key] = set()
        self._sealed = False
        self._tapes: dict[tuple[int, int, int, bool], Recorded[Out]] = {}
        self._taped_once: set[tuple[int, int, int, bool]] = set()
        self._memory, self._cannot = TapeMemory(), ""
        self._wakes: list[Callable[[], None]] = []  # of the device

    def __call__(self, batch: Batch) -> Out:
        if batch.bucket is None:
            return self.fn(batch)
        if batch.tokens.device.type != "cuda":
            return self._taped(batch)
        key = batch.bucket, batch.n_place, self.by_single and batch.single, batch.prompt
        if key not in self._graphs:
            if self._sealed or key not in self._seen:
                self._seen.add(key)
                return self.fn(batch)
            self._capture(key, batch)
        graph, out = self._graphs[key]
        for wake in self._wakes:
            wake()
        graph.replay()
        return out

    def _taped(self, batch: Batch) -> Out:
        """On a CPU: a tape for each shape, recorded at its first use. Recording runs nothing."""
        if self._cannot:
            return self.fn(batch)
        key = batch.n_row, batch.n_place, len(batch.out_rows), self.by_single and batch.single
        recorded = self._tapes.pop(key, None)
        if recorded is None:
            try:
                recorded = Recorded(partial(self.fn, batch), self._memory)
            except CannotRecord as e:
                self._cannot = str(e)
                log.info("forwards run call by call, because %s is not a kernel", e)
                return self.fn(batch)
            here.n_first += key not in self._taped_once
            self._taped_once.add(key)
        self._tapes[key] = recorded  # the newest last
        if len(self._tapes) > N_TAPE:
            del self._tapes[next(iter(self._tapes))]
        return recorded.replay()

    def seal(self) -> None:
        """Capture no more: batches without a graph run kernel by kernel."""
        self._sealed = True

    def forget(self) -> None:
        """Free the graphs and their memory; nothing is captured after this."""
        self._sealed = True
        self._graphs.clear()
        self._tapes.clear()

    def _capture(self, key: Key, batch: Batch) -> None:
        graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), self.pool.taken()
        torch.cuda.synchronize()
        try:
            # thread_local: calls of other threads (an engine that ends on the device) do not end the capture
            with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = self.fn(batch)
        except BaseException:
            # torch stays in a capture that can not end: the thread on its stream, and its allocator, which ends the process at the next load
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # it did end
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            self.pool.handle = None  # its allocator of pinned memory can not be told, and takes no further capture there
            raise
        self._graphs[key] = (graph, out)
        self._wakes = context_of(batch.tokens.device).wakes


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off: freeing graphs of an engine that has ended would fail a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copied(x: Tensor, out: Tensor | None = None) -> Tensor:
    """A copy of `x` in new memory, or in `out`, made by a kernel.

    torch copies contiguous tensors through the driver, which stalls the device before and after: in the middle of a round
    such a copy takes 8 to 14 us on an H200, a kernel 3.
    """
    return torch.mul(x, 1, out=out) if here.tape is None else tensors.copied(x, out)
