"""Gated DeltaNet with deferred commit: fold, verify, prefill. Reference in plain torch.

    m            [row, channel]      f32  raw inputs of the convolution: q, k (k_head * dim each), v (v_head * dim, tiled)
    alpha, beta  [row, v_head]       f32  raw gates; like m, slices of wider rows
    a, dt_bias   [v_head]            f32  log decay g = a softplus(alpha + dt_bias) (<= 0), write strength b = sigmoid(beta)
                                          with a decay a key dimension (GdnShape.by_key): alpha [row, v_head * dim], dt_bias
                                          [v_head * dim], and g = floor sigmoid(a (alpha + dt_bias)) where it has a floor
    conv_w       [channel, taps]     f32  the last tap multiplies the current token
    layer        state, conv window and records of every slot (slots.memory); read and written for the batch's slots only
    out          [row, v_head, dim]  f32  before the gated norm

Per sequence: (1) fold the `n_fold` recorded rows into the state and shift the conv window by as many, (2) run the new rows
through conv, silu, l2 norm and the recurrence, (3) if the sequence is `keep`, store state and window after its rows, else
record the rows (k, v, g, b and raw m) and leave the stored state before them.

Recurrence per value head, with key head h % n_k_head (or as `GdnShape.grouped`): S <- S e^g, a number or one for each of its columns; d = b (v - S k); S <- S + d k^T; o = S q / sqrt(dim).
Tokens are taken in this order one by one, in a fold as in a verify, so a state does not depend on how its tokens came.
Only prompt chunks of at least CHUNKED rows go through the chunked form, which sums in another order; with a decay a key dimension none
does.
Sources: arXiv:2412.06464; memory layout of llama.cpp's qwen35; with a decay a key dimension arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.recurrent import ref as recurrent
from pyspec.cuda.ops.recurrent.check import layers_of, prompts, run_rounds
from pyspec.cuda.ops.recurrent.ref import CHUNK, Recurrence, check_seqs, convolve, run_rows, softplus
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

GUARD = Guard(3, FaultPlace.SLOT)

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateLayer, Batch]
Gdn = Callable[[*Given], Tensor]
"""gdn(m, alpha, beta, a, dt_bias, conv_w, layer, batch) -> out"""


@dataclass(frozen=True, slots=True)
class GdnSpec:
    device: torch.device
    shape: GdnShape
    eps: float


def gates(
    alpha: Tensor, beta: Tensor, a: Tensor, dt_bias: Tensor, shape: GdnShape
) -> tuple[Tensor, Tensor]:
    """Log decays and write strength of every row and value head. The sigmoid is spelt out, as is softplus."""
    z = alpha + dt_bias
    if shape.by_key:
        z, a = z.unflatten(-1, (-1, shape.dim)), a[:, None]
    g = shape.floor * _sigmoid(a * z) if shape.floor else a * softplus(z)
    return g, _sigmoid(beta)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def l2norm(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def step(
    state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, q: Tensor | None = None
) -> Tensor | None:
    """One token for many sequences, in place: state [n, dim, dim], k v q [n, dim], g [n] or [n, dim], beta [n].

    A row with g = 0 and beta = 0 leaves its state unchanged, bit for bit.
    """
    state.mul_(g.exp().view(len(g), 1, -1))
    d = beta[:, None] * (v - torch.bmm(state, k[:, :, None])[:, :, 0])
    state.baddbmm_(d[:, :, None], k[:, None, :])
    return None if q is None else torch.bmm(state, q[:, :, None])[:, :, 0]


def chunked(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence over [head, row, dim] in chunks, state [head, dim, dim] updated in place. Returns o (unscaled)."""
    out = []
    for i in range(0, q.shape[1], CHUNK):
        qi, ki, vi = (t[:, i : i + CHUNK] for t in (q, k, v))
        cum, bi = g[:, i : i + CHUNK].cumsum(-1), beta[:, i : i + CHUNK, None]
        n = qi.shape[1]
        low = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        decay = (cum[:, :, None] - cum[:, None, :]).masked_fill(~low, float("-inf")).exp()
        a = ((bi * ki) @ ki.mT * decay).tril(-1)
        eye = torch.eye(n, device=q.device, dtype=q.dtype)
        grow = cum.exp()[..., None]
        rhs = torch.cat([bi * vi, bi * grow * ki], -1)
        u, w = torch.linalg.solve_triangular(eye + a, rhs, upper=False, unitriangular=True).split(
            vi.shape[-1], -1
        )
        new = u - w @ state.mT
        out.append((grow * qi) @ state.mT + (qi @ ki.mT * decay) @ new)
        last = cum[:, -1:, None]
        state.mul_(last.exp()).baddbmm_(((last - cum[..., None]).exp() * new).mT, ki)
    return torch.cat(out, 1)


