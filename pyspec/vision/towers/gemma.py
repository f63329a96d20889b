"""Gemma's encoders: SigLIP of Gemma 3; of Gemma 4 one with ropes and norms around everything, and one without blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.vision.parts import (
    EncoderWeights,
    Patches,
    Tower,
    by_axes,
    convolved,
    cut,
    frequencies,
    pooled,
)

EPS = 1e-5  # of the norms of an encoder without blocks


def _embed3(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    return convolved(w, pixels, at) + w["v.position_embd.weight"]


def _rows3(w: EncoderWeights, x: Tensor, at: Patches) -> Tensor:
    z = pooled(w.layer_norm("v.post_ln", x), at, w.projector.merge)
    matrix = w["mm.input_projection.weight"]  # [width, width of the text model]
    return w.rms("mm.soft_emb_norm", z).to(matrix.dtype) @ matrix


def _embed4(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    return convolved(w, 2 * pixels - 1, at) + by_axes(w["v.position_embd.weight"], at)


def _angles4(at: Patches, dim: int) -> Tensor:
    """The first half of a head turns by the column, the second by the row; pairs are within a half."""
    turn = frequencies(100.0, dim // 4, 0, 4, dim, at)
    return torch.stack((at.x[:, None] * turn, at.y[:, None] * turn), 1)


def _rows4(w: EncoderWeights, x: Tensor, at: Patches) -> Tensor:
    z = pooled(x, at, w.projector.merge) * x.shape[-1] ** 0.5
    if "v.std_bias" in w:
        z = z - w["v.std_bias"]
    for name in ("v.std_scale", "v.std_scale.weight"):
        z = z * w[name] if name in w else z
    return _projected(w, z, at)


def _embed4_patches(w: EncoderWeights, pixels: Tensor, at: Patches) -> Tensor:
    z = w.layer_norm("v.patch_norm.1", cut(pixels, w.projector.patch, at), EPS)
    z = w.layer_norm("v.patch_norm.2", w.product("v.patch_embd")(z), EPS)
    return w.layer_norm("v.patch_norm.3", z + by_axes(w["v.position_embd.weight"], at), EPS)


def _projected(w: EncoderWeights, z: Tensor, at: Patches) -> Tensor:
    return w.product("mm.input_projection")(w.rms("", z))


GEMMA3 = Tower(_embed3, _rows3)
GEMMA4V = Tower(_embed4, _rows4, _angles4)
GEMMA4UV = Tower(_embed4_patches, _projected)
