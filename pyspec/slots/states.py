"""States at places of the prefix tree: recurrent layers and a drafter's share, on the device, then in host memory.

The least recently used state moves from the device to the host, and is then dropped. Slots get copies, so a state never changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.slots.memory import Checkpoint
from pyspec.slots.prefix import Node, State

PIECE = 64 << 20  # bytes of host memory that are locked at once


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of a State: the target's checkpoint and the drafter's share.

    logits  [1, vocab]  of the last token, if a prompt ends with it
    """

    checkpoint: Checkpoint
    draft: object | None
    logits: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        return bytes_of(self)


def bytes_of(x: Any) -> int:
    """Bytes of the tensors in a structure of dataclasses, lists and tuples."""
    return _n_bytes(_tensors(x))


def _tensors(x: Any) -> list[Tensor]:
    """All tensors in a structure of dataclasses, lists and tuples."""
    if isinstance(x, Tensor):
        return [x]
    if is_dataclass(x):
        return [t for f in fields(x) for t in _tensors(getattr(x, f.name))]
    return [t for y in x for t in _tensors(y)] if isinstance(x, list | tuple) else []


def to_host(x: Any, ready: Sequence[Tensor] = ()) -> Any:
    """The same structure with its tensors in host memory, pinned for a fast way back. ready: such memory, of the sizes from `pieces_of`"""
    here: dict[int, Tensor] = {}
    for i, group in enumerate(_groups(_away(x))):
        sizes, n_bytes = [t.numel() for t in group], _n_bytes(group)
        whole = ready[i] if i < len(ready) and ready[i].numel() >= n_bytes else page_locked(n_bytes)
        for t, place in zip(group, whole[:n_bytes].view(group[0].dtype).split(sizes), strict=True):
            here[id(t)] = place.view(t.shape).copy_(t, non_blocking=True)
    return _with(x, here)


def pieces_of(x: Any) -> list[int]:
    """Bytes of each piece of host memory for `to_host`."""
    return [_n_bytes(group) for group in _groups(_away(x))]


def page_locked(n_bytes: int) -> Tensor:
    """[n_bytes] uint8. Locking takes the system about a third of a millisecond a megabyte, unless a freed piece is reused."""
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


def _away(x: Any) -> list[Tensor]:
    return [t for t in _tensors(x) if t.device.type != "cpu"]


