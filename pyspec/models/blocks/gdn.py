"""Gated DeltaNet (qwen35, qwen3next): linear attention with a decaying state; conv, delta rule, gated norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.gdn.ref import GdnSpec, flush
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import HeadNorm, PrepKind, RowsSpec, head_power
from pyspec.models.cuts import Cut, KeyGroups, Keys, Readers
from pyspec.models.matrices import sum_of
from pyspec.models.part import Binding, LoadTypes, Pass, Place, Request
from pyspec.models.wants import Want
from pyspec.slots.memory import STATE
from pyspec.slots.parts import LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated DeltaNet as data.

    Where value heads are grouped by key heads (`shape.grouped`), files join matrices by key head: `ssm_ba` has the strengths and then the
    decays of its value heads, and `ssm_in` (old files) its query, key, values and output gates.
    """

    shape: GdnShape
    captures_prompts = True
    attends = scratch = None

    def tensors(self, at: Place) -> dict[str, Want]:
        s, n = self.shape, at.n_embd
        inner, groups = s.n_v_head * s.dim, self.groups
        k = Keys(groups, "key heads of Gated DeltaNet", whole=s.grouped)
        v = Readers(groups, "value heads of Gated DeltaNet", tiled=not s.grouped)
        by_head, by_channel = Cut(0, (v,)), Cut(0, (k, k, v))
        shapes = {
            "attn_qkv": Want((s.n_channel, n), cut=by_channel),
            "attn_gate": Want((inner, n), cut=by_head),
            "ssm_in": Want((s.n_channel + inner, n), cut=Cut(0, (k,))),
            "ssm_alpha": Want((s.n_v_head, n), cut=by_head),
            "ssm_beta": Want((s.n_v_head, n), cut=by_head),
            "ssm_ba": Want((2 * s.n_v_head, n), cut=Cut(0, (k,))),
        }
        return {
            **{at.name(f"{x}.weight"): shapes[x] for x in _projections(s, at.has("ssm_in.weight"))},
            at.name("ssm_conv1d.weight"): Want((s.n_channel, s.n_conv), cut=by_channel),
            at.name("ssm_a"): Want((s.n_v_head,), cut=by_head),
            at.name("ssm_dt.bias"): Want((s.n_v_head,), cut=by_head),
            at.name("ssm_norm.weight"): Want((s.dim,)),
            at.name("ssm_out.weight"): Want((n, inner), cut=Cut(1, (v,))),
        }

    def memory(self) -> LayerParts:
        return {STATE: Recurrent(self.shape)}

    def share(self, n: int) -> DeltaNet:
        n_key, n_reader = self.groups.places(n)
        return DeltaNet(self.shape.of_heads(n_key, n_key * n_reader))

    @property
    def groups(self) -> KeyGroups:
        """Its key heads with their value heads. Kernels of GPUs take heads of 128 dims in an even number."""
        s = self.shape
        return KeyGroups(s.n_k_head, s.n_v_head // s.n_k_head, even=s.dim == 128)

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        s = self.shape
        yield gdn, GdnSpec(on.device, s, at.eps)
        if on.streams:
            yield rows, RowsSpec(on.device, s.n_v_head * s.dim, PrepKind.HEADS, s.dim)
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)

    def bind(self, at: Binding) -> BoundDeltaNet:
        return BoundDeltaNet(self.shape, at)


def _projections(s: GdnShape, joined: bool) -> tuple[str, ...]:
    """Matrices whose products, side by side, are a row's channels, output gates, decays and strengths."""
    if not s.grouped:
        return "attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"
    return ("ssm_in", "ssm_ba") if joined else ("attn_qkv", "attn_gate", "ssm_ba")


def _by_kind(n_head: int, widths: Sequence[int], kinds: Sequence[int]) -> Tensor:
    """Rows of a matrix that has one part of each of `widths` rows by head -> its parts of each kind for all heads, in the order `kinds`."""
    parts = torch.arange(n_head * sum(widths)).view(n_head, -1).split(list(widths), 1)
    return torch.cat([parts[i].flatten() for i in kinds])


class BoundDeltaNet:
    """Gated DeltaNet over the slot's state."""

    def __init__(self, shape: GdnShape, at: Binding) -> None:
        w = at.weights
        self.eps = at.eps
        self.layer = at.layer
        self.norm = at.bound_norm()
        parts = _projections(shape, w.has(at.name("ssm_in.weight")))
        if shape.grouped:
            each = shape.n_v_head // shape.n_k_head
            wide = each * shape.dim
            ba = _by_kind(shape.n_k_head, (each, each), (1, 0))
            w.reorder(at.name("ssm_ba.weight"), ba)
            joined = _by_kind(shape.n_k_head, (shape.dim, shape.dim, wide, wide), range(4))
            w.reorder(at.name("ssm_in.weight"), joined)
        self.proj = w.matrix(*(at.name(f"{part}.weight") for part in parts))
        self.out = w.summed(at.name("ssm_out.weight"))
        self.conv = w.vector(at.name("ssm_conv1d.weight"))
        self.a, self.dt_bias = w.vector(at.name("ssm_a")), w.vector(at.name("ssm_dt.bias"))
        self.reads, self.gives = (self.proj, self.norm), sum_of(self.out)
        self.gate_norm = w.vector(at.name("ssm_norm.weight"))
        self.gate_power = head_power(self.gate_norm)
        spec = GdnSpec(w.device, shape, at.eps)
        self.gdn, self.capturable = gdn.bind(spec), gdn.chosen(spec).capturable
        self.captures_prompts = gdn.runs_as("cuda", spec)
        self.fold = fuse.folder(self.gdn, partial(flush, grouped=shape.grouped))
        self.split = [shape.n_channel, shape.n_v_head * shape.dim, shape.n_v_head, shape.n_v_head]

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        m, z, alpha, beta = self.proj(x, self.norm).split(self.split, -1)
        state = run.memory.states[self.layer]
        args = (m, alpha, beta, self.a, self.dt_bias, self.conv, state, run.batch)
        prep = HeadNorm(self.gate_norm, self.eps, z, self.gate_power)
        return fuse.then(self.gdn, args, self.out, prep, residual)
