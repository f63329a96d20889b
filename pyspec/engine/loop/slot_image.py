"""The text that an idle slot's last request left, as a span in host memory, and back.

Sampling state is not kept: sampling depends on logits, history, seed and position alone, and a request brings its history.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pyspec.device.worker import Worker
from pyspec.engine.loop.disk_tier import DiskTier
from pyspec.engine.loop.span import SpanCodec, StateHead, StoredSpan
from pyspec.errors import BadSlotFile, RequestError
from pyspec.slots.cache import PrefixCache
from pyspec.slots.prefix import NOBODY, Owner, unread_end
from pyspec.slots.span_file import SpanFile
from pyspec.slots.states import Saved, bytes_of
from pyspec.slots.table import Slot


class SlotImager:
    """Takes images of slots and puts them back. All but `decode` runs on the engine's thread, between rounds."""

    def __init__(self, worker: Worker, cache: PrefixCache, disk: DiskTier | None = None) -> None:
        self.worker, self.cache, self.table, self.disk = worker, cache, worker.table, disk
        self.codec = SpanCodec(worker)

    # -- taking ---------------------------------------------------------------------------------------------------

    def take(self, index: int, salt: str = "") -> StoredSpan:
        """Copy the text that the slot's last request left to the host, if it had this salt. Nothing changes."""
        self._check_cache()
        left = self.table.slots[index].left_of(salt)
        nodes, n = self.table.tree.path(left, salt)
        states = sorted(
            (s for node in nodes for s in node.states.values() if s.n_past <= n), key=lambda s: s.n_past
        )
        if self.worker.memory.needs_state:
            n = states[-1].n_past if states else 0
        kept = [s.content for s in states if isinstance(s.content, Saved)]
        if unread_end(nodes):  # without its shares the drafter begins anew where the text is put back
            kept = [replace(saved, draft=None) for saved in kept]
        pages = [node.page for node in nodes[: self.table.pages_for(n)]]
        return self.codec.take(left[:n], pages, kept, Tensor.cpu)

    def decode(self, file: SpanFile, n_vocab: int, n_ctx: int) -> StoredSpan:
        """Read the image in a file. Raises BadSlotFile."""
        span = self.codec.read(file, 0, min(n_ctx, self.table.n_row))
        n, tokens = span.n_token, span.content[0]
        least = -1 if span.images else 0  # of rows of pictures, which `read` has checked
        if n and not (int(tokens.min()) >= least and int(tokens.max()) < n_vocab):
            raise file.bad(f"it has a token outside 0..{n_vocab - 1}")
        last = span.states[-1].n_past if span.states else 0
        if n and self.worker.memory.needs_state and last != n:
            raise file.bad(f"it has no state at its end of {n} tokens, only at {last}")
        return span

    # -- putting back ---------------------------------------------------------------------------------------------

    def erase(self, index: int, salt: str = "") -> int:
        """Forget everything that requests of this salt in a slot have filed. Returns the number of tokens it held."""
        slot = self.table.slots[index]
        if self.disk is not None and (left := slot.left_of(salt)):
            self.disk.forget(left, salt)
        return self.table.erase(slot, salt)

    def put(self, index: int, image: StoredSpan, owner: Owner = NOBODY) -> None:
        """File an image's content as if a request in this slot had left it. Raises RequestError if the pages do not suffice."""
        self._check_cache()
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
            slot.tokens.extend(image.tokens)
            self._fill(slot, image)
        except BaseException:
            self.table.release(slot, trusted=False)
            raise
        left = tuple(slot.tokens)
        self.table.release(slot)
        slot.left, slot.left_owner = left, owner

    def _check_cache(self) -> None:
        if not self.cache.on:
            raise RequestError(
                "slots hold nothing between requests: the prefix cache is off (--cache-prompt)"
            )

    def _fill(self, slot: Slot, image: StoredSpan) -> None:
        self.codec.place(image, slot.pages)
        drafter = self.worker.drafter
        is_unread = drafter is not None and drafter.can_join
        is_unread = is_unread and not any(head.has_share for head in image.states)
        self.table.file(slot, whole=True, n_unread=image.n_token if is_unread else 0)
        for head, tensors in self.codec.states(image):
            self._fill_state(slot, head, tensors)
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
        memory, (draft, logits) = self.worker.memory, self.codec.extras(head, tensors)
        n_bytes = bytes_of((memory.saved_like(head.n_past), draft))
        if logits is not None and states.reserve(n_bytes + bytes_of(logits)):
            state = memory.make_state(head.n_past, iter(tensors))
            states.add_start(node, head.n_past, Saved(state, draft, logits.to(self.worker.device)))
            return
        states.room(n_bytes)
        states.add(node, head.n_past, Saved(memory.make_state(head.n_past, iter(tensors)), draft))
