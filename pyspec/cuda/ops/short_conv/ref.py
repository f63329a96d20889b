"""A gated short convolution with deferred commit (LFM2). Reference in plain torch.

    m      [row, 3 * channel]   f32  gates b and c and inputs u side by side; a slice of wider rows or not
    w      [channel, taps]      f32  the last tap multiplies the current token
    layer  the window of every slot (slots.memory); read and written for the batch's slots only
    out    [row, channel]       f32  c * convolution of b * u, without an activation

Per sequence: the window moves by the `n_fold` rows that were accepted, then come the new rows. The products b * u are the raw inputs of the
window. They stay behind it if the sequence is a verify, so taking rows back is to move by fewer (recurrent/ref.py).
Source: the LFM2 technical report, arXiv:2511.23404; tensors of llama.cpp's lfm2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.recurrent.check import layers_of, prompts, run_rounds
from pyspec.cuda.ops.recurrent.ref import check_seqs, has_records, shift_window, through_window
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

GUARD = Guard(14, FaultPlace.SLOT)

ShortConv = Callable[[Tensor, Tensor, StateLayer, Batch], Tensor]
"""short_conv(m, w, layer, batch) -> out"""


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    device: torch.device
    shape: ShortConvShape


def bind(spec: ShortConvSpec) -> ShortConv:
    taps = spec.shape.n_conv

    def short_conv(m: Tensor, w: Tensor, layer: StateLayer, batch: Batch) -> Tensor:
        check_seqs(batch, layer)
        b, c, u = m.chunk(3, -1)
        return c * through_window(b * u, w, layer, batch, taps)

    return short_conv


def flush(layer: StateLayer, slot: int, n_fold: int) -> None:
    """Move a slot's window to its committed length now (checkpoints)."""
    if has_records(layer, slot, n_fold):
        shift_window(layer, slot, n_fold)


def check(launch: ShortConv, reference: ShortConv, spec: ShortConvSpec) -> str | None:
    """Ragged rounds on both; a sentence if outputs or windows part."""
    gen, shape = torch.Generator().manual_seed(0), spec.shape
    layers = layers_of(shape, spec.device)
    w = torch.randn(shape.n_channel, shape.n_conv, generator=gen).to(spec.device)

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3 * shape.n_channel, generator=gen).to(spec.device), w

    def parted(got: Tensor, want: Tensor, batch: Batch) -> str | None:
        n = batch.starts[-1]
        off = (got[:n] - want[:n]).abs().max()
        return (
            None if off < 1e-5 * want.abs().max() else f"outputs differ from the reference by {off:.2g}"
        )

    if why := run_rounds((launch, reference), layers, prompts(135, 65), drawn, parted):
        return why
    off = (layers[0].conv - layers[1].conv).abs().max()
    return None if off < 1e-5 else f"windows differ from the reference by {off:.2g}"