def _n_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups of tensors of one type that share a piece of host memory: page-locking has a cost per piece, and rounds large ones up."""
    groups: list[list[Tensor]] = []
    for t in tensors:
        size, last = t.numel() * t.element_size(), groups[-1] if groups else []
        fits = last and last[0].dtype is t.dtype and _n_bytes(last) + size <= PIECE
        if fits:
            last.append(t)
        else:
            groups.append([t])
    return groups


def _with(x: Any, places: Mapping[int, Tensor]) -> Any:
    """The same structure with tensors replaced, by id."""
    if isinstance(x, Tensor):
        return places.get(id(x), x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _with(getattr(x, f.name), places) for f in fields(x)})
    return type(x)(_with(y, places) for y in x) if isinstance(x, list | tuple) else x


class StateStore:
    """All States, within two budgets in bytes, each a queue from least to most recently used.

    Starts, the states at the ends of short prompts, have a third budget on the device: each request leaves one, and losing one costs little.
    """

    def __init__(self, device_bytes: int, host_bytes: int, start_bytes: int = 0) -> None:
        self.limits = (device_bytes, host_bytes)
        self.tiers: tuple[OrderedDict[State, int], OrderedDict[State, int]] = (
            OrderedDict(),
            OrderedDict(),
        )
        self.n_bytes = [0, 0]
        self.ready: list[Tensor] = []  # host memory for the next state that moves there
        self.starts: OrderedDict[State, int] = OrderedDict()
        self.start_limit, self.n_start_bytes = start_bytes, 0  # includes those of running requests
        # called with the node that a state came to, or was dropped from while its page stays
        self.on_change: Callable[[Node], None] = lambda node: None

    def __len__(self) -> int:
        return sum(map(len, self.tiers))

    def room(self, n_bytes: int) -> None:
        """Move states to the host until `n_bytes` are free on the device."""
        while (state := self._too_many(n_bytes)) is not None:
            self.lose(state)
            self._to_host(state)

    def prepare(self, n_bytes: int) -> bool:
        """Move towards that much room, by at most one piece of host memory. Returns True if there is room, or none can be made."""
        state = self._too_many(n_bytes)
        if state is None:
            return True
        assert isinstance(state.content, Saved)
        saved = state.content
        pieces = pieces_of(saved) if saved.n_bytes <= self.limits[1] else []
        if len(self.ready) < len(pieces):
            self.ready.append(page_locked(pieces[len(self.ready)]))
            return False
        self.lose(state)
        self._to_host(state)
        return self._too_many(n_bytes) is None

    def _too_many(self, n_bytes: int) -> State | None:
        """The state that has to leave the device for `n_bytes`."""
        device = self.tiers[0]
        return next(iter(device)) if device and self.n_bytes[0] + n_bytes > self.limits[0] else None

    def reserve(self, n_bytes: int) -> bool:
        """Reserve room for a start of a running request. Starts evict only each other."""
        while self.starts and self.n_start_bytes + n_bytes > self.start_limit:
            self.drop(next(iter(self.starts)))
        if self.n_start_bytes + n_bytes > self.start_limit:
            return False
        self.n_start_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        """Return a reservation."""
        self.n_start_bytes -= n_bytes

    def add_start(self, node: Node, n_past: int, saved: Saved) -> None:
        """Keep a start for which room was reserved."""
        assert n_past not in node.states and node.start < n_past <= node.end
        state = node.states[n_past] = State(node, n_past, saved, is_start=True)
        self.starts[state] = saved.n_bytes
        self.on_change(node)

    def add(self, node: Node, n_past: int, saved: Saved) -> None:
        """Keep a state at exactly `n_past` tokens, the last of which is on the node's page."""
        assert n_past not in node.states and node.start < n_past <= node.end
        state = node.states[n_past] = State(node, n_past, saved)
        self.room(saved.n_bytes)
        if saved.n_bytes > self.limits[0]:
            self._to_host(state)
        else:
            self._put(0, state, saved.n_bytes)
        self.on_change(node)

    def _put(self, tier: int, state: State, n_bytes: int) -> None:
        self.tiers[tier][state] = n_bytes
        self.n_bytes[tier] += n_bytes

    def _to_host(self, state: State) -> None:
        saved, host = state.content, self.tiers[1]
        assert isinstance(saved, Saved)
        n_bytes = saved.n_bytes
        while host and self.n_bytes[1] + n_bytes > self.limits[1]:
            self.drop(next(iter(host)))
        if n_bytes > self.limits[1]:
            del state.node.states[state.n_past]
            self.on_change(state.node)
            return
        ready, self.ready = self.ready, []
        state.content = to_host(saved, ready)
        self._put(1, state, n_bytes)

    def leave_device(self, most: int) -> None:
        """Move all states to the host, starts among them, and keep `most` bytes there: those that were used last. No request runs."""
        for state, n_bytes in list(self.starts.items()):
            self.lose(state)
            self._put(0, state, n_bytes)
        while sum(self.n_bytes) > most:
            self.drop(next(iter(self.tiers[1] or self.tiers[0])))
        self.room(self.limits[0])
        self.ready.clear()

    def touch(self, state: State) -> None:
        """Mark as used now."""
        for tier in self.tiers:
            if state in tier:
                tier.move_to_end(state)
        if state in self.starts:
            self.starts.move_to_end(state)

    def drop(self, state: State) -> None:
        """Drop a state; its page stays."""
        self.lose(state)
        del state.node.states[state.n_past]
        self.on_change(state.node)

    def lose(self, state: State) -> None:
        """Stop counting a state whose page is gone."""
        self.n_start_bytes -= self.starts.pop(state, 0)
        for i, tier in enumerate(self.tiers):
            self.n_bytes[i] -= tier.pop(state, 0)

    def check(self, held: set[State]) -> None:
        """Check the counts. held: the states of the tree."""
        assert (
            held == {*self.tiers[0], *self.tiers[1], *self.starts}
            and not self.tiers[0].keys() & self.tiers[1].keys()
        )
        assert sum(self.starts.values()) <= self.n_start_bytes <= self.start_limit, (
            "the bytes of starts are miscounted"
        )
        for n_bytes, limit, tier in zip(self.n_bytes, self.limits, self.tiers, strict=True):
            assert n_bytes == sum(tier.values()) <= limit, "the bytes of states are miscounted"
