"""The Mamba-2 mixer (nemotron_h): one projection, conv, a decaying state, gate, grouped norm, one projection."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.rows.ref import GroupNorm, Norm, norm_power
from pyspec.models.cuts import Cut, Units
from pyspec.models.wants import Want
from pyspec.models.weights import Weights, sum_of
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


def mamba_tensors(s: Mamba2Shape, n_embd: int, p: str) -> dict[str, Want]:
    """Wanted tensors of a Mamba-2 layer with prefix `p` (blk.N). `ssm_a` holds -exp(A_log) already."""
    inner, heads = s.n_head * s.head_dim, (s.n_head, 1)
    groups = partial(Units, s.n_group, "groups of Mamba-2 heads")
    x, bc, dt = groups(size=inner // s.n_group), groups(size=s.n_state), groups(size=s.n_head // s.n_group)
    by_channel, by_head, by_group = Cut(0, (x, bc, bc)), Cut(0, (dt,)), Cut(0, (x,))
    return {
        f"{p}.ssm_in.weight": Want((inner + s.n_channel + s.n_head, n_embd), cut=Cut(0, (x, x, bc, bc, dt))),
        f"{p}.ssm_conv1d.weight": Want((s.n_channel, s.n_conv), cut=by_channel),
        f"{p}.ssm_conv1d.bias": Want((s.n_channel,), cut=by_channel),
        f"{p}.ssm_dt.bias": Want((s.n_head,), cut=by_head),
        f"{p}.ssm_a": Want(heads, also=((s.n_head,),), cut=by_head),
        f"{p}.ssm_d": Want(heads, also=((s.n_head,),), cut=by_head),
        f"{p}.ssm_norm.weight": Want((s.n_group, inner // s.n_group), also=((inner,),), cut=by_group),
        f"{p}.ssm_out.weight": Want((n_embd, inner), cut=Cut(1, (x,))),
    }


class Mamba:
    """Mamba-2 over the slot's state."""

    captures_prompts = False  # nobody has run its chunks with room for more of them than there are

    def __init__(self, w: Weights, prefix: str, shape: Mamba2Shape, eps: float) -> None:
        self.shape, self.eps = shape, eps
        self.norm = Norm(w.vector(f"{prefix}.attn_norm.weight"), eps)
        self.proj = w.matrix(f"{prefix}.ssm_in.weight")
        self.out = w.summed(f"{prefix}.ssm_out.weight")
        self.reads, self.gives = (self.proj, self.norm), sum_of(self.out)
        conv_w, conv_b = (w.vector(f"{prefix}.ssm_conv1d.{name}") for name in ("weight", "bias"))
        a, dt_bias, d = (w.vector(f"{prefix}.{name}").flatten() for name in ("ssm_a", "ssm_dt.bias", "ssm_d"))
        self.params = Params(a, dt_bias, d, conv_w, conv_b)
        self.group_norm = w.vector(f"{prefix}.ssm_norm.weight").flatten()
        self.group_power = norm_power(self.group_norm)
        spec = Mamba2Spec(w.device, shape)
        self.mamba2, self.capturable = mamba2.bind(spec), mamba2.chosen(spec).capturable
        self.fold, self.read_next = fuse.folder(self.mamba2), fuse.read_next(self.mamba2, self.out)
        self.split = [shape.n_head * shape.head_dim, shape.n_channel, shape.n_head]

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], memory: Memory, layer: int, batch: Batch) -> Tensor:
        """The residual stream x [row, n_embd] -> x + mamba(norm(x))."""
        gate, m, dt = self.proj(x, self.norm).split(self.split, -1)
        o = self.mamba2(m, dt, self.params, memory.states[layer], batch, **self.read_next)
        prep = GroupNorm(self.group_norm, self.eps, gate, self.shape.n_group, self.group_power)
        return self.out(o.flatten(1), prep, residual=x)
