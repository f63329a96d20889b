"""Multi-head latent attention (deepseek2): keys and values of all heads are products of one short row a token, which is all that is stored.

A row is [latent | rope]. The heads' key matrices are taken to the side of the queries, and their value matrices behind the sum, so the
attention itself has one key head, whose keys are its values, too: the first part of the summed rows is the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pyspec.cuda.ops.attend.spec import AttendSpec
from pyspec.cuda.ops.hadamard.spec import HadamardSpec
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.forward.call import RunInput, Value
from pyspec.forward.trace import Forward
from pyspec.models.blocks.indexer import Indexer
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import AttentionShape, Place, Plain
from pyspec.models.rope import RopeSpec
from pyspec.models.wants import Want
from pyspec.slots.kv_types import KvFormat
from pyspec.slots.parts import KV, LayerParts, Paged


@dataclass(frozen=True, slots=True)
class Mla(Plain):
    """Latent attention as data.

    n_plain  dimensions of a head's query that do not turn; rope.n_rot behind them do
    n_value  dimensions of a head's value
    rank     of keys and values; q_rank that of queries, 0: they have none
    plain_scale  of scores, before what rope's scaling does to it
    gates    of a head's result, which is multiplied with their sigmoids: one, or one for each dimension; 0: none
    indexer  chooses the keys that rows see; None: they see all
    follows  rows see the keys that the last block with an indexer chose
    stretches  scores, by what rope's scaling does to them
    """

    n_head: int
    n_plain: int
    n_value: int
    rank: int
    q_rank: int
    rope: RopeSpec
    plain_scale: float
    gates: int = 0
    indexer: Indexer | None = None
    follows: bool = False
    stretches: bool = True

    @property
    def row(self) -> int:
        """Dimensions of a stored row."""
        return self.rank + self.rope.n_rot

    @property
    def scale(self) -> float:
        """Of scores."""
        return self.plain_scale * (self.rope.scaling.score_factor if self.stretches else 1.0)

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
        if self.gates:
            shapes["attn_gate"] = Want(
                (self.n_head * self.gates, n),
                cut=Cut(0, (Units(self.n_head, "heads", size=self.gates),)),
            )
        of_queries = "attn_q_b" if self.q_rank else "attn_q"
        shapes[of_queries] = Want((self.n_head * k, self.q_rank or n), cut=Cut(0, (queries,)))
        wants = {at.name(f"{name}.weight"): want for name, want in shapes.items()}
        if self.indexer is not None:
            wants |= self.indexer.tensors(at, self.q_rank)
        return wants | self.rope.tensors()

    def memory(self) -> LayerParts:
        own = {KV: Paged(1, self.row, keys_only=True)}
        return own if self.indexer is None else {**own, **self.indexer.memory()}

    def share(self, n: int) -> Mla:
        return replace(self, n_head=self.n_head // n)

    def attend_spec(self, device: torch.device, kv: KvFormat) -> AttendSpec:
        scattered = self.follows or self.indexer is not None
        spec = AttendSpec(device, self.n_head, 1, self.row, self.scale, kv, n_value=self.summed(kv))
        return replace(spec, scattered=scattered)

    def summed(self, kv: KvFormat) -> int:
        """Dims of the sums of rows: the values, or all where values are turned back together with other dims."""
        return self.row if (n := kv.turned_k(self.row)) and self.rank % n else self.rank

    def rope_spec(self, device: torch.device, eps: float, kv: KvFormat) -> RopeLatentSpec:
        n_rot, neox = self.rope.n_rot, self.rope.neox
        return RopeLatentSpec(device, self.n_head, self.n_plain, self.rank, n_rot, neox, eps, kv)

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """Writes the rows' latent keys, then attends."""
        s, n = replace(self, rope=self.rope.flagged(f.at.flags)), x.width
        k = self.n_plain + self.rope.n_rot
        h = f.normed(x)
        kv = f.product(h, "attn_kv_a_mqa.weight", n_out=s.row)
        if s.q_rank:
            q = f.product(h, "attn_q_a.weight", n_out=s.q_rank)
            qr = f.norm_apart(q, f.vector("attn_q_a_norm.weight"))
            q = f.product(qr, "attn_q_b.weight", n_out=s.n_head * k)
        else:
            q = f.product(h, "attn_q.weight", n_out=s.n_head * k)
        plain = f.view(q, f".view(-1, {s.n_head}, {k})[..., :{s.n_plain}]", (s.n_head, s.n_plain))
        plain = f.heads(plain, "attn_k_b.weight", s.rank)
        pool, norm = f.pool(), f.vector("attn_kv_a_norm.weight")
        spec, row = s.rope_spec(f.device, f.eps, f.kv), (s.n_head, s.row)
        given = norm, f.angles(self.rope), pool, f.kv_rows(pool)
        q = f.op("rope_latent", spec, kv, q, plain, *given, shape=row)
        if self.rope.queries is not None:
            q = f.op("times_rows", None, q, f.queries(self.rope), shape=row)
        attends = s.attend_spec(f.device, f.kv)
        seen: Value | RunInput = f.batch
        if s.indexer is not None:
            seen = f.choose(s.indexer.forward(f, h, qr))
        elif s.follows:
            seen = f.choice
        o = f.op("attend", attends, q, pool, seen, shape=(s.n_head, attends.n_value))
        if turned := f.kv.turned_k(s.row):
            o = f.op("hadamard", HadamardSpec(f.device, attends.n_value, turned), o, shape=o.shape)
        o = f.heads(f.view(o, f"[..., :{s.rank}]", (s.n_head, s.rank)), "attn_v_b.weight", s.n_value)
        o = f.flat(o)
        if s.gates:
            gate = f.product(h, "attn_gate.weight", n_out=s.n_head * s.gates)
            o = f.gate_times(gate, o, "sigmoid", o.width)
        return f.summed(o, "attn_output.weight", n, stream)
