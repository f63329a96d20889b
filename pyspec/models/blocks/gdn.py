"""Gated DeltaNet (qwen35, qwen3next): linear attention with a decaying state; conv, delta rule, gated norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pyspec.cuda.ops.gdn.ref import GdnSpec, flush
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.forward.call import Folding, Value
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, KeyGroups, Keys, Readers
from pyspec.models.part import Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import STATE, LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class DeltaNet(Plain):
    """Gated DeltaNet as data.

    Where value heads are grouped by key heads (`shape.grouped`), files join matrices by key head: `ssm_ba` has the strengths and then the
    decays of its value heads, and `ssm_in` (old files) its query, key, values and output gates.

    gate  of its normed outputs: silu or sigmoid
    """

    shape: GdnShape
    gate: str = "silu"

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
        return replace(self, shape=self.shape.of_heads(n_key, n_key * n_reader))

    @property
    def groups(self) -> KeyGroups:
        """Its key heads with their value heads. Kernels of GPUs take heads of 128 dims in an even number."""
        s = self.shape
        return KeyGroups(s.n_k_head, s.n_v_head // s.n_k_head, even=s.dim == 128)

    @property
    def folds(self) -> Folding:
        return "gdn", partial(flush, grouped=self.shape.grouped)

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        s = self.shape
        widths = s.n_channel, s.n_v_head * s.dim, s.n_v_head, s.n_v_head
        names = [f"{part}.weight" for part in _projections(s, f.at.has("ssm_in.weight"))]
        by_head = s.n_k_head, s.n_v_head // s.n_k_head if s.grouped else 0, s.dim
        proj = f.product_by(f.read(_by_kind, *names, by_head=by_head), f.normed(x), sum(widths))
        m, z, alpha, beta = f.split(proj, widths)
        own = [f.vector(name) for name in ("ssm_a", "ssm_dt.bias", "ssm_conv1d.weight")]
        spec, shape = GdnSpec(f.device, s, f.eps), (s.n_v_head, s.dim)
        y = f.op("gdn", spec, m, alpha, beta, *own, f.state, f.batch, shape=shape)
        if self.gate == "sigmoid":
            y = sigmoid_gated(f, y, z, shape)
        else:
            y = f.head_norm(f.flat(y), f.vector("ssm_norm.weight"), z, s.dim)
        return f.summed(y, "ssm_out.weight", x.width, stream)


def sigmoid_gated(f: Forward, y: Value, gate: Value, heads: tuple[int, int]) -> Value:
    """Outputs y of heads, normed, times sigmoid(gate)."""
    n_head, dim = heads
    y = f.view(y, f".view(-1, {dim})", heads)
    y = f.op("norms", NormsSpec(f.device, dim, f.eps), y, f.vector("ssm_norm.weight"), shape=heads)
    y = f.view(y, f".view(-1, {n_head * dim})", (n_head * dim,))
    return f.head_gate(y, f.view(gate, f".unflatten(1, {heads})", heads))


def _projections(s: GdnShape, joined: bool) -> tuple[str, ...]:
    """Matrices whose products, side by side, are a row's channels, output gates, decays and strengths."""
    if not s.grouped:
        return "attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"
    return ("ssm_in", "ssm_ba") if joined else ("attn_qkv", "attn_gate", "ssm_ba")


def _by_kind(w: Any, *names: str, by_head: tuple[int, int, int]) -> Any:
    """The projections side by side. by_head: key heads, value heads of each and their dims, where matrices are joined by key head: their rows
    go by kind first."""
    n_head, each, dim = by_head
    kinds = {
        "ssm_ba.weight": ((each, each), (1, 0)),
        "ssm_in.weight": ((dim, dim, each * dim, each * dim), range(4)),
    }
    for name in names:
        widths, order = kinds.get(name.split(".", 2)[-1], ((), ())) if each else ((), ())
        if widths:
            parts = torch.arange(n_head * sum(widths)).view(n_head, -1).split(list(widths), 1)
            w.reorder(name, torch.cat([parts[i].flatten() for i in order]))
    return w.matrix(*names)
