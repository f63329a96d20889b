"""Qwen's encoders: LayerNorm (RMS in 2.5), rope by row and column, and neighbours side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.vision.parts import EncoderWeights, Patches, Tower, convolved, frequencies, gelu, stretched
from pyspec.vision.projector import Projector

WINDOW = 112  # pixels a side


def _embed(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    table = w["v.position_embd.weight"]
    return convolved(w, pixels, at) + stretched(table, at, "bilinear", align_corners=True)


def angles(at: Patches, dim: int) -> Tensor:
    """Halves of a head are pairs: the first half of them turns by the row, the second by the column."""
    turn = frequencies(10000.0, dim // 4, 0, 4, dim, at)
    return torch.cat((at.y[:, None] * turn, at.x[:, None] * turn), -1)[:, None]


def _beside(w: EncoderWeights, x: Tensor) -> Tensor:
    """[tokens, width merge merge]: the patches of a token are neighbours in the stream."""
    return x.view(-1, w.projector.merge**2 * x.shape[-1])


def _rows(w: EncoderWeights, x: Tensor, at: Patches) -> Tensor:
    z = _beside(w, w.norm("v.post_ln", x))
    return w.product("mm.2")(gelu(w.product("mm.0")(z)))


def _deep(w: EncoderWeights, x: Tensor, block: int) -> Tensor:
    name = f"v.deepstack.{block}"
    z = w.layer_norm(f"{name}.norm", _beside(w, x))
    return w.product(f"{name}.fc2")(gelu(w.product(f"{name}.fc1")(z)))


def _windows(p: Projector, at: Patches) -> list[Tensor]:
    """Windows of whole tokens; those at the edges are smaller, and windows of one shape stand together."""
    side = WINDOW // p.step * p.merge
    number = at.y // side * (at.columns // side + 1) + at.x // side
    order = number.argsort(stable=True)
    counts = number.bincount()
    groups = order.split(counts[counts > 0].tolist())
    return [
        torch.stack([group for group in groups if len(group) == n]) for n in {len(g) for g in groups}
    ]


QWEN3VL = Tower(_embed, _rows, angles, is_blocked=True, deep=_deep)
QWEN2VL = Tower(convolved, _rows, angles, is_blocked=True)
QWEN25VL = Tower(convolved, _rows, angles, is_blocked=True, windows=_windows)
