"""What the ranks keep of a slot, brought together on the first of them and dealt out again (images of slots: engine/loop/slot_image.py).

Every rank runs the same function at the same time. Ranks have tensors of the same shapes, since they have as many heads each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.slots.memory import Memory, planes_of


def gather_pages(memory: Memory, ranks: Collective, page_size: int, pages: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    """Of each plane these pages [page, row, *dims], of every rank."""
    for plane in planes_of(memory.paged, page_size):
        yield ranks.gather(plane[torch.tensor(pages, dtype=torch.int64, device=plane.device)])


def gather_state(ranks: Collective, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Each tensor of a checkpoint, of every rank."""
    for t in tensors:
        yield ranks.gather(t.to(ranks.device))


def deal_pages(
    memory: Memory, ranks: Collective, page_size: int, pages: Sequence[int], content: Iterator[Tensor] | None
) -> None:
    """What `gather_pages` gave, on the host, into these pages of every rank. content: on the first one alone."""
    for plane in planes_of(memory.paged, page_size):
        at = torch.tensor(pages, dtype=torch.int64, device=plane.device)
        plane.index_copy_(0, at, ranks.deal(content, plane.new_empty(len(pages), *plane.shape[1:])))


def deal_state(memory: Memory, ranks: Collective, n_past: int, content: Iterator[Tensor] | None) -> list[Tensor]:
    """What `gather_state` gave of a checkpoint at `n_past` tokens, as this rank has it. content: on the first one alone."""
    return [
        ranks.deal(content, torch.empty_like(t, memory_format=torch.contiguous_format))
        for t in memory.saved_like(n_past)
    ]
