"""Kimi Delta Attention: Gated DeltaNet's rule with a decay for each dimension of a key; its outputs have gates by a sigmoid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.gdn.ref import GdnSpec, flush
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.blocks.gdn import sigmoid_gated
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import STATE, LayerParts, Recurrent

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_g_a", "ssm_beta")
"""Their products stand side by side."""


@dataclass(frozen=True, slots=True)
class Kda(Plain):
    """Kimi Delta Attention as data. Decays and gates come by one matrix or by two (`ssm_f_b`, `ssm_g_b`), as the file has them.

    turns_decays  `ssm_a` has another sign than the op wants
    gate     the (first) matrix of gates
    eps      of norms of queries and keys; 0.0: the model's
    """

    shape: GdnShape
    turns_decays: bool = False
    gate: str = "ssm_g_a"
    eps: float = 0.0
    folds = "gdn", flush

    @property
    def _inner(self) -> int:
        return self.shape.n_v_head * self.shape.dim

    def tensors(self, at: Place) -> dict[str, Want]:
        s, n, inner = self.shape, at.n_embd, self._inner
        by_head = Cut(0, (Units(s.n_v_head, "heads of Kimi Delta Attention"),))
        of_conv = Want((inner, 1, s.n_conv), also=((inner, s.n_conv),), cut=by_head)
        shapes = {
            **dict.fromkeys(("attn_q", "attn_k", "attn_v"), Want((inner, n), cut=by_head)),
            **{f"ssm_conv1d_{x}": of_conv for x in "qkv"},
            "ssm_beta": Want((s.n_v_head, n), cut=by_head),
            "ssm_norm": Want((s.dim,)),
            "attn_output": Want((n, inner), cut=replace(by_head, axis=1)),
        }
        # as their converters write them
        own, other = sorted([(s.n_v_head,), (s.n_v_head, 1)], key=len, reverse=not self.turns_decays)
        for x in "fg":
            if at.has(f"ssm_{x}_b.weight"):
                shapes[f"ssm_{x}_a"] = Want((s.dim, n))
                shapes[f"ssm_{x}_b"] = Want((inner, s.dim), cut=by_head)
            else:
                first = "ssm_f_a" if x == "f" else self.gate
                shapes[first] = Want((inner, n), cut=by_head)
        return {
            **{at.name(f"{name}.weight"): want for name, want in shapes.items()},
            at.name("ssm_a"): Want(own, also=(other,), cut=by_head),
            at.name("ssm_dt.bias"): Want((inner,), cut=by_head),
        }

    def memory(self) -> LayerParts:
        return {STATE: Recurrent(self.shape)}

    def share(self, n: int) -> Kda:
        n_head = self.shape.n_v_head // n
        return replace(self, shape=self.shape.of_heads(n_head, n_head))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        s, inner, heads = self.shape, self._inner, (self.shape.n_v_head, self.shape.dim)
        second = {x: f.at.has(f"ssm_{x}_b.weight") for x in "fg"}
        widths = s.n_channel, *(s.dim if second[x] else inner for x in "fg"), s.n_v_head
        names = [f"{self.gate if name == 'ssm_g_a' else name}.weight" for name in PROJECTIONS]
        n = f.normed(x)
        if s.n_v_head % 4:  # kernels of GPUs take rows of the others that begin at multiples of 16 bytes
            m, *ways = f.split(f.product(n, *names[:-1], n_out=sum(widths[:-1])), widths[:-1])
            beta = f.product(n, names[-1], n_out=widths[-1])
        else:
            m, *ways, beta = f.split(f.product(n, *names, n_out=sum(widths)), widths)
        z, gate = (
            f.product(way, f"ssm_{x}_b.weight", n_out=inner) if second[x] else way
            for x, way in zip("fg", ways, strict=True)
        )
        a = f.read(_flat, "ssm_a", by=-1.0 if self.turns_decays else 1.0)
        convs = f.read(_side_by_side, *(f"ssm_conv1d_{x}.weight" for x in "qkv"))
        given = m, z, beta, a, f.vector("ssm_dt.bias"), convs, f.state, f.batch
        y = f.op("gdn", GdnSpec(f.device, s, self.eps or f.eps), *given, shape=heads)
        y = sigmoid_gated(f, y, gate, heads)
        return f.summed(y, "attn_output.weight", x.width, stream)


def _flat(w: Any, name: str, *, by: float) -> Tensor:
    vector: Tensor = w.vector(name)
    return by * vector.flatten()


def _side_by_side(w: Any, *names: str) -> Tensor:
    """Convolutions of q, k and v as one [channel, taps]."""
    return torch.cat([w.vector(name).flatten(0, -2) for name in names])
