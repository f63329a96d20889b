"""Multi-head latent attention (deepseek2): keys and values of all heads are products of one short row a token, which is all that is stored.

A row is [latent | rope]. The heads' key matrices are taken to the side of the queries, and their value matrices behind the sum, so the
attention itself has one key head, whose keys are its values, too: the first part of the summed rows is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyspec.cuda.ops.angles.op import angles
from pyspec.cuda.ops.angles.ref import AnglesSpec
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.hadamard.op import hadamard
from pyspec.cuda.ops.hadamard.ref import HadamardSpec
from pyspec.cuda.ops.heads.op import asked, heads
from pyspec.cuda.ops.heads.ref import HeadsSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_latent.op import rope_latent
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.models.cuts import Cut, Units
from pyspec.models.matrices import sum_of
from pyspec.models.part import AttentionShape, Binding, LoadTypes, Pass, Place, Request
from pyspec.models.rope import RopeSpec
from pyspec.models.wants import Want
from pyspec.models.weights import OF_HEADS
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import KV
from pyspec.slots.parts import LayerParts, Paged


@dataclass(frozen=True, slots=True)
class Mla:
    """Latent attention as data.

    n_plain  dimensions of a head's query that do not turn; rope.n_rot behind them do
    n_value  dimensions of a head's value
    rank     of keys and values; q_rank that of queries, 0: they have none
    plain_scale  of scores, before what rope's scaling does to it
    """

    n_head: int
    n_plain: int
    n_value: int
    rank: int
    q_rank: int
    rope: RopeSpec
    plain_scale: float
    captures_prompts = False
    scratch = None

    @property
    def row(self) -> int:
        """Dimensions of a stored row."""
        return self.rank + self.rope.n_rot

    @property
    def scale(self) -> float:
        """Of scores."""
        return self.plain_scale * self.rope.scaling.score_factor

    @property
    def attends(self) -> AttentionShape:
        return AttentionShape(self.n_head, 1, self.row, scale=self.scale, n_value=self.rank)

    def tensors(self, at: Place) -> dict[str, Want]:
        n, k = at.n_embd, self.n_plain + self.rope.n_rot
        heads, queries = Units(self.n_head, "heads"), Units(self.n_head, "heads", size=k)
        shapes = {
            "attn_kv_a_mqa": Want((self.row, n)),
            "attn_kv_a_norm": Want((self.rank,)),
            "attn_k_b": Want((self.n_head, self.rank, self.n_plain), cut=Cut(0, (heads,))),
            "attn_v_b": Want((self.n_head, self.n_value, self.rank), cut=Cut(0, (heads,))),
            "attn_output": Want((n, self.n_head * self.n_value), cut=Cut(1, (heads,))),
        }
        if self.q_rank:
            shapes["attn_q_a"] = Want((self.q_rank, n))
            shapes["attn_q_a_norm"] = Want((self.q_rank,))
        of_queries = "attn_q_b" if self.q_rank else "attn_q"
        shapes[of_queries] = Want((self.n_head * k, self.q_rank or n), cut=Cut(0, (queries,)))
        wants = {at.name(f"{name}.weight"): want for name, want in shapes.items()}
        return wants | self.rope.tensors()

    def memory(self) -> LayerParts:
        return {KV: Paged(1, self.row, keys_only=True)}

    def share(self, n: int) -> Mla:
        return replace(self, n_head=self.n_head // n)

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        yield angles, AnglesSpec(on.device)
        yield attend, self.attend_spec(on.device, on.kv)
        yield rope_latent, self.rope_spec(on.device, at.eps, on.kv)
        if n := on.kv.turned_k(self.row):
            yield hadamard, HadamardSpec(on.device, self.summed(on.kv), n)
        for name in OF_HEADS:
            info = at.file.tensors.get(at.name(name.removeprefix(".")))
            if info is not None and len(info.shape) == 3 and on.dense is None:
                of_rank = HeadsSpec(on.device, info.type, self.n_head, *info.shape[1:])
                yield heads, asked(of_rank)
        if self.q_rank:
            yield norms, NormsSpec(on.device, self.q_rank, at.eps)
        if on.streams:
            yield rows, RowsSpec(on.device, at.n_embd, PrepKind.NORM)

    def attend_spec(self, device: torch.device, kv: KvFormat) -> AttendSpec:
        return AttendSpec(device, self.n_head, 1, self.row, self.scale, kv, n_value=self.summed(kv))

    def summed(self, kv: KvFormat) -> int:
        """Dims of the sums of rows: the values, or all where values are turned back together with other dims."""
        return self.row if (n := kv.turned_k(self.row)) and self.rank % n else self.rank

    def rope_spec(self, device: torch.device, eps: float, kv: KvFormat) -> RopeLatentSpec:
        n_rot, neox = self.rope.n_rot, self.rope.neox
        return RopeLatentSpec(device, self.n_head, self.n_plain, self.rank, n_rot, neox, eps, kv)

    def bind(self, at: Binding) -> BoundMla:
        return BoundMla(self, at)


class BoundMla:
    """Latent attention over the slot's pages."""

    captures_prompts = False
    fold = None

    def __init__(self, spec: Mla, at: Binding) -> None:
        w = at.weights
        self.norm, self.rope = at.bound_norm(), at.ropes.place(spec.rope)
        spec = replace(spec, rope=spec.rope.flagged(w.rope))
        self.spec, self.layer = spec, at.layer
        first = "attn_q_a" if spec.q_rank else "attn_q"
        self.queries, self.latent = (
            w.matrix(at.name(f"{name}.weight")) for name in (first, "attn_kv_a_mqa")
        )
        self.q_b = w.matrix(at.name("attn_q_b.weight")) if spec.q_rank else None
        self.q_norm = w.optional(at.name("attn_q_a_norm.weight")) if spec.q_rank else None
        self.kv_norm = w.vector(at.name("attn_kv_a_norm.weight"))
        (self.k_b, holds_k), (self.v_b, holds_v) = (w.heads(at.name(name[1:])) for name in OF_HEADS)
        self.out = w.summed(at.name("attn_output.weight"))
        self.reads, self.gives = None, sum_of(self.out)
        attends, ropes = spec.attend_spec(w.device, at.kv), spec.rope_spec(w.device, at.eps, at.kv)
        self.attend, self.rope_latent = attend.bind(attends), rope_latent.bind(ropes)
        capturable = attend.chosen(attends).capturable and rope_latent.chosen(ropes).capturable
        self.back: Callable[[Tensor], Tensor] | None = None
        if n := at.kv.turned_k(spec.row):
            back = HadamardSpec(w.device, attends.n_value, n)
            self.back = hadamard.bind(back)
            capturable = capturable and hadamard.chosen(back).capturable
        if spec.q_rank:
            of_queries = NormsSpec(w.device, spec.q_rank, at.eps)
            self.of_queries = norms.bind(of_queries)
            capturable = capturable and norms.chosen(of_queries).capturable
        self.capturable = capturable and holds_k and holds_v

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        """Writes the rows' latent keys, then attends."""
        s, pool = self.spec, run.memory.kv[self.layer]
        kv, q = self.latent(x, self.norm), self.queries(x, self.norm)
        if self.q_b is not None and self.q_norm is not None:
            q = self.q_b(self.of_queries(q, self.q_norm))
        plain = self.k_b(q.view(len(x), s.n_head, -1)[..., : s.n_plain])
        rows, angles = run.batch.kv_rows, run.angles[self.rope]
        q = self.rope_latent(kv, q, plain, self.kv_norm, angles, pool, rows)
        o = self.attend(q, pool, run.batch)
        o = o if self.back is None else self.back(o)
        return self.out(self.v_b(o[..., : s.rank]).flatten(1), residual=residual)
