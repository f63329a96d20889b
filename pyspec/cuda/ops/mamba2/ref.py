"""Mamba-2 with deferred commit: fold, verify, prefill. Reference in plain torch.

    m            [row, channel]           f32  raw inputs of the convolution: x (head * head_dim), B, C (group * state each)
    dt           [row, head]              f32  raw steps; like m, slices of wider rows
    a, dt_bias   [head]                   f32  a < 0; step t = softplus(dt + dt_bias), decay e = exp(t a)
    d            [head]                   f32  weight of the input itself in the output
    conv_w, _b   [channel, taps], [channel] f32  the last tap multiplies the current token
    layer        state, conv window and records of every slot (slots.memory); read and written for the batch's slots only
    out          [row, head, head_dim]    f32  before gate and norm

Per sequence: (1) fold the `n_fold` recorded rows into the state and shift the conv window by as many, (2) run the new rows
through conv, silu and the recurrence, (3) if the sequence is `keep`, store state and window after its rows, else record the
rows (x, B, e, t and raw m) and leave the stored state before them.

Recurrence per head of group h // (head / group): S <- e S + (t x) B^T; o = S C + d x, with S [head_dim, state].
Tokens are taken in this order one by one, in a fold as in a verify, so a state does not depend on how its tokens came.
Only prompt chunks of at least CHUNKED rows go through the chunked (SSD) form, which sums in another order.
Source: arXiv:2405.21060; memory layout of llama.cpp's nemotron_h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate

import torch
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent import ref as recurrent
from pyspec.cuda.ops.recurrent.check import layers_of, prompts, run_rounds
from pyspec.cuda.ops.recurrent.ref import CHUNK, Recurrence, check_seqs, convolve, run_rows, softplus
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

GUARD = Guard(7, FaultPlace.SLOT)


@dataclass(frozen=True, slots=True)
class Params:
    """A layer's own tensors, shapes as above."""

    a: Tensor
    dt_bias: Tensor
    d: Tensor
    conv_w: Tensor
    conv_b: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.dt_bias, self.d, self.conv_w, self.conv_b


Mamba2 = Callable[Concatenate[Tensor, Tensor, Params, StateLayer, Batch, ...], Tensor]
"""mamba2(m, dt, params, layer, batch) -> out; one that fetches ahead takes `after`, too (fuse.py)"""


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    device: torch.device
    shape: Mamba2Shape


@dataclass(frozen=True, slots=True)
class MambaRows:
    """Rows after convolution and gates: x [row, head, head_dim], b c [row, group, state], dt log_decay [row, head]."""

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    log_decay: Tensor

    @property
    def decay(self) -> Tensor:
        return self.log_decay.exp()


def prepare(
    m: Tensor, dt: Tensor, p: Params, layer: StateLayer, batch: Batch, shape: Mamba2Shape
) -> MambaRows:
    """Steps 1 and 2 up to the recurrence; moves windows and stores raw rows."""
    step = softplus(dt + p.dt_bias)
    y = convolve(m, p.conv_w, layer, batch, shape.n_conv, p.conv_b)
    inner, wide = shape.n_head * shape.head_dim, shape.n_group * shape.n_state
    x, b, c = y.split([inner, wide, wide], -1)
    b, c = (t.unflatten(-1, (shape.n_group, shape.n_state)) for t in (b, c))
    return MambaRows(x.unflatten(-1, (shape.n_head, shape.head_dim)), b, c, step, step * p.a)


def step(
    state: Tensor, x: Tensor, b: Tensor, decay: Tensor, dt: Tensor, c: Tensor | None = None
) -> Tensor | None:
    """One token for many heads, in place: state [n, head_dim, state], x [n, head_dim], b c [n, state], decay dt [n].

    A row with decay 1 and dt 0 leaves its state unchanged.
    """
    state.mul_(decay[:, None, None]).addcmul_((dt[:, None] * x)[:, :, None], b[:, None, :])
    return None if c is None else torch.bmm(state, c[:, :, None])[:, :, 0]


