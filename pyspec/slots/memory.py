"""The memory that slots keep between rounds: paged keys and values, and recurrent state with its records.

Everything is allocated once, at load. A page is written only by the slot that holds it; a state row only by its slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class KVPool:
    """Keys and values of one attention layer for every page.

    k, v  [row, head, dim]  row = page * page_size + offset
    """

    def __init__(self, n_row: int, n_head: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = torch.zeros(n_row, n_head, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)

    def write(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [row, head, dim] go to pool rows `rows` [row]."""
        self.k.index_copy_(0, rows, k.to(self.k.dtype))
        self.v.index_copy_(0, rows, v.to(self.v.dtype))

    @property
    def n_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


@dataclass(frozen=True, slots=True)
class StateShape:
    """Dimensions of one recurrent layer (Gated DeltaNet)."""

    n_k_head: int
    n_v_head: int
    dim: int  # of keys and of values
    n_conv: int  # taps of the convolution
    n_channel: int  # 2 * n_k_head * dim + n_v_head * dim


class StateLayer:
    """Recurrent state of one layer for every slot, committed by folding.

    state  [slot, v_head, dim, dim]     f32  S[value, key] after the committed, folded tokens
    conv   [slot, taps - 1 + width, ch] f32  rows 0..taps-2: the last raw inputs before the fold point; then the raw inputs
                                             of the slot's last verify
    k      [slot, width, k_head, dim]   f32  records of the last verify: normalised keys, values, log decay, strength
    v      [slot, width, v_head, dim]   f32
    g      [slot, width, v_head]        f32
    beta   [slot, width, v_head]        f32

    A verify only writes records. The next forward of the slot folds the accepted ones into `state`, in order, and shifts
    `conv` by as many: rolling back is folding fewer, so it copies nothing (spec: deferred commit).
    """

    def __init__(self, shape: StateShape, n_slot: int, width: int, device: torch.device) -> None:
        f32 = {"dtype": torch.float32, "device": device}
        self.shape, self.width = shape, width
        self.state = torch.zeros(n_slot, shape.n_v_head, shape.dim, shape.dim, **f32)
        self.conv = torch.zeros(n_slot, shape.n_conv - 1 + width, shape.n_channel, **f32)
        self.k = torch.zeros(n_slot, width, shape.n_k_head, shape.dim, **f32)
        self.v = torch.zeros(n_slot, width, shape.n_v_head, shape.dim, **f32)
        self.g = torch.zeros(n_slot, width, shape.n_v_head, **f32)
        self.beta = torch.zeros(n_slot, width, shape.n_v_head, **f32)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.conv, self.k, self.v, self.g, self.beta

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

    def reset(self, slot: int) -> None:
        for layer in self.states.values():
            layer.reset(slot)

    def checkpoint(self, slot: int, n_past: int) -> Checkpoint:
        """Copy a slot's state, which must have nothing left to fold."""
        taps = [s.shape.n_conv - 1 for s in self.states.values()]
        return Checkpoint(
            n_past,
            [s.state[slot].clone() for s in self.states.values()],
            [s.conv[slot, :n].clone() for s, n in zip(self.states.values(), taps, strict=True)],
        )

    def restore(self, slot: int, saved: Checkpoint) -> None:
        for layer, state, conv in zip(self.states.values(), saved.states, saved.convs, strict=True):
            layer.state[slot].copy_(state)
            layer.conv[slot, : conv.shape[0]].copy_(conv)

    @property
    def kv_bytes(self) -> int:
        return sum(p.n_bytes for p in self.kv.values())

    @property
    def state_bytes(self) -> int:
        return sum(s.n_bytes for s in self.states.values())
