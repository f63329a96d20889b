"""`short_conv` in Triton: one launch a layer (triton_kernels.py). Same contract as the reference, and its order of taps.

All lengths and counts are read on the device, so a captured graph may be replayed for any batch of as many sequences and rows;
sequences without rows touch nothing.
"""

from __future__ import annotations

from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.recurrent.launch import Fold, Meta
from pyspec.cuda.ops.short_conv.ref import GUARD, ShortConvSpec
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

ROWS, BLOCK, WARPS = 16, 64, 2  # rows of a step, channels of a program


def limits(spec: ShortConvSpec) -> str | None:
    if not 1 < spec.shape.n_conv <= 8:
        return f"the convolution has {spec.shape.n_conv} taps; the kernel takes 2 to 8"
    return None


class TritonShortConv:
    """Called as the reference."""

    def __init__(self, spec: ShortConvSpec) -> None:
        self.spec, self.fault = spec, faults.record(spec.device)

    def __call__(self, m: Tensor, w: Tensor, layer: StateLayer, batch: Batch) -> Tensor:
        out = m.new_empty(m.shape[0], self.spec.shape.n_channel)
        if m.shape[0]:
            common.check_rows("short_conv", (m,), layer, n_part=3)
            common.check_kept("short_conv", (w,), (), layer)
            self._run(m, w, layer, common.meta_of(batch), out)
        return out

    def folder(self) -> Fold:
        def run(layer: StateLayer, meta: Meta) -> None:
            none = layer.state[:0]
            self._run(none, none, layer, meta, none)

        return common.folding(run)

    def _run(self, m: Tensor, w: Tensor, layer: StateLayer, meta: Meta, out: Tensor) -> None:
        from pyspec.cuda.ops.short_conv import triton_kernels as kernels

        s, n_row, n_seq = self.spec.shape, m.shape[0], meta[0].shape[0]
        counts = n_seq, layer.state.shape[0], layer.width, n_row
        tri.launch(
            kernels.short_conv_rows,
            (-(-s.n_channel // BLOCK), n_seq, common.stretches(n_row, n_seq, layer.width)),
            (m, w, layer.conv, out, *meta, self.fault, m.stride(0), *counts),
            {
                "CHANNELS": s.n_channel,
                "TAPS": s.n_conv,
                "SOME_TAPS": 1 << (s.n_conv - 1).bit_length(),
                "BLOCK": BLOCK,
                "ROWS": ROWS,
                "OP": GUARD.number,
            },
            WARPS,
        )


bind = TritonShortConv
