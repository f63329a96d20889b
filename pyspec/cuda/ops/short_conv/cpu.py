"""`short_conv` for CPUs in C++ (pyspec/cpu/native/short_conv.cpp), some channels of a sequence in a job.

Bound by: memory, four values in and one out for each channel and row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.recurrent import cpu as recurrent
from pyspec.cuda.ops.recurrent.launch import Fold
from pyspec.cuda.ops.recurrent.ref import check_seqs
from pyspec.cuda.ops.short_conv.ref import GUARD, ShortConvSpec
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

SHORT_CONV = CpuKernel("pyspec_short_conv", recurrent.CONV + recurrent.BATCH + "qq" + "q")


def limits(spec: ShortConvSpec) -> str | None:
    if spec.shape.n_channel % 8:
        return f"{spec.shape.n_channel} channels; the kernel takes multiples of 8"
    return recurrent.limits([], spec.shape.n_conv)


class CpuShortConv:
    """Called as the reference."""

    def __init__(self, spec: ShortConvSpec) -> None:
        self.spec, self.taps = spec, recurrent.Taps()

    def __call__(self, m: Tensor, w: Tensor, layer: StateLayer, batch: Batch) -> Tensor:
        check_seqs(batch, layer)
        n_row, n_channel = len(m), self.spec.shape.n_channel
        assert m.dtype == torch.float32 and m.shape[1] == 3 * n_channel and m.stride(1) == 1
        made, out = empty(n_row, n_channel), empty(n_row, n_channel)
        conv = recurrent.conv_args(made, self.taps(w), None, layer)
        seqs = recurrent.batch_args(batch, layer, n_row, GUARD)
        SHORT_CONV(*conv, *seqs, m, m.stride(0), out)
        return out

    def folder(self) -> Fold:
        """Like the reference's flush."""
        return recurrent.folder(SHORT_CONV, GUARD, 2)


bind = CpuShortConv
