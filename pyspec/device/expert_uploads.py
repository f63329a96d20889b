"""Experts come to slots on the card behind rounds, and graphs read one map of all layers that changes between rounds alone.

A swap takes three rounds. At the start of the first one the map loses the expert that leaves. Behind that, on a stream of its own, its slot gets
the other one, so that no kernel reads a slot that is written. The map has it at the start of the first round that begins when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pyspec.cuda.context import context_of
from pyspec.device.expert_use import ExpertLog
from pyspec.models.placement import Swap


class ExpertUploads:
    """Slots of the layers of a log. One thread calls its methods, as those of the worker.

    bytes     of an expert's way to the card, by layer
    arrived   swaps that the map has, until they are taken
    ms        of the card's clock that these took; 0.0: not known
    is_busy   copies may be under way
    failed    why copies did not begin. Nothing is swapped behind that
    """

    def __init__(self, log: ExpertLog) -> None:
        self.layers, self.firsts, self.device = log.layers, log.firsts.tolist(), log.device
        self.bytes = [layer.n_byte for layer in self.layers]
        self._asked: list[Swap] = []  # not begun, or gone from the map
        self._coming: list[Swap] = []
        self.arrived: list[Swap] = []
        self.ms = 0.0
        self.failed: Exception | None = None
        is_cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device) if is_cuda else None
        if stream is not None:
            context_of(self.device).copies.add(stream)
        self._stream: Any = stream
        events = (torch.cuda.Event(enable_timing=True) if is_cuda else None for _ in range(3))
        self._free: Any = next(events)
        self._began: Any = next(events)
        self._there: Any = next(events)
        self._is_free = False
        with torch.inference_mode(False):
            self._places = torch.cat([layer.places for layer in self.layers])
            self._map = self._places.to(self.device)
        for layer, a, b in zip(self.layers, self.firsts, self.firsts[1:], strict=False):
            layer.places = self._places[a:b]
            if layer.slots is not None:
                layer.slots = self._map[a:b]

    @property
    def is_busy(self) -> bool:
        return bool(self._asked or self._coming)

    def residents(self) -> list[NDArray[np.int64]]:
        """By layer, the key in each slot."""
        found = []
        for layer, first in zip(self.layers, self.firsts, strict=False):
            experts = (layer.places >= 0).nonzero().flatten()
            order = layer.places[experts].argsort()
            found.append(first + experts[order].numpy().astype(np.int64))
        return found

    def begin(self, swaps: Sequence[Swap]) -> None:
        """Swap with the next rounds. Slots that are named have an expert, and each is named once."""
        assert (
            not self.is_busy
            and self.failed is None
            and len({(swap.layer, swap.slot) for swap in swaps}) == len(swaps)
        )
        self._asked = list(swaps)

    def before(self) -> None:
        """A forward is about to be launched on this thread's stream."""
        is_there = self._coming and (self._there is None or self._there.query())
        if is_there:
            for swap in self._coming:
                self._place(swap.layer, swap.key, swap.slot)
            self.arrived += self._coming
            self._coming = []
            if self._began is not None:
                self.ms += self._began.elapsed_time(self._there)
        leaves = self._asked and not self._is_free
        if leaves:
            for swap in self._asked:
                self._place(swap.layer, swap.leaves, -1)
            self._is_free = True
        if is_there or leaves:
            self._send()
        if leaves and self._free is not None:
            self._free.record()

    def behind(self) -> None:
        """The forward is launched: copies begin. If this raises, slots of the swaps stay empty."""
        if not self._is_free:
            return
        swaps, self._asked, self._is_free = self._asked, [], False
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._free)
                self._began.record()
            for swap in swaps:
                self.layers[swap.layer].load(swap.slot, swap.key - self.firsts[swap.layer])
            if self._there is not None:
                self._there.record()
        self._coming = swaps

    def fill(self, slots: Sequence[Sequence[int]]) -> None:
        """Have these keys in the slots, by layer, before the first round. If this raises, the slot that it was at stays empty."""
        assert not self.is_busy
        try:
            self._fill(slots)
        finally:
            self._send()

    def _fill(self, slots: Sequence[Sequence[int]]) -> None:
        for i, (layer, wanted, own) in enumerate(zip(self.layers, slots, self.residents(), strict=True)):
            stays = set(own.tolist()) & set(wanted)
            new = iter(key for key in wanted if key not in stays)
            for slot, leaves in enumerate(own.tolist()):
                if leaves not in stays and (key := next(new, None)) is not None:
                    self._place(i, leaves, -1)
                    layer.load(slot, key - self.firsts[i])
                    self._place(i, key, slot)

    def _place(self, layer: int, key: int, slot: int) -> None:
        self.layers[layer].place(key - self.firsts[layer], slot)

    def _send(self) -> None:
        given = self._places.pin_memory() if self._map.is_cuda else self._places
        self._map.copy_(given, non_blocking=True)