def chunked(state: Tensor, rows: MambaRows) -> Tensor:
    """The recurrence over a sequence in chunks, state [head, head_dim, state] updated in place. Returns S C [head, row, dim].

    Log decays are summed in f64: only differences are used, and one token that forgets everything would take their digits.
    """
    n_head, dim, _ = state.shape
    n_group = rows.b.shape[1]
    # Heads that share B and C are multiplied with them at once
    whole = state.view(n_group, -1, state.shape[2])
    out = []
    for i in range(0, rows.x.shape[0], CHUNK):
        x = (rows.dt[i : i + CHUNK, :, None] * rows.x[i : i + CHUNK]).transpose(0, 1)
        b, c = (t[i : i + CHUNK].transpose(0, 1) for t in (rows.b, rows.c))
        total = rows.log_decay[i : i + CHUNK].T.double().cumsum(-1)
        n = x.shape[1]
        low = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        decay = (total[:, :, None] - total[:, None, :]).float().masked_fill(~low, float("-inf")).exp()
        since, left = total.exp().float()[..., None], (total[:, -1:] - total).exp().float()[..., None]
        pairs = ((c @ b.mT)[:, None] * decay.view(n_group, -1, n, n)).view(n_head, n, n)
        before = (c @ whole.mT).view(n_group, n, -1, dim).transpose(1, 2).reshape(n_head, n, dim)
        out.append(torch.baddbmm(since * before, pairs, x))
        state.mul_(since[:, -1:])
        whole.baddbmm_((left * x).mT.reshape(n_group, -1, n), b)
    return torch.cat(out, 1)


def spread(b: Tensor, n_head: int) -> Tensor:
    """Groups [..., group, state] to heads: head h reads group h // (heads of a group)."""
    return b.repeat_interleave(n_head // b.shape[-2], -2)


def recurrence_of(n_head: int) -> Recurrence:
    return Recurrence(step, lambda b: spread(b, n_head), 1, (0.0, 0.0, 1.0, 0.0))


def bind(spec: Mamba2Spec) -> Mamba2:
    shape, recurrence = spec.shape, recurrence_of(spec.shape.n_head)

    def mamba2(m: Tensor, dt: Tensor, p: Params, layer: StateLayer, batch: Batch) -> Tensor:
        check_seqs(batch, layer)
        rows = prepare(m, dt, p, layer, batch, shape)

        def long(own: Tensor, span: slice) -> Tensor:
            return chunked(
                own, MambaRows(*(getattr(rows, name)[span] for name in MambaRows.__slots__))
            ).transpose(0, 1)

        out = run_rows(recurrence, layer, batch, (rows.x, rows.b, rows.decay, rows.dt), rows.c, long)
        return out.addcmul_(rows.x, p.d[:, None])

    return mamba2


def flush(layer: StateLayer, slot: int, n_fold: int) -> None:
    recurrent.flush(recurrence_of(layer.x.shape[2]), layer, slot, n_fold)


def make_params(shape: Mamba2Shape, gen: torch.Generator, device: torch.device) -> Params:
    """Random parameters of usual sizes: heads that forget at once beside heads that hardly do."""
    n = shape.n_head
    a = -(torch.rand(n, generator=gen) * 4 - 2).exp()
    a[-1:] = -300.0
    conv_w = torch.randn(shape.n_channel, shape.n_conv, generator=gen) / 2
    conv_b = torch.randn(shape.n_channel, generator=gen)
    drawn = (a, torch.randn(n, generator=gen) - 2, torch.randn(n, generator=gen), conv_w, 0.3 * conv_b)
    return Params(*(t.to(device) for t in drawn))


PROMPT = 100  # rows of the check's prompts, and more: an implementation may have f16 products that no state sees


def _parted(got: Tensor, want: Tensor, batch: Batch) -> str | None:
    """Whether a sequence's outputs [row, head, head_dim] differ by more than rounding."""
    for s, seq in enumerate(batch.seqs):
        a, b = (t[batch.starts[s] : batch.starts[s + 1]] for t in (got, want))
        if seq.width < PROMPT:
            close = torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(want.std()))
        else:  # small outputs of large sums may miss by a lot, but not many, and those of no head
            off, size = (a - b).norm(dim=(0, 2)), b.norm(dim=(0, 2))
            close = bool((off <= 2e-3 * size).all()) and float((a - b).abs().max()) < 0.1 * float(
                b.std()
            )
        if not close:
            return f"outputs differ from the reference by {(a - b).abs().max():.2g}"
    return None


def check(launch: Mamba2, reference: Mamba2, spec: Mamba2Spec) -> str | None:
    """Ragged rounds on both, with steps from next to nothing to 50; a sentence if outputs or states part."""
    gen, shape = torch.Generator().manual_seed(0), spec.shape
    layers, p = layers_of(shape, spec.device), make_params(shape, gen, spec.device)

    def drawn(n: int) -> tuple[Tensor, Tensor, Params]:
        wide = torch.randn(n, shape.n_channel + shape.n_head, generator=gen).to(spec.device)
        m, dt = wide.split([shape.n_channel, shape.n_head], -1)
        dt[0], dt[-1] = 50.0, -50.0
        return m, dt, p

    if why := run_rounds((launch, reference), layers, prompts(135, 65), drawn, _parted):
        return why
    for got, want in zip(layers[0].tensors(), layers[1].tensors(), strict=True):
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.std())):
            return f"states differ from the reference by {(got - want).abs().max():.2g}"
    return None
