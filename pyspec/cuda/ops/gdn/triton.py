"""`gdn` in Triton: two launches a layer, sequential over tokens (triton_kernels.py).

Same contract as gdn_ref, with its own order of sums. All lengths and counts are read on the device, so a captured graph may
be replayed for any batch of as many sequences and rows; sequences without rows touch nothing. A state does not depend on how its
tokens came, to the bit: one by one, as verifies, or as prompts however they were cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.gdn.ref import GUARD, GdnSpec, Given
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.recurrent.launch import Fold, Meta
from pyspec.slots.recurrent import StateLayer

ROWS = 16  # of a step of the convolution
COLUMNS, WARPS = 16, 2  # of a program of gdn_rows


def limits(spec: GdnSpec) -> str | None:
    shape = spec.shape
    if shape.dim & (shape.dim - 1) or not 16 <= shape.dim <= 256:
        return f"states are {shape.dim} wide; the kernel takes powers of two from 16 to 256"
    if shape.n_conv != common.TAPS:
        return f"the convolution has {shape.n_conv} taps; the kernel is built for {common.TAPS}"
    if shape.n_v_head % shape.n_k_head:
        return f"{shape.n_v_head} value heads are no multiple of {shape.n_k_head} key heads"
    return None


class GdnTriton:
    """The kernels of one spec; called as gdn_ref's."""

    def __init__(self, spec: GdnSpec, columns: int, warps: int) -> None:
        self.spec, self.columns, self.warps = spec, columns, warps
        self.fault = faults.record(spec.device)
        self.unread = torch.zeros(4, device=spec.device)

    def __call__(self, *given: *Given) -> Tensor:
        m, alpha, beta, a, dt_bias, conv_w, layer, batch = given
        shape = self.spec.shape
        out = m.new_empty(m.shape[0], shape.n_v_head, shape.dim)
        if m.shape[0]:
            common.check_rows("gdn", (m, alpha, beta), layer, per_head=(shape.n_decay, 1))
            common.check_kept("gdn", (a, dt_bias, conv_w), (1, shape.n_decay), layer)
            self._run((m, alpha, beta), (a, dt_bias, conv_w), layer, common.meta_of(batch), out)
        return out

    def folder(self) -> Fold:
        none, unread = self.unread[:0, None], self.unread
        return common.folding(
            lambda layer, meta: self._run((none, none, none), (unread,) * 3, layer, meta, unread)
        )

    def _run(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor, Tensor],
        layer: StateLayer,
        meta: Meta,
        out: Tensor,
    ) -> None:
        from pyspec.cuda.ops.gdn import triton_kernels as kernels

        shape, (m, alpha, beta), n_seq = self.spec.shape, rows, meta[0].shape[0]
        n_row, n_v = len(m), shape.n_v_head
        kd, vd = shape.n_k_head * shape.dim, n_v * shape.dim
        n_all = n_seq * layer.width + n_row
        sizes = [n_row * kd, n_all * kd, n_all * vd, n_all * n_v * shape.n_decay, n_all * n_v]
        buffers = layer.state.new_empty(sum(sizes)).split(sizes)
        counts = (n_seq, layer.state.shape[0], layer.width, n_row)
        strides, eps = [t.stride(0) for t in rows], self.spec.eps
        heads = {
            "N_K": shape.n_k_head,
            "N_V": n_v,
            "DIM": shape.dim,
            "OP": GUARD.number,
            "N_D": shape.n_decay,
        }
        of_rows = {**heads, "GROUPED": shape.grouped}
        rest = *buffers, *meta, self.fault
        tri.launch(
            kernels.gdn_conv,
            (shape.n_k_head + n_v, n_seq, common.stretches(n_row, n_seq, layer.width)),
            (m, alpha, beta, *weights, layer.conv, *layer.records(), *rest, *strides, *counts, eps),
            {**heads, "FLOOR": shape.floor, "ROWS": ROWS},
            4,
        )
        tri.launch(
            kernels.gdn_rows,
            (n_v, -(-shape.dim // self.columns), n_seq),
            (layer.state, *buffers, out, *meta, self.fault, *counts, shape.dim**-0.5),
            {**of_rows, "COLUMNS": self.columns},
            self.warps,
        )


def bind(spec: GdnSpec, *, columns: int = COLUMNS, warps: int = WARPS) -> GdnTriton:
    """For measurements, `columns` and `warps` of a program."""
    return GdnTriton(spec, min(columns, spec.shape.dim), warps)
