"""What every rank of several does alike: its worker, and the gathers of slots' memory on the first rank (records: engine/loop/span.py).

Every rank calls the same methods in the same order. All ranks have tensors of the same shapes, because they have equally many heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.device.worker import Worker
from pyspec.models.target import Out
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory, planes_of
from pyspec.slots.round import LogitsNeed


class RankWorker(Worker):
    """A rank's worker: its logits are its columns, which are gathered behind the forward, because a graph may hold that."""

    @property
    def ranks(self) -> Collective:
        assert self.target.ranks is not None
        return self.target.ranks

    def results(self, batch: Batch, reads: LogitsNeed) -> Out:
        """Without logits, if the host does not read them."""
        return super().results(batch, reads).whole(reads)

    def keeps_logits(self, reads: LogitsNeed) -> bool:
        """Gathered logits have a place of their own."""
        return False


def gather_pages(
    memory: Memory, ranks: Collective, page_size: int, pages: Sequence[int]
) -> Iterator[Sequence[Tensor]]:
    """Yield, for each plane, these pages [page, row, *dims] of every rank."""
    for plane in planes_of(memory.paged, page_size):
        yield ranks.gather(plane[torch.tensor(pages, dtype=torch.int64, device=plane.device)])


def gather_state(ranks: Collective, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield each tensor of a checkpoint, of every rank."""
    for t in tensors:
        yield ranks.gather(t.to(ranks.device))


def deal_pages(
    memory: Memory,
    ranks: Collective,
    page_size: int,
    pages: Sequence[int],
    content: Iterator[Tensor] | None,
) -> None:
    """Write the result of `gather_pages` into these pages of every rank. content: on the first rank only."""
    for plane in planes_of(memory.paged, page_size):
        at = torch.tensor(pages, dtype=torch.int64, device=plane.device)
        plane.index_copy_(0, at, ranks.deal(content, plane.new_empty(len(pages), *plane.shape[1:])))


def deal_state(
    memory: Memory, ranks: Collective, n_past: int, content: Iterator[Tensor] | None
) -> list[Tensor]:
    """This rank's part of a checkpoint at `n_past` tokens from `gather_state`. content: on the first rank only."""
    return [
        ranks.deal(content, torch.empty_like(t, memory_format=torch.contiguous_format))
        for t in memory.saved_like(n_past)
    ]
