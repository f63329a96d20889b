"""Between the product of q, k, v and attention: head norms, rope, and keys and values into their pages. In plain torch.

Where the pool's types ask for it (`KvFormat.turned_k`, `turned_v`), heads of q and k are turned once more behind the rope, and those of v, by
`hadamard` (kv_codes.py): a score stays what it is, and sums of values are turned back behind attention.

y        [row, n_q * step + 2 * n_kv * dim]  f32  q heads (each followed by its gate if gated: step = 2 dim), k, v; no v if keys are values
angles   cos, sin [row, 1, n_rot / 2]        f32
rows     [row]                               int64  rows of the pool
returns  q [row, n_q, dim]                   f32
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.rope_kv.spec import RopeKvSpec as RopeKvSpec
from pyspec.slots.kv import KVPool
from pyspec.slots.kv_codes import turned

GUARD = Guard(5, FaultPlace.ROW)

Angles = tuple[Tensor, Tensor]


Given = tuple[Tensor, Tensor | None, Tensor | None, Angles, KVPool, Tensor]
RopeKv = Callable[[*Given], Tensor]
"""rope_kv(y, q_norm, k_norm, angles, pool, rows) -> q"""


def rotate(x: Tensor, angles: Angles, neox: bool) -> Tensor:
    """Rotary embedding of the first dimensions of x [row, head, dim] f32, as many as there are angles."""
    cos, sin = angles
    h = cos.shape[-1]
    if h == 0:
        return x.contiguous()
    if not neox:
        a, b = x[..., 0 : 2 * h : 2], x[..., 1 : 2 * h : 2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return turned if 2 * h == x.shape[-1] else torch.cat([turned, x[..., 2 * h :]], -1)
    a, b = x[..., :h], x[..., h : 2 * h]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * h :]], -1)


def check_given(spec: RopeKvSpec, *given: *Given) -> None:
    """Assert the layout that kernels read."""
    y, q_norm, k_norm, (cos, sin), pool, rows = given
    n = len(y)
    assert y.dtype == torch.float32 and y.stride(1) == 1 and y.shape[1] == spec.n_column
    assert cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape == (n, 1, spec.n_rot // 2)
    assert rows.dtype == torch.int64 and rows.is_contiguous() and len(rows) == n
    assert all(plane.is_contiguous() for plane in pool.planes) and pool.kv == spec.kv
    assert not spec.n_kv or (pool.n_head, pool.head_dim) == (spec.n_kv, spec.dim)
    assert (k_norm is not None or q_norm is not None) == spec.has_norm


def bind(spec: RopeKvSpec) -> RopeKv:
    step, of_keys = spec.step, spec.n_kv * spec.dim
    width = [spec.n_q * step, *([of_keys] if spec.keys_are_values else [of_keys, of_keys])]
    of_k, of_v = spec.kv.turned_k(spec.dim), spec.kv.turned_v(spec.dim)

    def head(x: Tensor, norm: Tensor | None, angles: Angles) -> Tensor:
        if norm is not None and not spec.norm_behind:
            x = F.rms_norm(x, (spec.dim,), norm, spec.eps)
        x = rotate(x, angles, spec.neox)
        if spec.norm_behind:
            x = F.rms_norm(x, (spec.dim,), norm, spec.eps)
        return turned(x, of_k)

    def rope_kv(*given: *Given) -> Tensor:
        y, q_norm, k_norm, angles, pool, rows = given
        n = y.shape[0]
        q, k, *rest = y.split(width, -1)
        q = q.reshape(n, spec.n_q, step)[..., : spec.dim]
        k = k.reshape(n, spec.n_kv, spec.dim)
        if not spec.n_kv:
            return head(q, q_norm, angles)
        v = rest[0].reshape(k.shape) if rest else k
        if spec.norms_v:
            v = F.rms_norm(v, (spec.dim,), None, spec.eps)
        pool.write(rows, head(k, k_norm, angles), turned(v, of_v))
        return head(q, q_norm, angles)

    return rope_kv
