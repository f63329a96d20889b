"""The content of an idle slot as host memory, and back: tokens, pages of target and drafter, checkpoints with the drafter's share.

Sampling state is not kept: sampling depends on logits, history, seed and position alone, and a request brings its history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyspec.device.worker import Worker
from pyspec.draft.drafter import Drafter
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.errors import BadSlotFile, RequestError
from pyspec.slots.cache import PrefixCache
from pyspec.slots.memory import Like, planes_of, read_planes, write_planes
from pyspec.slots.prefix import NOBODY, Owner, State, unread_end
from pyspec.slots.slot_file import Bytes, SlotFile
from pyspec.slots.states import Saved, bytes_of
from pyspec.slots.table import Slot


@dataclass(frozen=True, slots=True)
class StateHead:
    """A checkpoint in an image. shapes: of its tensors. has_share: the drafter's share follows them. has_logits: the logits of its last
    token follow, because a prompt ends there."""

    n_past: int
    has_share: bool
    shapes: tuple[tuple[int, ...], ...]
    has_logits: bool = False

    @property
    def n_tensor(self) -> int:
        return len(self.shapes) + self.has_share + self.has_logits


@dataclass(frozen=True, slots=True)
class Image:
    """A slot's content. content: its tokens [n] int32, its pages of every plane, then each state's tensors and share."""

    n_token: int
    states: tuple[StateHead, ...]
    content: list[Tensor]


class SlotImager:
    """Takes images of slots and puts them back. All but `layout` and `decode` runs on the engine's thread, between rounds."""

    def __init__(self, worker: Worker, cache: PrefixCache, disk: DiskTier | None = None) -> None:
        self.worker, self.cache, self.table, self.disk = worker, cache, worker.table, disk

    # -- how it is laid out ---------------------------------------------------------------------------------------

    def _drafts(self) -> list[Tensor]:
        """The drafter's pages, as [page, row, *dims]."""
        return planes_of(self.worker.draft_pools(), self.table.page_size)

    def _pages_like(self, n_page: int) -> list[Like]:
        own = self.worker.memory.pages_like(self.table.page_size, n_page)
        return own + [((n_page, *plane.shape[1:]), plane.dtype) for plane in self._drafts()]

    @property
    def _drafter(self) -> Drafter | None:
        """The drafter, if its share of a state can be stored."""
        drafter = self.worker.drafter
        return drafter if drafter is not None and drafter.has_share else None

    def layout(self) -> dict[str, Any]:
        """Properties besides the models that must match when an image is put back: {name: value}."""
        share = self._drafter.share_shape if self._drafter is not None else ()
        planes = [(shape[1:], str(dtype)) for shape, dtype in self._pages_like(1)]
        states: list[object] = [str(dtype) for _, dtype in self.worker.memory.state_like(1)]
        states += self.worker.memory.turns
        return {
            "kv_type": self.worker.memory.kv_format.name,
            "page_size": self.table.page_size,
            "layout": blake2b(repr((planes, states, share)).encode(), digest_size=8).hexdigest(),
        }

    def _like(self, n_token: int, states: Sequence[StateHead]) -> list[Like]:
        """Shape and type of every tensor of an image."""
        like: list[Like] = [((n_token,), torch.int32), *self._pages_like(self.table.pages_for(n_token))]
        for state in states:
            like += self.worker.memory.state_like(state.n_past)
            if state.has_share:
                assert self._drafter is not None
                like.append((self._drafter.share_shape, torch.float32))
            if state.has_logits:
                like.append(((1, self.worker.target.n_vocab), torch.float32))
        return like

    # -- taking ---------------------------------------------------------------------------------------------------

    def take(self, index: int, salt: str = "") -> Image:
        """Copy the text that the slot's last request left to the host, if it had this salt. Nothing changes."""
        if not self.cache.on:
            raise RequestError(
                "slots hold nothing between requests: the prefix cache is off (--cache-prompt)"
            )
        slot = self.table.slots[index]
        left = slot.left_of(salt)
        nodes, n = self.table.tree.path(left, salt)
        states = sorted(
            (s for node in nodes for s in node.states.values() if s.n_past <= n), key=lambda s: s.n_past
        )
        if self.worker.memory.needs_state:
            n = states[-1].n_past if states else 0
        pages = [node.page for node in nodes[: self.table.pages_for(n)]]
        content = [torch.tensor(left[:n], dtype=torch.int32)]
        content += self.worker.memory.read_pages(self.table.page_size, pages)
        content += read_planes(self._drafts(), pages)
        heads, has_shares = [], not unread_end(nodes)
        for state in states:
            head, tensors = self._take_state(state, has_shares=has_shares)
            heads.append(head)
            content += tensors
        return Image(n, tuple(heads), content)

    def _take_state(self, state: State, *, has_shares: bool) -> tuple[StateHead, list[Tensor]]:
        """has_shares: the drafter has read the text. Without its shares it begins anew where the text is put back."""
        saved = state.content
        assert isinstance(saved, Saved)
        tensors = self.worker.memory.read_state(saved.checkpoint)
        drafter = self._drafter if has_shares else None
        shapes = tuple(tuple(t.shape) for t in tensors)
        has_share = saved.draft is not None and drafter is not None
        if saved.draft is not None and drafter is not None:
            tensors = [*tensors, drafter.share_tensor(saved.draft).float().cpu()]
        if saved.logits is not None:
            tensors = [*tensors, saved.logits.float().cpu()]
        return StateHead(state.n_past, has_share, shapes, saved.logits is not None), tensors

    # -- as bytes -------------------------------------------------------------------------------------------------

    @staticmethod
    def encode(image: Image) -> tuple[dict[str, Any], list[Bytes]]:
        """Head and pieces of a file."""
        head = {
            "tokens": image.n_token,
            "states": [
                [s.n_past, s.has_share, [list(shape) for shape in s.shapes], s.has_logits]
                for s in image.states
            ],
        }
        return head, [t.contiguous().view(-1).view(torch.uint8).numpy() for t in image.content]

    def decode(self, file: SlotFile, n_vocab: int, n_ctx: int) -> Image:
        """Read the image in a file. Every number is checked against this engine before anything is allocated."""
        n = file.head.get("tokens")
        if type(n) is not int or not 0 <= n <= min(n_ctx, self.table.n_row):
            raise file.bad(
                f"it has {str(n)[:40]} tokens by its head; a slot holds {min(n_ctx, self.table.n_row)} (-c)"
            )
        states = self._state_heads(file, n)
        like = self._like(n, states)
        pieces = file.read([prod(shape) * dtype.itemsize for shape, dtype in like])
        content = [
            torch.from_numpy(piece).view(dtype).view(shape)
            if piece.size
            else torch.empty(shape, dtype=dtype)
            for piece, (shape, dtype) in zip(map(_aligned, pieces), like, strict=True)
        ]
        tokens = content[0]
        if n and not (int(tokens.min()) >= 0 and int(tokens.max()) < n_vocab):
            raise file.bad(f"it has a token outside 0..{n_vocab - 1}")
        return Image(n, states, content)

    def _state_heads(self, file: SlotFile, n_token: int) -> tuple[StateHead, ...]:
        rows, memory, before = file.head.get("states"), self.worker.memory, 0
        if not isinstance(rows, list) or len(rows) > n_token:
            raise file.bad(f"its list of states is not one of at most {n_token}")
        heads = []
        for i, row in enumerate(rows):
            match row:
                # a bool is no number; older files end with the shapes
                case [int(n_past), bool(has_share), list(shapes), *more] if (
                    type(n_past) is int
                    and before < n_past <= n_token
                    and all(type(x) is bool for x in more)
                    and len(more) < 2
                ):
                    want = [list(shape) for shape, _ in memory.state_like(n_past)]
                    if shapes != want or (has_share and self._drafter is None):
                        raise file.bad(f"state {i}, at {n_past} tokens, is laid out otherwise than here")
                    heads.append(StateHead(n_past, has_share, tuple(map(tuple, want)), more == [True]))
                    before = n_past
                case _:
                    raise file.bad(
                        f"state {i} of {len(rows)} is not [tokens up to {n_token}, share, shapes, logits], in order"
                    )
        if n_token and memory.needs_state and before != n_token:
            raise file.bad(f"it has no state at its end of {n_token} tokens, only at {before}")
        return tuple(heads)

    # -- putting back ---------------------------------------------------------------------------------------------

    def erase(self, index: int, salt: str = "") -> int:
        """Forget everything that requests of this salt in a slot have filed. Returns the number of tokens it held."""
        slot = self.table.slots[index]
        if self.disk is not None and (left := slot.left_of(salt)):
            self.disk.forget(left, salt)
        return self.table.erase(slot, salt)

    def put(self, index: int, image: Image, owner: Owner = NOBODY) -> None:
        """File an image's content as if a request in this slot had left it. Raises RequestError if the pages do not suffice."""
        if not self.cache.on:
            raise RequestError(
                "slots hold nothing between requests: the prefix cache is off (--cache-prompt)"
            )
        slot = self.table.slots[index]
        slot.left = ()
        if not image.n_token:
            return
        if not self.table.can_admit(image.n_token):
            raise RequestError(
                f"{image.n_token} tokens take {self.table.pages_for(image.n_token)} pages, and those that run leave fewer of "
                f"{self.table.n_page}: try again when less does, or raise --kv-pool"
            )
        self.table.acquire(slot, image.n_token, owner=owner)
        try:
            self.table.grow(slot, image.n_token)
            slot.tokens.extend(image.content[0].tolist())
            self._fill(slot, image)
        except BaseException:
            self.table.release(slot, trusted=False)
            raise
        left = tuple(slot.tokens)
        self.table.release(slot)
        slot.left, slot.left_owner = left, owner

    def _fill(self, slot: Slot, image: Image) -> None:
        content = iter(image.content[1:])
        self.worker.memory.write_pages(self.table.page_size, slot.pages, content)
        write_planes(self._drafts(), slot.pages, content)
        drafter = self.worker.drafter
        is_unread = drafter is not None and drafter.can_join
        is_unread = is_unread and not any(head.has_share for head in image.states)
        self.table.file(slot, whole=True, n_unread=image.n_token if is_unread else 0)
        for head in image.states:
            self._fill_state(slot, head, [next(content) for _ in range(head.n_tensor)])
        if self.worker.memory.needs_state and image.n_token not in slot.nodes[-1].states:
            raise BadSlotFile(
                "there is no room for the state of this slot: raise --cache-device or --cache-ram (in MiB)"
            )

    def _fill_state(self, slot: Slot, head: StateHead, tensors: list[Tensor]) -> None:
        node, states = slot.nodes[(head.n_past - 1) // self.table.page_size], self.cache.states
        if (old := node.states.get(head.n_past)) is not None:
            if old.is_start or not head.has_logits:
                states.touch(old)
                return
            states.drop(old)  # the new one also has the last token's logits
        logits = tensors.pop() if head.has_logits else None
        drafter, share = self._drafter, tensors.pop() if head.has_share else None
        draft = (
            drafter.share_of(head.n_past, share) if drafter is not None and share is not None else None
        )
        if logits is not None and states.reserve(
            bytes_of((self.cache.memory.saved_like(head.n_past), draft, logits))
        ):
            state = self.worker.memory.make_state(head.n_past, iter(tensors))
            states.add_start(node, head.n_past, Saved(state, draft, logits.to(self.worker.device)))
            return
        states.room(bytes_of((tensors, draft)))
        states.add(
            node, head.n_past, Saved(self.worker.memory.make_state(head.n_past, iter(tensors)), draft)
        )


def _aligned(piece: Bytes) -> Bytes:
    """The same bytes, aligned for tensors of any type."""
    return piece if piece.ctypes.data % 16 == 0 else piece.copy()
