"""Between the products of latent attention and its sums (deepseek2): the key's norm and rope, and its row into the pages; the queries' rope.

A stored row is [latent | rope]. Its first dims are normed; the others turn, and so do as many at the end of each query. Where the pool's type
asks for it (`KvFormat.turned_k`), keys and queries are turned once more by `hadamard` (kv_codes.py). In plain torch.

    kv       [row, rank + n_rot]            f32  product of the key; a slice of wider rows or not
    q        [row, n_head * (plain + n_rot)]  f32  product of the queries, of which the plain dims are not read
    plain    [row, n_head, rank]            f32  those, behind the heads' key matrices
    norm     [rank]                         f32
    angles   cos, sin [row, 1, n_rot / 2]   f32
    rows     [row]                          int64  rows of the pool
    returns  queries [row, n_head, rank + n_rot]  f32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.rope_kv.ref import Angles, rotate
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_codes import turned
from pyspec.slots.kv_types import PLAIN

GUARD = Guard(15, FaultPlace.ROW)

Given = tuple[Tensor, Tensor, Tensor, Tensor, Angles, KVPool, Tensor]
RopeLatent = Callable[[*Given], Tensor]
"""rope_latent(kv, q, plain, norm, angles, pool, rows) -> queries"""


@dataclass(frozen=True, slots=True)
class RopeLatentSpec:
    """n_plain: dimensions of a head's query in q that do not turn. neox: as RopeKvSpec's. kv: the pool's format."""

    device: torch.device
    n_head: int
    n_plain: int
    rank: int
    n_rot: int
    neox: bool
    eps: float
    kv: KvFormat = PLAIN

    @property
    def dim(self) -> int:
        """Of a stored row, and of a query."""
        return self.rank + self.n_rot

    def check_given(self, *given: *Given) -> None:
        """Assert the layout that kernels read."""
        kv, q, plain, norm, (cos, sin), pool, rows = given
        n = len(kv)
        assert all(
            t.dtype == torch.float32 and t.stride(-1) == 1 for t in (kv, q, plain, norm, cos, sin)
        )
        assert kv.shape == (n, self.dim) and norm.shape == (self.rank,)
        assert q.shape == (n, self.n_head * (self.n_plain + self.n_rot))
        assert plain.shape == (n, self.n_head, self.rank) and plain.is_contiguous()
        assert cos.is_contiguous() and sin.is_contiguous()
        assert cos.shape == sin.shape == (n, 1, self.n_rot // 2)
        assert rows.dtype == torch.int64 and rows.is_contiguous() and len(rows) == n
        assert (pool.n_head, pool.head_dim, pool.kv) == (1, self.dim, self.kv) and pool.keys_only
        assert all(plane.is_contiguous() for plane in pool.planes)


def bind(spec: RopeLatentSpec) -> RopeLatent:
    n = spec.kv.turned_k(spec.dim)

    def rope_latent(*given: *Given) -> Tensor:
        kv, q, plain, norm, angles, pool, rows = given
        latent, turning = kv[:, None].split([spec.rank, spec.n_rot], -1)
        latent = F.rms_norm(latent, (spec.rank,), norm, spec.eps)
        key = torch.cat([latent, rotate(turning, angles, spec.neox)], -1)
        pool.write(rows, turned(key, n), None)
        turning = q.view(len(q), spec.n_head, -1)[..., spec.n_plain :]
        return turned(torch.cat([plain, rotate(turning, angles, spec.neox)], -1), n)

    return rope_latent
