"""The Mamba-2 mixer (nemotron_h): one projection, conv, a decaying state, gate, grouped norm, one projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params, flush
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.cuts import Cut, KeyGroups, Keys
from pyspec.models.part import Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import STATE, LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class Mamba2(Plain):
    """Mamba-2 as data. norms: its groups are normed before the last projection"""

    shape: Mamba2Shape
    norms: bool = True
    folds = "mamba2", flush

    def tensors(self, at: Place) -> dict[str, Want]:
        """`ssm_a` holds -exp(A_log) already."""
        s, n = self.shape, at.n_embd
        inner, heads = s.n_head * s.head_dim, (s.n_head, 1)
        groups = partial(Keys, KeyGroups(s.n_group, 1), "groups of Mamba-2 heads")
        x = groups(size=inner // s.n_group)
        bc = groups(size=s.n_state)
        dt = groups(size=s.n_head // s.n_group)
        by_channel = Cut(0, (x, bc, bc))
        by_head = Cut(0, (dt,))
        by_group = Cut(0, (x,))
        of_groups = Want((s.n_group, inner // s.n_group), also=((inner,),), cut=by_group)
        return {
            at.name("ssm_in.weight"): Want(
                (inner + s.n_channel + s.n_head, n), cut=Cut(0, (x, x, bc, bc, dt))
            ),
            at.name("ssm_conv1d.weight"): Want((s.n_channel, s.n_conv), cut=by_channel),
            at.name("ssm_conv1d.bias"): Want((s.n_channel,), cut=by_channel),
            at.name("ssm_dt.bias"): Want((s.n_head,), cut=by_head),
            at.name("ssm_a"): Want(heads, also=((s.n_head,),), cut=by_head),
            at.name("ssm_d"): Want(heads, also=((s.n_head,),), cut=by_head),
            at.name("ssm_out.weight"): Want((n, inner), cut=Cut(1, (x,))),
            **({at.name("ssm_norm.weight"): of_groups} if self.norms else {}),
        }

    def memory(self) -> LayerParts:
        return {STATE: Recurrent(self.shape)}

    def share(self, n: int) -> Mamba2:
        return replace(self, shape=self.shape.share(n))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        s = self.shape
        inner = s.n_head * s.head_dim
        widths = inner, s.n_channel, s.n_head
        m = f.product(f.normed(x), "ssm_in.weight", n_out=sum(widths))
        gate, m, dt = f.split(m, widths)
        params = f.read(_params, "ssm_a", "ssm_dt.bias", "ssm_d", "ssm_conv1d.weight", "ssm_conv1d.bias")
        spec, shape = Mamba2Spec(f.device, s), (s.n_head, s.head_dim)
        y = f.op("mamba2", spec, m, dt, params, f.state, f.batch, shape=shape)
        if self.norms:
            y = f.group_norm(f.flat(y), f.read(_flat, "ssm_norm.weight"), gate, s.n_group)
        else:
            y = f.gate_times(gate, f.flat(y), "silu", inner)
        return f.summed(y, "ssm_out.weight", x.width, stream)


def _flat(w: Any, name: str) -> Tensor:
    vector: Tensor = w.vector(name)
    return vector.flatten()


def _params(w: Any, a: str, dt_bias: str, d: str, conv: str, conv_bias: str) -> Params:
    of_heads = _flat(w, a), _flat(w, dt_bias), _flat(w, d)
    return Params(*of_heads, w.vector(conv), w.vector(conv_bias))
