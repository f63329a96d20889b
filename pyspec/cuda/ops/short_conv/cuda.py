"""`short_conv` on NVIDIA GPUs: one launch a layer (short_conv.cu), four channels of a sequence for each lane.

Same contract as the reference, and its order of taps. All lengths and counts are read on the device, so a captured graph may be replayed
for any batch of as many sequences and rows; sequences without rows touch nothing. A row's bits depend on its own tokens only, however
they came.
"""

from __future__ import annotations

from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.ops.recurrent.launch import (
    UNIT,
    Fold,
    Meta,
    check_kept,
    check_rows,
    counts_of,
    folding,
    meta_of,
    stretches,
)
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

CHANNELS, THREADS = 128, 128  # of a block
MOST_TAPS = 5  # each warp of a block moves a row of the window


def limits(spec: ShortConvSpec) -> str | None:
    s = spec.shape
    if s.n_channel % UNIT:
        return f"{s.n_channel} channels; the kernel takes multiples of {UNIT}"
    if not 1 < s.n_conv <= MOST_TAPS:
        return f"the convolution has {s.n_conv} taps; the kernel takes 2 to {MOST_TAPS}"
    return None


FILE = jit.KernelFile[ShortConvSpec](
    "short_conv",
    "plppp" + "pppp" + "iiii" + "p",
    lambda spec: {"CHANNELS": spec.shape.n_channel, "TAPS": spec.shape.n_conv},
)


class ShortConvLaunch:
    """Called as the reference."""

    def __init__(self, spec: ShortConvSpec) -> None:
        self.spec, self.kernel = spec, FILE.kernel(spec.device, spec)
        self.fault = faults.record(spec.device)

    def __call__(self, m: Tensor, w: Tensor, layer: StateLayer, batch: Batch) -> Tensor:
        check_rows("short_conv", (m,), layer, UNIT, n_part=3)
        check_kept("short_conv", (w,), (), layer, UNIT)
        out = m.new_empty(len(m), self.spec.shape.n_channel)
        if len(m):
            self._run(m, w, layer, meta_of(batch), out)
        return out

    def folder(self) -> Fold:
        def run(layer: StateLayer, meta: Meta) -> None:
            none = layer.conv[:0]
            # Weights are loaded, and not used; what the forward before it still writes is read at once, so it does not overlap
            self._run(none, layer.conv, layer, meta, none, overlap=False)

        return folding(run)

    def _run(
        self, m: Tensor, w: Tensor, layer: StateLayer, meta: Meta, out: Tensor, *, overlap: bool = True
    ) -> None:
        n_row, n_seq = len(m), len(meta[0])
        args = m, m.stride(0), w, layer.conv, out, *counts_of(meta, layer, n_row), self.fault
        grid = -(-self.spec.shape.n_channel // CHANNELS), stretches(n_row, n_seq, layer.width), n_seq
        self.kernel.launch(grid, THREADS, args, overlap=overlap)


bind = ShortConvLaunch
