"""Pixtral's encoder: RMS, gates, and a row of its own behind each row of a picture."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.vision.parts import (
    EncoderWeights,
    Patches,
    Tower,
    convolved,
    frequencies,
    gelu,
    side_by_side,
)


def _embed(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    return w.rms("v.pre_ln", convolved(w, pixels, at))


def _angles(at: Patches, dim: int) -> Tensor:
    """Neighbours are pairs: those of the first half of a head turn by the row, with even frequencies, the others by the column, with odd ones."""
    even, odd = (frequencies(10000.0, dim // 4, first, 4, dim, at) for first in (0, 2))
    return torch.cat((at.y[:, None] * even, at.x[:, None] * odd), -1)[..., None]


def _rows(w: EncoderWeights, x: Tensor, at: Patches) -> Tensor:
    side = w.projector.merge
    if side > 1:
        x = w.product("mm.patch_merger")(side_by_side(w.rms("mm.input_norm", x), at, side))
    rows = w.product("mm.2")(gelu(w.product("mm.1")(x))).unflatten(0, (at.rows // side, -1))
    breaks = w["v.token_embd.img_break"].to(rows.dtype).expand(len(rows), 1, -1)
    return torch.cat((rows, breaks), 1).flatten(0, 1)[:-1]


PIXTRAL = Tower(_embed, _rows, _angles)
