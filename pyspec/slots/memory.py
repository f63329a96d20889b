"""The memory that slots keep between rounds: paged keys and values (kv.py), and recurrent state with its records.

Everything is allocated once, at load. A page is written only by the slot that holds it; a state row only by its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from pyspec.slots.kv import KVPool


class RecurrentShape(Protocol):
    """What one recurrent layer keeps for a slot, whatever its recurrence."""

    @property
    def n_conv(self) -> int:
        """Taps of the convolution."""
        ...

    @property
    def n_channel(self) -> int:
        """Channels of the convolution."""
        ...

    @property
    def state(self) -> tuple[int, ...]:
        """Dimensions of the state."""
        ...

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        """Dimensions of what a verify records of each row, by name: enough to fold the row later."""
        ...


@dataclass(frozen=True, slots=True)
class StateShape:
    """Dimensions of one Gated DeltaNet layer. It records normalised keys, values, log decay and strength."""

    n_k_head: int
    n_v_head: int
    dim: int  # of keys and of values
    n_conv: int
    n_channel: int  # 2 * n_k_head * dim + n_v_head * dim

    @property
    def state(self) -> tuple[int, ...]:
        return self.n_v_head, self.dim, self.dim  # S[value, key]

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        k, v = (self.n_k_head, self.dim), (self.n_v_head, self.dim)
        return {"k": k, "v": v, "g": (self.n_v_head,), "beta": (self.n_v_head,)}


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Dimensions of one Mamba-2 layer. It records inputs, their directions (B), decay and step."""

    n_head: int
    head_dim: int
    n_group: int  # heads of a group share B and C
    n_state: int
    n_conv: int

    @property
    def n_channel(self) -> int:
        return self.n_head * self.head_dim + 2 * self.n_group * self.n_state

    @property
    def state(self) -> tuple[int, ...]:
        return self.n_head, self.head_dim, self.n_state

    @property
    def records(self) -> Mapping[str, tuple[int, ...]]:
        x, b = (self.n_head, self.head_dim), (self.n_group, self.n_state)
        return {"x": x, "b": b, "decay": (self.n_head,), "dt": (self.n_head,)}


def slot_floats(shape: RecurrentShape, width: int) -> tuple[int, int]:
    """(floats of a layer for one slot, floats of a checkpoint of it)."""
    window = (shape.n_conv - 1) * shape.n_channel
    saved = prod(shape.state) + window
    return saved + width * (shape.n_channel + sum(map(prod, shape.records.values()))), saved


class StateLayer:
    """Recurrent state of one layer for every slot, committed by folding.

    state  [slot, *shape.state]         f32  after the committed, folded tokens
    conv   [slot, taps - 1 + width, ch] f32  rows 0..taps-2: the last raw inputs before the fold point; then the raw inputs
                                             of the slot's last verify
    NAME   [slot, width, *dims]         f32  for each of shape.records: records of the last verify

    A verify only writes records. The next forward of the slot folds the accepted ones into `state`, in order, and shifts
    `conv` by as many: rolling back is folding fewer, so it copies nothing (spec: deferred commit).
    """

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    x: Tensor
    b: Tensor
    decay: Tensor
    dt: Tensor

    def __init__(self, shape: RecurrentShape, n_slot: int, width: int, device: torch.device) -> None:
        f32 = {"dtype": torch.float32, "device": device}
        self.shape, self.width = shape, width
        self.fold: Callable[[StateLayer, int, int], None] | None = None  # (this, slot, n): what its kernels fold with
        self.state = torch.zeros(n_slot, *shape.state, **f32)
        self.conv = torch.zeros(n_slot, shape.n_conv - 1 + width, shape.n_channel, **f32)
        for name, dims in shape.records.items():
            setattr(self, name, torch.zeros(n_slot, width, *dims, **f32))

    def records(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.shape.records)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.conv, *self.records()

    def reset(self, slot: int) -> None:
        """A new sequence: zero state, zero conv window. Records are dead without a fold count."""
        self.state[slot].zero_()
        self.conv[slot].zero_()

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


@dataclass(slots=True)
class Checkpoint:
    """The recurrent state of a slot at exactly `n_past` committed tokens. Immutable once taken."""

    n_past: int
    states: list[Tensor]
    convs: list[Tensor]
    hidden: Tensor | None = None  # [n_embd] f32, final-norm hidden of token n_past - 1, for MTP


class Memory:
    """All per-slot memory of one model: a KV pool per attention layer, a state per recurrent layer."""

    def __init__(self, kv: dict[int, KVPool], states: dict[int, StateLayer], width: int) -> None:
        self.kv, self.states, self.width = kv, states, width

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values, the same in all layers; f16 if no layer has any."""
        return next((pool.dtype for pool in self.kv.values()), torch.float16)

    def reset(self, slot: int) -> None:
        for layer in self.states.values():
            layer.reset(slot)

    def _saved(self, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """What a checkpoint holds of a slot: states and the windows of convolutions, layer by layer."""
        layers = self.states.values()
        return [s.state[slot] for s in layers], [s.conv[slot, : s.shape.n_conv - 1] for s in layers]

    def checkpoint(self, slot: int, n_past: int) -> Checkpoint:
        """Copy a slot's state, which must have nothing left to fold: one allocation, and on a GPU few launches."""
        states, convs = self._saved(slot)
        live = [*states, *convs]
        if not live:
            return Checkpoint(n_past, [], [])
        parts = live[0].new_empty(sum(t.numel() for t in live)).split([t.numel() for t in live])
        copies = [part.view(t.shape) for part, t in zip(parts, live, strict=True)]
        torch._foreach_copy_(copies, live)
        return Checkpoint(n_past, copies[: len(states)], copies[len(states) :])

    def restore(self, slot: int, saved: Checkpoint) -> None:
        states, convs = self._saved(slot)
        if states:
            torch._foreach_copy_([*states, *convs], [*saved.states, *saved.convs], non_blocking=True)

    @property
    def kv_bytes(self) -> int:
        return sum(p.n_bytes for p in self.kv.values())

    @property
    def state_bytes(self) -> int:
        return sum(s.n_bytes for s in self.states.values())
