"""Attention of one key that is its value, over a window of rows and over compressed rows, of which an indexer may choose.

The maths of each part is the reference of the op it calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.sparse_attend.ref import ROWS, KeyTail, SparseSpec
from pyspec.forward.call import Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.blocks.attention import SINKS, in_a_row
from pyspec.models.blocks.compressor import Compressor
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import AttentionShape, Place, Plain
from pyspec.models.rope import RopeFlags, turning_dimension
from pyspec.models.wants import Want
from pyspec.slots.kv_types import KvFormat
from pyspec.slots.parts import KV, LayerParts, Paged, Ring

WINDOW = "window"  # name of the ring of rows
COMPRESSED, INDEX = ("rows", "partial"), ("index", "index_partial")  # names of compressors' memory


@dataclass(frozen=True, slots=True)
class TailRope:
    """Rope of the last `n_rot` dimensions of heads, in pairs side by side. factor: above 1, yarn stretches it, between `beta_fast` and
    `beta_slow` turns in a context of `n_ctx_orig`. ramp: share of what leaves fast frequencies as they are."""

    n_rot: int
    base: float
    factor: float = 1.0
    n_ctx_orig: int = 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: float = 1.0

    def flagged(self, flags: RopeFlags) -> TailRope:
        """As flags change it: its base without a context to stretch, otherwise the rest."""
        if self.n_ctx_orig == 1:
            return replace(self, base=flags.base or self.base)
        ramp = 0.0 if flags.kind == "linear" else self.ramp
        fast, slow = flags.turns
        return replace(
            self,
            factor=1.0 if flags.kind == "none" else flags.factor or self.factor,
            n_ctx_orig=flags.n_ctx_orig or self.n_ctx_orig,
            beta_fast=fast if fast >= 0 else self.beta_fast,
            beta_slow=slow if slow >= 0 else self.beta_slow,
            ramp=flags.ramp if flags.ramp >= 0 else ramp,
        )

    def freq(self) -> Tensor:
        """Angles of one position. [n_rot / 2] f64"""
        n, base = self.n_rot, self.base
        freq = base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        if self.factor <= 1.0:
            return freq

        low, high = (
            turning_dimension(beta, n, self.n_ctx_orig, base)
            for beta in (self.beta_fast, self.beta_slow)
        )
        low, high = max(0.0, math.floor(low)), min(n - 1.0, math.ceil(high))
        ramp = ((torch.arange(n // 2, dtype=torch.float64) - low) / max(0.001, high - low)).clamp(0, 1)
        if self.ramp != 1.0:
            ramp = 1 - (1 - ramp) * self.ramp
        return freq * (1 - ramp) + freq / self.factor * ramp


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """The small network that chooses compressed rows."""

    n_head: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class SparseAttention(Plain):
    """The mixer as data.

    q_rank     width of a row's low-rank query
    n_group    groups of heads, whose outputs go to `out_rank` values each before the last product
    ratio      tokens of a compressed row; 0: the block has none
    indexer    chooses among them; None: all count
    in_pages   keys stand in pages, one row a token, and not in a ring; for blocks without compressed rows
    """

    attends: AttentionShape = field()  # of `Plain` it is a property
    rope: TailRope
    q_rank: int
    n_group: int
    out_rank: int
    window: int
    ratio: int = 0
    indexer: IndexerShape | None = None
    in_pages: bool = False

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The keys', and the indexer's."""
        if not self.ratio:
            return ()
        keys = Compressor("attn_compressor", *COMPRESSED, self.ratio, self.attends.head_dim)
        if self.indexer is None:
            return (keys,)
        return keys, Compressor("indexer_compressor", *INDEX, self.ratio, self.indexer.dim)

    def tensors(self, at: Place) -> dict[str, Want]:
        n, a = at.n_embd, self.attends
        inner, rank = a.n_head * a.head_dim, self.n_group * self.out_rank
        of_groups = (Units(self.n_group, "groups of heads"),)
        by_group = Cut(0, of_groups)
        wants = {
            at.name(SINKS): Want((a.n_head,), cut=by_group),
            at.name("attn_q_a.weight"): Want((self.q_rank, n)),
            at.name("attn_q_a_norm.weight"): Want((self.q_rank,)),
            at.name("attn_q_b.weight"): Want((inner, self.q_rank), cut=by_group),
            at.name("attn_kv.weight"): Want((a.head_dim, n)),
            at.name("attn_kv_a_norm.weight"): Want((a.head_dim,)),
            at.name("attn_output_a.weight"): Want((rank, inner // self.n_group), cut=by_group),
            at.name("attn_output_b.weight"): Want((n, rank), cut=Cut(1, of_groups)),
        }
        for compressor in self.compressors:
            wants |= compressor.tensors(at)
        if (x := self.indexer) is not None:
            wants[at.name("indexer.proj.weight")] = Want((x.n_head, n))
            wants[at.name("indexer.attn_q_b.weight")] = Want((x.n_head * x.dim, self.q_rank))
        return wants

    def memory(self) -> LayerParts:
        dim = self.attends.head_dim
        if self.in_pages:
            return {KV: Paged(1, dim, keys_only=True)}
        window = {WINDOW: Ring(self.window, {ROWS: (dim,)}, dtype=None)}
        return window | {name: kept for one in self.compressors for name, kept in one.memory().items()}

    def share(self, n: int) -> SparseAttention:
        """Heads by the groups of their outputs. All share one key, so each rank has all keys, compressed rows and choices."""
        return replace(self, attends=self.attends.share(n), n_group=self.n_group // n)

    def attend_spec(self, device: torch.device, kv: torch.dtype, eps: float) -> SparseSpec:
        a = self.attends
        return SparseSpec(
            device, a.n_head, a.head_dim, self.window, self.ratio, kv, self.rope.n_rot, eps
        )

    def index_spec(self, device: torch.device, kv: torch.dtype) -> IndexSpec | None:
        x = self.indexer
        return (
            None
            if x is None
            else IndexSpec(device, x.n_head, x.dim, x.top_k, self.ratio, kv, self.rope.n_rot)
        )

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """The first product gives all that is read from the stream, the second one queries."""
        a, one, dims = self.attends, self.indexer, (self.attends.n_head, self.attends.head_dim)
        matrices = [name for c in self.compressors for name in c.products]
        sizes = [self.q_rank, a.head_dim, *(2 * c.width for c in self.compressors)]
        of_queries, widths = ["attn_q_b.weight"], [a.n_head * a.head_dim, 0]
        if one is not None:
            matrices.append("indexer.proj.weight")
            sizes.append(one.n_head)
            of_queries.append("indexer.attn_q_b.weight")
            widths[1] = one.n_head * one.dim
        y = f.product(f.normed(x), "attn_q_a.weight", "attn_kv.weight", *matrices, n_out=sum(sizes))
        qr, kv, *rest = f.split(y, sizes)
        qr = f.norm(qr, f.vector("attn_q_a_norm.weight"))
        q, index_q = f.split(f.product(qr, *of_queries, n_out=sum(widths)), widths)
        q = f.view(q, f".view(-1, {dims[0]}, {dims[1]})", dims)
        o = self._paged(f, q, kv) if self.in_pages else self._attended(f, q, kv, index_q, rest)
        norms = "attn_kv_a_norm.weight", *(f"{c.name}_norm.weight" for c in self.compressors)
        o.means_of = f.read(in_a_row, *norms)  # keys are values, whose weights add up to 1 at most
        y = f.grouped(f.flat(o), "attn_output_a.weight", self.n_group, self.n_group * self.out_rank)
        return f.summed(y, "attn_output_b.weight", x.width, stream)

    def _attended(self, f: Forward, q: Value, kv: Value, index_q: Value, rest: Sequence[Value]) -> Value:
        freq, pool, chosen = self._freq(f), None, None
        for compressor, products in zip(self.compressors, rest, strict=False):
            compressor.forward(f, products, freq, self.rope.n_rot)
            pool = f.kept(COMPRESSED[0])
        choice = self.index_spec(f.device, f.kv.k.dtype)
        if choice is not None and (one := self.indexer) is not None:
            heads = f.view(index_q, f".view(-1, {one.n_head}, {one.dim})", (one.n_head, one.dim))
            keys = heads, rest[2], freq, f.kept(INDEX[0]), f.batch
            chosen = f.op("index_rows", choice, *keys, shape=(one.top_k,))
        tail = f.read(key_tail, "attn_kv_a_norm.weight", rope=self.rope)
        given = kv, tail, f.kept(WINDOW), pool, chosen, f.vector(SINKS), f.batch
        spec = self.attend_spec(f.device, f.kv.k.dtype, f.eps)
        return f.op("sparse_attend", spec, q, *given, shape=q.shape)

    def _paged(self, f: Forward, q: Value, kv: Value) -> Value:
        """A window over keys that stand in pages."""
        a, at, pool = self.attends, f.positions, f.pool()
        q = f.op("rope_tail", self._tail(f, normed=True), q, at, self._freq(f), shape=q.shape)
        self._written(f, kv, f.kv_rows(pool), at)
        kind = KvFormat.both(f.kv.k)
        spec = AttendSpec(f.device, a.n_head, 1, a.head_dim, a.head_dim**-0.5, kind, has_sinks=True)
        o = f.op("attend", spec, q, pool, f.batch, self.window, f.vector(SINKS), shape=q.shape)
        tail = self._tail(f, normed=False)
        return f.op("rope_tail", tail, o, at, self._freq(f), shape=q.shape, sign=-1.0)

    def write(self, f: Forward, c: Value, rows: Value, positions: Value) -> Value:
        """Keys alone, of normed c [row, n_embd] of tokens at `positions` [row], to `rows` [row] of the pool."""
        kv = f.product(c, "attn_kv.weight", n_out=self.attends.head_dim)
        return self._written(f, kv, rows, positions)

    def _written(self, f: Forward, kv: Value, rows: Any, positions: Any) -> Value:
        shape = 1, self.attends.head_dim
        given = (
            f.view(kv, "[:, None]", shape),
            positions,
            self._freq(f),
            f.vector("attn_kv_a_norm.weight"),
        )
        keys = f.op("rope_tail", self._tail(f, normed=True), *given, shape=shape)
        return f.op("write_keys", None, f.pool(), rows, keys, shape=())

    def _tail(self, f: Forward, *, normed: bool) -> RopeTailSpec:
        return RopeTailSpec(f.device, self.attends.head_dim, self.rope.n_rot, normed, f.eps)

    def _freq(self, f: Forward) -> Weight:
        return f.read(angles_of_one, rope=self.rope)


def angles_of_one(w: Any, *, rope: TailRope) -> Tensor:
    """Of one position [n_rot / 2] f64, as flags change the rope."""
    return rope.flagged(w.rope).freq().to(w.device)


def key_tail(w: Any, norm: str, *, rope: TailRope) -> KeyTail:
    return KeyTail(w.vector(norm), angles_of_one(w, rope=rope))