def _spread(k: Tensor, n_v_head: int, grouped: bool) -> Tensor:
    """Key heads to value heads, tiled or each several times in a row (`GdnShape.grouped`)."""
    if grouped:
        return k.repeat_interleave(n_v_head // k.shape[-2], -2)
    return k.repeat(*([1] * (k.dim() - 2)), n_v_head // k.shape[-2], 1)


def recurrence_of(n_v_head: int, grouped: bool) -> Recurrence:
    return Recurrence(step, lambda k: _spread(k, n_v_head, grouped), 0, (0.0, 0.0, 0.0, 0.0))


def bind(spec: GdnSpec) -> Gdn:
    shape = spec.shape
    kd, n_v, dim, taps = shape.n_k_head * shape.dim, shape.n_v_head, shape.dim, shape.n_conv
    scale, recurrence = dim**-0.5, recurrence_of(n_v, shape.grouped)

    def gdn(*given: *Given) -> Tensor:
        m, alpha, beta, a, dt_bias, conv_w, layer, batch = given
        check_seqs(batch, layer)
        g, beta = gates(alpha, beta, a, dt_bias, shape)
        c = convolve(m, conv_w, layer, batch, taps)
        q, k, v = c.split([kd, kd, n_v * dim], -1)
        q, k = (l2norm(t.unflatten(-1, (-1, dim)), spec.eps) for t in (q, k))
        v = v.unflatten(-1, (-1, dim))

        def long(own: Tensor, span: slice) -> Tensor:
            qs, ks = (_spread(x[span], n_v, shape.grouped).transpose(0, 1) for x in (q, k))
            vs, gs, bs = (x[span].transpose(0, 1) for x in (v, g, beta))
            return chunked(own, qs, ks, vs, gs, bs).transpose(0, 1)

        rows = k, v, g, beta
        return run_rows(recurrence, layer, batch, rows, q, None if shape.by_key else long) * scale

    return gdn


def flush(layer: StateLayer, slot: int, n_fold: int, *, grouped: bool = False) -> None:
    recurrent.flush(recurrence_of(layer.v.shape[2], grouped), layer, slot, n_fold)


def _parted(got: Tensor, want: Tensor, rounded: bool) -> str | None:
    """Whether outputs differ by more than rounding, to f16 if `rounded`."""
    if not rounded:
        close = torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    else:  # a sum of many f16 products can miss a small output by a lot, but not many, and never by the size of others
        close = (
            float((got - want).norm() / want.norm()) < 1e-3
            and float((got - want).abs().max() / want.std()) < 0.1
        )
    return None if close else f"outputs differ from the reference by {(got - want).abs().max():.2g}"


def check(
    launch: Callable[..., Tensor], reference: Callable[..., Tensor], spec: GdnSpec, rounded: bool = False
) -> str | None:
    """Compare ragged rounds; a sentence if outputs or states differ.

    `rounded`: all outputs are of f16; else only the last products of prompts may be, which no state sees.
    """
    gen, shape = torch.Generator().manual_seed(0), spec.shape
    layers = layers_of(shape, spec.device)
    n_decay = shape.n_v_head * shape.n_decay
    a, dt_bias = -torch.rand(shape.n_v_head, generator=gen), torch.randn(n_decay, generator=gen)
    a, dt_bias = a.to(spec.device), dt_bias.to(spec.device)
    conv_w = torch.randn(shape.n_channel, shape.n_conv, generator=gen).to(spec.device)

    def drawn(n: int) -> list[Tensor]:
        sizes = (n, shape.n_channel), (n, n_decay), (n, shape.n_v_head)
        return [
            *(4 * torch.rand(s, generator=gen).to(spec.device) - 2 for s in sizes),
            a,
            dt_bias,
            conv_w,
        ]

    def parted(got: Tensor, want: Tensor, batch: Batch) -> str | None:
        return _parted(got, want, rounded or any(s.width > 6 for s in batch.seqs))

    if why := run_rounds((launch, reference), layers, prompts(65, 64), drawn, parted):
        return why
    off = max(
        float((a - b).abs().max()) for a, b in zip(layers[0].tensors(), layers[1].tensors(), strict=True)
    )
    return None if off < 1e-4 else f"states differ from the reference by {off:.2g}"
