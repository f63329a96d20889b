"""The Mamba-2 mixer (nemotron_h): one projection, conv, a decaying state, gate, grouped norm, one projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params, flush
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import GroupNorm, PrepKind, RowsSpec, norm_power
from pyspec.models.cuts import Cut, KeyGroups, Keys
from pyspec.models.matrices import sum_of
from pyspec.models.part import Binding, LoadTypes, Pass, Place, Request
from pyspec.models.wants import Want
from pyspec.slots.memory import STATE
from pyspec.slots.parts import LayerParts, Recurrent


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 as data."""

    shape: Mamba2Shape
    captures_prompts = False  # its chunks have not run with room for more of them than there are
    attends = scratch = None

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
        return {
            at.name("ssm_in.weight"): Want(
                (inner + s.n_channel + s.n_head, n), cut=Cut(0, (x, x, bc, bc, dt))
            ),
            at.name("ssm_conv1d.weight"): Want((s.n_channel, s.n_conv), cut=by_channel),
            at.name("ssm_conv1d.bias"): Want((s.n_channel,), cut=by_channel),
            at.name("ssm_dt.bias"): Want((s.n_head,), cut=by_head),
            at.name("ssm_a"): Want(heads, also=((s.n_head,),), cut=by_head),
            at.name("ssm_d"): Want(heads, also=((s.n_head,),), cut=by_head),
            at.name("ssm_norm.weight"): Want(
                (s.n_group, inner // s.n_group), also=((inner,),), cut=by_group
            ),
            at.name("ssm_out.weight"): Want((n, inner), cut=Cut(1, (x,))),
        }

    def memory(self) -> LayerParts:
        return {STATE: Recurrent(self.shape)}

    def share(self, n: int) -> Mamba2:
        return Mamba2(self.shape.share(n))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        s = self.shape
        inner = s.n_head * s.head_dim
        yield mamba2, Mamba2Spec(on.device, s)
        if on.streams:
            yield rows, RowsSpec(on.device, inner, PrepKind.GROUPS, inner // s.n_group)
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)

    def bind(self, at: Binding) -> BoundMamba2:
        return BoundMamba2(self.shape, at)


class BoundMamba2:
    """Mamba-2 over the slot's state."""

    captures_prompts = False

    def __init__(self, shape: Mamba2Shape, at: Binding) -> None:
        w = at.weights
        self.shape = shape
        self.eps = at.eps
        self.layer = at.layer
        self.norm = at.bound_norm()
        self.proj = w.matrix(at.name("ssm_in.weight"))
        self.out = w.summed(at.name("ssm_out.weight"))
        self.reads, self.gives = (self.proj, self.norm), sum_of(self.out)
        conv_w, conv_b = (w.vector(at.name(f"ssm_conv1d.{name}")) for name in ("weight", "bias"))
        a, dt_bias, d = (w.vector(at.name(name)).flatten() for name in ("ssm_a", "ssm_dt.bias", "ssm_d"))
        self.params = Params(a, dt_bias, d, conv_w, conv_b)
        self.group_norm = w.vector(at.name("ssm_norm.weight")).flatten()
        self.group_power = norm_power(self.group_norm)
        spec = Mamba2Spec(w.device, shape)
        self.mamba2, self.capturable = mamba2.bind(spec), mamba2.chosen(spec).capturable
        self.fold, self.read_next = (
            fuse.folder(self.mamba2, flush),
            fuse.read_next(self.mamba2, self.out),
        )
        self.split = [shape.n_head * shape.head_dim, shape.n_channel, shape.n_head]

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        gate, m, dt = self.proj(x, self.norm).split(self.split, -1)
        o = self.mamba2(m, dt, self.params, run.memory.states[self.layer], run.batch, **self.read_next)
        prep = GroupNorm(self.group_norm, self.eps, gate, self.shape.n_group, self.group_power)
        return self.out(o.flatten(1), prep, residual=residual)
