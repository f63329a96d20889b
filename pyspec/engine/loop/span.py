"""The record of a span of tokens: pages of target and drafter, and checkpoints with the drafter's share, as host memory and back.

A saved slot is the span of a whole text (slot_image.py), an entry of the prefix cache on disk that of one segment (disk_tier.py). A record
has the part of every rank: the first one gathers them, and deals them out again.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyspec.device.worker import Worker
from pyspec.draft.drafter import Drafter
from pyspec.slots.images import (
    ROWS,
    Handles,
    ImageSpan,
    image_id,
    is_image,
    runs_of,
    without_ids,
)
from pyspec.slots.memory import Keep, Like, planes_of, read_planes, write_planes
from pyspec.slots.span_file import Bytes, SpanFile
from pyspec.slots.states import PIECE, Saved, page_locked, to_host

ALIGNED = 16  # bytes: tensors of any type may begin at multiples


@dataclass(frozen=True, slots=True)
class StateHead:
    """A checkpoint at `n_past` tokens of the text. has_share: the drafter's share follows its tensors. has_logits: the logits of its last
    token follow, because a prompt ends there."""

    n_past: int
    has_share: bool = False
    has_logits: bool = False


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """`n_token` tokens of a text, behind its first `first`.

    content  the tokens [n_token] int32, of pictures' rows -1, their pages of `n_plane` planes, then each state's tensors, share and logits
    images   pictures that have rows among them, in order; each first row counts from the text's begin
    whole    [n] uint8, of which all content is views: each tensor begins at a multiple of ALIGNED. None: they are apart
    """

    first: int
    n_token: int
    states: tuple[StateHead, ...]
    n_plane: int
    content: Sequence[Tensor]
    whole: Tensor | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Its tokens, with the ids of pictures' rows."""
        found: list[int] = self.content[0].tolist()
        for span in self.images:
            begin, end = max(span.first, self.first), min(span.end, self.end)
            first = image_id(span.handle, begin - span.first)
            found[begin - self.first : end - self.first] = range(first, first + end - begin)
        return found

    @property
    def end(self) -> int:
        """Tokens of the text up to its last one."""
        return self.first + self.n_token

    def on(self, device: torch.device) -> StoredSpan:
        """The same on a device: one copy brings all."""
        assert self.whole is not None
        whole = self.whole.to(device)
        return replace(
            self, whole=whole, content=_views(whole, [(t.shape, t.dtype) for t in self.content])
        )


