"""Arguments of the CPU kernels of recurrent layers: structs of native/recurrent.h, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel
from pyspec.cuda import faults
from pyspec.cuda.op import Guard
from pyspec.cuda.ops.recurrent.launch import Fold, Meta, folding, meta_of
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

WIDEST, TAPS_MOST = 512, 8  # as in native/recurrent.h
CONV, BATCH = "qqqqqqq", "qqqqq" + "qqqqq"

Arg = Tensor | int | None


def limits(widths: Sequence[int], taps: int) -> str | None:
    """Why the kernels do not run; None if they do. widths: values of a head or group, each a row of a record or of the state."""
    if any(n % 8 or n > WIDEST for n in widths):
        return f"heads are {' and '.join(map(str, widths))} wide; the kernel takes multiples of 8 up to {WIDEST}"
    if not 1 < taps <= TAPS_MOST:
        return f"the convolution has {taps} taps; the kernel takes 2 to {TAPS_MOST}"
    return None


class Taps:
    """A convolution's weights [channel, taps] as [taps, channel], turned at the first call, by numpy, because a recording refuses torch."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, w: Tensor) -> Tensor:
        if self.seen is None or self.seen[0] is not w:
            self.seen = w, torch.from_numpy(np.ascontiguousarray(w.T.numpy()))
        return self.seen[1]


def conv_args(m: Tensor, w: Tensor, bias: Tensor | None, layer: StateLayer) -> list[Arg]:
    """w: turned."""
    assert m.stride(1) == 1 and m.shape[1] == layer.shape.n_channel, (
        "rows of the layer's channels, each contiguous"
    )
    return [m, m.stride(0), w, bias, layer.conv, len(w), m.shape[1]]


def batch_args(batch: Batch, layer: StateLayer, n_row: int, guard: Guard) -> list[Arg]:
    return _batch_args(meta_of(batch), layer, n_row, guard)


def folder(kernel: CpuKernel, guard: Guard, n_gate: int, *sizes: float) -> Fold:
    """The call that folds a slot's records with the kernel that runs rows: a batch of one sequence without any. n_gate: arguments of rows."""

    def run(layer: StateLayer, meta: Meta) -> None:
        conv = [None, 0, None, None, layer.conv, layer.shape.n_conv, layer.shape.n_channel]
        kept = (layer.state, *layer.records()) if layer.shape.records else ()
        kernel(*conv, *_batch_args(meta, layer, 0, guard), *[None] * n_gate, *kept, None, *sizes)

    return folding(run)


def _batch_args(seqs: Sequence[Tensor], layer: StateLayer, n_row: int, guard: Guard) -> list[Arg]:
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in seqs), (
        "metadata of kernels is int32"
    )
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in layer.tensors()), (
        "states are contiguous f32"
    )
    fault = faults.record(layer.state.device)
    return [*seqs, fault, guard.number, len(seqs[0]), layer.state.shape[0], layer.width, n_row]
