"""`mamba2` in Triton: two launches a layer, sequential over tokens (triton_kernels.py).

Same contract as mamba2_ref, with its own order of sums over the state's columns. All lengths and counts are read on the device, so
a captured graph may be replayed for any batch of as many sequences and rows; sequences without rows touch nothing. A state does
not depend on how its tokens came, to the bit: one by one, as verifies, or as prompts however they were cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.mamba2.ref import GUARD, Mamba2Spec, Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.recurrent.launch import Fold, Meta
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

ROWS = 16  # of a step of the convolution
PART, WARPS = 8, 1  # of a program of mamba2_rows
CHANNELS = 128  # of a program of mamba2_conv, at most


def limits(spec: Mamba2Spec) -> str | None:
    s = spec.shape
    if s.n_conv != common.TAPS:
        return f"the convolution has {s.n_conv} taps; the kernel is built for {common.TAPS}"
    if s.head_dim & (s.head_dim - 1) or s.n_state & (s.n_state - 1):
        return f"heads are {s.head_dim} wide, states {s.n_state}; the kernel takes powers of two"
    if s.n_head % s.n_group or channels_of(s) < 16:
        return f"{s.n_head} heads of {s.head_dim} and {s.n_group} groups of {s.n_state} share no blocks of 16 channels"
    return None


def channels_of(s: Mamba2Shape) -> int:
    """Of a program of mamba2_conv: a power of two that x, B and C are multiples of."""
    both = math.gcd(s.n_head * s.head_dim, s.n_group * s.n_state)
    return min(both & -both, CHANNELS)


class Mamba2Triton:
    """The kernels of one spec; called as mamba2_ref's."""

    def __init__(self, spec: Mamba2Spec, part: int, warps: int) -> None:
        self.spec, self.part, self.warps, self.fault = spec, part, warps, faults.record(spec.device)
        unread = torch.zeros(4, device=spec.device)
        self.unread, self.no_params = unread, Params(unread, unread, unread, unread, unread)

    def __call__(self, m: Tensor, dt: Tensor, p: Params, layer: StateLayer, batch: Batch) -> Tensor:
        s = self.spec.shape
        out = m.new_empty(m.shape[0], s.n_head, s.head_dim)
        if m.shape[0]:
            common.check_rows("mamba2", (m, dt), layer)
            common.check_kept("mamba2", p.tensors, (1, 1, 1), layer)
            self._run(m, dt, p, layer, common.meta_of(batch), out)
        return out

    def folder(self) -> Fold:
        none, unread = self.unread[:0, None], self.unread
        return common.folding(
            lambda layer, meta: self._run(none, none, self.no_params, layer, meta, unread)
        )

    def _run(self, m: Tensor, dt: Tensor, p: Params, layer: StateLayer, meta: Meta, out: Tensor) -> None:
        from pyspec.cuda.ops.mamba2 import triton_kernels as kernels

        s, n_row, n_seq = self.spec.shape, m.shape[0], meta[0].shape[0]
        inner, wide, n_all = s.n_head * s.head_dim, s.n_group * s.n_state, n_seq * layer.width + n_row
        sizes = [n_all * inner, n_all * wide, n_row * wide, n_all * s.n_head, n_all * s.n_head]
        buffers = layer.state.new_empty(sum(sizes)).split(sizes)
        counts, block = (n_seq, layer.state.shape[0], layer.width, n_row), channels_of(s)
        weights = p.a, p.dt_bias, p.conv_w, p.conv_b
        rest = *buffers, *meta, self.fault
        tri.launch(
            kernels.mamba2_conv,
            (s.n_channel // block + 1, n_seq, common.stretches(n_row, n_seq, layer.width)),
            (m, dt, *weights, layer.conv, *layer.records(), *rest, m.stride(0), dt.stride(0), *counts),
            {
                "HEADS": s.n_head,
                "SOME_HEADS": 1 << (s.n_head - 1).bit_length(),
                "INNER": inner,
                "WIDE": wide,
                "BLOCK": block,
                "ROWS": ROWS,
                "OP": GUARD.number,
            },
            4,
        )
        tri.launch(
            kernels.mamba2_rows,
            (s.n_head, -(-s.head_dim // self.part), n_seq),
            (layer.state, p.d, *buffers, out, *meta, self.fault, *counts),
            {
                "HEADS": s.n_head,
                "GROUPS": s.n_group,
                "DIM": s.head_dim,
                "N_STATE": s.n_state,
                "PART": self.part,
                "OP": GUARD.number,
            },
            self.warps,
        )


def bind(spec: Mamba2Spec, *, part: int = PART, warps: int = WARPS) -> Mamba2Triton:
    """For measurements, `part` and `warps`: rows of the state that a program has, and its warps."""
    return Mamba2Triton(spec, min(part, spec.shape.head_dim), warps)