class SpanCodec:
    """Knows the tensors of this engine's records. `take`, `place` and `extras` run on the engine's thread, the rest on any."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.memory, self.table = worker, worker.memory, worker.table

    # -- how it is laid out ---------------------------------------------------------------------------------------

    @property
    def _drafter(self) -> Drafter | None:
        """The drafter, if its share of a state can be stored."""
        drafter = self.worker.drafter
        return drafter if drafter is not None and drafter.has_share else None

    def _drafts(self) -> list[Tensor]:
        """The drafter's pages, as [page, row, *dims]."""
        return planes_of(self.worker.draft_pools(), self.table.page_size)

    def _pages_like(self, n_page: int) -> list[Like]:
        own = self.memory.pages_like(self.table.page_size, n_page)
        return own + [((n_page, *plane.shape[1:]), plane.dtype) for plane in self._drafts()]

    def _state_like(self, head: StateHead) -> list[Like]:
        like = self.memory.state_like(head.n_past)
        if head.has_share:
            assert self._drafter is not None
            like.append((self._drafter.share_shape, torch.float32))
        if head.has_logits:
            like.append(((1, self.worker.target.n_vocab), torch.float32))
        return like

    def _like(self, n_token: int) -> list[Like]:
        """Shape and type of every tensor of a record but those of its states."""
        return [((n_token,), torch.int32), *self._pages_like(self.table.pages_for(n_token))]

    def layout(self) -> dict[str, Any]:
        """Properties besides the models that must match when a record is read: {name: value}."""
        share = self._drafter.share_shape if self._drafter is not None else ()
        planes = [(shape[1:], str(dtype)) for shape, dtype in self._pages_like(1)]
        states: list[object] = [(shape, str(dtype)) for shape, dtype in self.memory.state_like(1)]
        states += self.memory.turns
        return {
            "kv_type": self.memory.kv_format.name,
            "page_size": self.table.page_size,
            "layout": blake2b(repr((planes, states, share)).encode(), digest_size=8).hexdigest(),
        }

    def bytes_of(self, n_token: int) -> int:
        """Bytes of the content of a span without states."""
        return sum(map(_padded, self._like(n_token)))

    def host(self, n_byte: int) -> Bytes:
        """Host memory from which the device reads fast."""
        on_gpu = self.worker.device.type == "cuda"
        place: Bytes = (
            page_locked(n_byte) if on_gpu else torch.empty(n_byte, dtype=torch.uint8)
        ).numpy()
        return place

    # -- writing --------------------------------------------------------------------------------------------------

    def take(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        states: Sequence[Saved],
        keep: Keep,
        first: int = 0,
    ) -> StoredSpan:
        """A copy of these tokens' pages, with the states, which never change. keep: puts each tensor where it is wanted."""
        images = tuple(self._image(first + at, *picture) for at, *picture in runs_of(tokens))
        ids = np.array(without_ids(tokens), dtype=np.uint32)
        content = [torch.tensor(ids.view(np.int32).tolist(), dtype=torch.int32)]
        content += self.memory.read_pages(self.table.page_size, pages, keep)
        content += read_planes(self._drafts(), pages, keep)
        n_plane, drafter, heads = len(content) - 1, self._drafter, []
        for saved in states:
            has_share = saved.draft is not None and drafter is not None
            content += self.memory.read_state(saved.checkpoint, keep)
            if saved.draft is not None and drafter is not None:
                content.append(keep(drafter.share_tensor(saved.draft).float()))
            if saved.logits is not None:
                content.append(keep(saved.logits.float()))
            heads.append(StateHead(saved.checkpoint.n_past, has_share, saved.logits is not None))
        return StoredSpan(first, len(tokens), tuple(heads), n_plane, content, images=images)

    def _image(self, row: int, handle: int, i: int) -> ImageSpan:
        """The picture whose row `i` is at this row of a text."""
        image = self.table.handles.image(handle)
        return ImageSpan(handle, row - i, image.n_row, image.nx, image.ny)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, file: SpanFile, first: int, most: int, into: Bytes | None = None) -> StoredSpan:
        """The span in a file, which is behind `first` tokens of its text and has at most `most`. Every number is checked against this engine
        before anything is allocated. Raises BadSlotFile; `into` is memory for the content (`SpanFile.read`)."""
        n = file.head.get("tokens")
        if type(n) is not int or not 0 <= n <= most:
            raise file.bad(f"it has {str(n)[:40]} tokens by its head; a slot holds {most} (-c)")
        at = file.head.get("first")
        if type(at) is not int or at != first:
            raise file.bad(f"it begins at token {str(at)[:40]} of a text, not at {first}")
        states, images = self._heads(file, first, n), self._images(file, first, n)
        like = self._like(n)
        n_plane = len(like) - 1
        like += [one for head in states for one in self._state_like(head)]
        whole = torch.from_numpy(file.read(sum(map(_padded, like)), into))
        span = StoredSpan(first, n, states, n_plane, _views(whole, like), whole, images)
        if (span.content[0] == -1).sum() != sum(
            min(i.end, span.end) - max(i.first, span.first) for i in images
        ) or any(
            not is_image(t) for i in images for t in span.tokens[max(i.first - first, 0) : i.end - first]
        ):
            raise file.bad("its list of pictures does not fit its tokens")
        return span

    def _images(self, file: SpanFile, first: int, n: int) -> tuple[ImageSpan, ...]:
        """The pictures that its head names. A file without any has no list."""
        rows, before, found = file.head.get("images", []), first, []
        if not isinstance(rows, list) or len(rows) > n:
            raise file.bad(f"its list of pictures is not one of at most {n}")
        for i, row in enumerate(rows):
            match row:
                case [int(at), int(n_row), int(nx), int(ny), str(digest)] if (
                    all(type(x) is int for x in row[:4])
                    and at < first + n
                    and before < at + n_row
                    and (at >= before or not i)
                    and 0 < n_row <= ROWS
                    and 0 < nx <= n_row
                    and 0 < ny <= n_row
                    and re.fullmatch("[0-9a-f]{64}", digest)
                ):
                    handle = self.table.handles.of(bytes.fromhex(digest), n_row, nx, ny)
                    found.append(ImageSpan(handle, at, n_row, nx, ny))
                    before = at + n_row
                case _:
                    raise file.bad(
                        f"picture {i} of {len(rows)} is not [first row, rows, columns, lines, digest], in order"
                    )
        return tuple(found)

    def _heads(self, file: SpanFile, first: int, n: int) -> tuple[StateHead, ...]:
        rows, before = file.head.get("states"), max(0, first - 1)
        if not isinstance(rows, list) or len(rows) > n + 1:
            raise file.bad(f"its list of states is not one of at most {n + 1}")
        heads = []
        for i, row in enumerate(rows):
            match row:
                case [int(n_past), bool(has_share), bool(has_logits)] if (
                    type(n_past) is int and before < n_past <= first + n  # a bool is no number
                ):
                    if has_share and self._drafter is None:
                        raise file.bad(f"state {i}, at {n_past} tokens, is laid out otherwise than here")
                    heads.append(StateHead(n_past, has_share, has_logits))
                    before = n_past
                case _:
                    raise file.bad(
                        f"state {i} of {len(rows)} is not [tokens up to {first + n}, share, logits], in order"
                    )
        return tuple(heads)

    def place(self, span: StoredSpan, pages: Sequence[int], shared: int = 0) -> None:
        """Write its pages behind the first `shared` ones into these pages."""
        content = iter([t[shared:] for t in span.content[1 : span.n_plane + 1]])
        if pages:
            self.memory.write_pages(self.table.page_size, pages, content)
            write_planes(self._drafts(), pages, content)

    def states(self, span: StoredSpan) -> Iterator[tuple[StateHead, list[Tensor]]]:
        """Its states, each with its tensors."""
        content = iter(span.content[span.n_plane + 1 :])
        for head in span.states:
            yield head, [next(content) for _ in self._state_like(head)]

    def extras(self, head: StateHead, tensors: Sequence[Tensor]) -> tuple[object | None, Tensor | None]:
        """The drafter's share of a state and its logits, each None if it has none. The tensors before them are for `Memory.make_state`."""
        drafter, logits = self._drafter, None
        if head.has_logits:
            *tensors, logits = tensors
        if not head.has_share or drafter is None:
            return None, logits
        return drafter.share_of(head.n_past, tensors[-1].clone()), logits


