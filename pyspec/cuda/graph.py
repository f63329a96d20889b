"""CUDA graphs over batches in an arena: a whole forward for the price of one launch.

A graph is captured per bucket, from the second call on: the first runs eagerly, because a forward changes state and must
run exactly once per round, and because libraries set themselves up on first use. Capturing runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from pyspec.slots.batch import Batch

Out = TypeVar("Out")


class Graphed(Generic[Out]):
    """`fn(batch)` replayed for batches that lie in an arena; others, and devices without graphs, run as they are.

    The result of a replay is overwritten by the next one of the same bucket.
    """

    def __init__(self, fn: Callable[[Batch], Out]) -> None:
        self.fn = fn
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Out]] = {}
        self._seen: set[int] = set()
        self._pool: object | None = None

    def __call__(self, batch: Batch) -> Out:
        bucket = batch.bucket
        if bucket is None or batch.tokens.device.type != "cuda":
            return self.fn(batch)
        if bucket not in self._seen:
            self._seen.add(bucket)
            return self.fn(batch)
        if bucket not in self._graphs:
            self._capture(bucket, batch)
        graph, out = self._graphs[bucket]
        graph.replay()
        return out

    def _capture(self, bucket: int, batch: Batch) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool):
            out = self.fn(batch)
        self._graphs[bucket] = (graph, out)