def encoded(span: StoredSpan, handles: Handles) -> tuple[dict[str, Any], list[Bytes]]:
    """Head and pieces of the file of a span in host memory. handles: of its pictures"""
    states = [[s.n_past, s.has_share, s.has_logits] for s in span.states]
    pieces: list[Bytes] = []
    for t in span.content:
        data = t.contiguous().view(-1).view(torch.uint8).numpy()
        pieces += [data, np.zeros(-data.size % ALIGNED, np.uint8)]
    head = {"first": span.first, "tokens": span.n_token, "states": states}
    images = [[i.first, i.n_row, i.nx, i.ny, handles.digest(i.handle).hex()] for i in span.images]
    return head | ({"images": images} if images else {}), pieces


def host_copies(span: StoredSpan) -> Generator[None, None, StoredSpan]:
    """Start the copies of a span's tensors to host memory, and pause behind each piece of PIECE bytes. Those in host memory cost nothing."""
    here: list[Tensor] = []
    tensors = span.content
    while tensors:
        n_taken = _within(tensors, PIECE)
        here += to_host(list(tensors[:n_taken]))
        tensors = tensors[n_taken:]
        if tensors:
            yield
    return replace(span, content=here)


def _within(tensors: Sequence[Tensor], most: int) -> int:
    """Number of tensors, one at least, that have at most so many bytes together."""
    n_bytes = 0
    for i, t in enumerate(tensors):
        n_bytes += t.numel() * t.element_size() if t.device.type != "cpu" else 0
        if i and n_bytes > most:
            return i
    return len(tensors)


def _padded(like: Like) -> int:
    shape, dtype = like
    return -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


def _views(whole: Tensor, like: Sequence[Like]) -> list[Tensor]:
    """Tensors of these shapes and types in memory [n] uint8, each at a multiple of ALIGNED."""
    found, at = [], 0
    for shape, dtype in like:
        n = prod(shape) * dtype.itemsize
        part = whole[at : at + n].view(dtype) if n else whole.new_empty(0, dtype=dtype)
        found.append(part.view(shape))
        at += _padded((shape, dtype))
    return found
