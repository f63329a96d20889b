"""Attention of one key that is its value, over a window of rows and over compressed rows, of which an indexer may choose.

The maths of each part is the reference of the op it calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.index_rows import op as index_op
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail.op import rope_tail
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.rows.ref import Norm, norm_power
from pyspec.cuda.ops.sparse_attend import op as sparse_op
from pyspec.cuda.ops.sparse_attend.op import sparse_attend
from pyspec.cuda.ops.sparse_attend.ref import ROWS, KeyTail, SparseSpec
from pyspec.models.binding import Binding, Pass
from pyspec.models.blocks.attention import SINKS
from pyspec.models.blocks.compressor import BoundCompressor, Compressor
from pyspec.models.cuts import Cut, Units
from pyspec.models.part import AttentionShape, ForwardSize, OneCall, Place
from pyspec.models.rope import RopeFlags, turning_dimension
from pyspec.models.wants import Want
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.parts import KV, LayerParts, Paged, PartMemory, Ring
from pyspec.slots.ring import RingRows

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
class SparseAttention(OneCall):
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

    def scratch(self, size: ForwardSize) -> int:
        """Heads (the product, attended), and partial sums of kernels."""
        a, x, n_row = self.attends, self.indexer, size.n_row
        heads, rest = a.n_head * a.head_dim, 0 if x is None else x.n_head * x.dim
        rows = n_row * (4 * (2 * heads + 2 * rest) + 2 * heads)
        if size.device.type != "cuda":
            return rows
        sums = sparse_op.scratch_bytes(
            self.attend_spec(size.device, size.kv, size.eps), n_row, size.n_token
        )
        if (choice := self.index_spec(size.device, size.kv)) is None:
            return rows + sums
        return rows + max(sums, index_op.scratch_bytes(choice, n_row, size.n_token))

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

    def bind(self, at: Binding) -> BoundSparse:
        return BoundPagedWindow(self, at) if self.in_pages else BoundSparse(self, at)


class BoundSparse:
    """The mixer bound to its weights."""

    def __init__(self, spec: SparseAttention, at: Binding) -> None:
        w = at.weights
        self.spec, self.layer = spec, at.layer
        self.norm, self.q_norm = at.bound_norm(), Norm(w.vector(at.name("attn_q_a_norm.weight")), at.eps)
        self.kv_norm, self.sinks = w.vector(at.name("attn_kv_a_norm.weight")), w.vector(at.name(SINKS))
        self.freq = spec.rope.flagged(w.rope).freq().to(w.device)
        self.key_tail = KeyTail(self.kv_norm, self.freq)
        self.compressors = [BoundCompressor(one, at, self.freq) for one in spec.compressors]
        self.index = self.both = None
        self.capturable = all(one.capturable for one in self.compressors)
        if (choice := spec.index_spec(w.device, at.kv.k.dtype)) is not None:
            self.index = index_rows.bind(choice)
            self.capturable = self.capturable and index_rows.chosen(choice).capturable
            self.both = fuse.both(*(one.compress for one in self.compressors))
        self._bind_input(at)
        self.first_read = self.first, self.norm
        run = spec.attend_spec(w.device, at.kv.k.dtype, at.eps)
        self.attend = sparse_attend.bind(run)
        self.capturable = self.capturable and sparse_attend.chosen(run).capturable
        self._bind_output(at)

    def _bind_input(self, at: Binding) -> None:
        """The first product gives all that is read from the streams, the second one queries."""
        spec, a = self.spec, self.spec.attends
        first = [
            "attn_q_a.weight",
            "attn_kv.weight",
            *(x for one in spec.compressors for x in one.products),
        ]
        second = ["attn_q_b.weight"]
        self.sizes = [spec.q_rank, a.head_dim, *(2 * one.width for one in spec.compressors)]
        self.query_sizes = [a.n_head * a.head_dim, 0]
        if (x := spec.indexer) is not None:
            first.append("indexer.proj.weight")
            second.append("indexer.attn_q_b.weight")
            self.sizes.append(x.n_head)
            self.query_sizes[1] = x.n_head * x.dim
        self.first, self.second = (at.weights.matrix(*map(at.name, names)) for names in (first, second))

    def _bind_output(self, at: Binding) -> None:
        """The product in groups, and the last one."""
        a, n_group = self.spec.attends, self.spec.n_group
        norms = [self.kv_norm, *(one.norm for one in self.compressors)]
        self.power = norm_power(
            torch.cat(norms)
        )  # of keys: results are sums of keys whose weights add up to 1 at most
        self.out_a = at.weights.grouped(at.name("attn_output_a.weight"), n_group)
        self.out_b: fuse.Product = at.weights.summed(
            at.name("attn_output_b.weight")
        )  # of rows that are handed on, too
        largest = (
            max(float(norm.abs().amax()) for norm in norms) * (a.n_head // n_group * a.head_dim) ** 0.5
        )
        self.hands = fuse.handing(self.out_a.few, self.out_b, largest * self.out_a.reach())

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        y = self.alone(x, run)
        return y if residual is None else residual + y

    def alone(self, y: Tensor, run: Pass) -> Tensor:
        """What it adds to a stream."""
        parts, batch = run.memory.layers[self.layer], run.batch
        qr, kv, *rest = self.first(y, self.norm).split(self.sizes, -1)
        # ops that read the first product alone run beside the second product
        keys = fuse.keys_room(
            self.attend, [one.compress for one in self.compressors], self.second, (kv, *rest)
        )
        q, index_q = self.queries(qr, {} if keys is None else {"late": True})
        self._compress(rest, parts, batch, {} if keys is None else {"beside": True})
        if keys is not None:
            fuse.put_keys(self.attend, kv, self.key_tail, batch, keys)
        pool, chosen = None, None
        if self.compressors:
            pool = cast(KVPool, parts[COMPRESSED[0]])
        if self.index is not None and (x := self.spec.indexer) is not None:
            index_pool = cast(KVPool, parts[INDEX[0]])
            chosen = self.index(index_q.view(-1, x.n_head, x.dim), rest[2], self.freq, index_pool, batch)
        given = q, kv, self.key_tail, cast(RingRows, parts[WINDOW]), pool, chosen, self.sinks
        return self.out_b(fuse.attended(self.attend, given, batch, self.out_a, self.power, self.hands))

    def queries(self, qr: Tensor, late: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Of a row's low-rank query: heads [row, head, dim], and the rest of the product. late: further arguments of the product."""
        a = self.spec.attends
        q, rest = self.second(qr, self.q_norm, **(late or {})).split(self.query_sizes, -1)
        return q.view(-1, a.n_head, a.head_dim), rest

    def _compress(
        self,
        products: Sequence[Tensor],
        parts: dict[str, PartMemory],
        batch: Batch,
        beside: dict[str, bool],
    ) -> None:
        """Rows of the keys' compressor, then of the indexer's, if the layer has them."""
        of = list(zip(self.compressors, products, strict=False))
        if self.both is not None:
            given = [one.given(own, parts) for one, own in of]
            return self.both(*given, self.freq, batch, **beside)
        for one, own in of:
            one(own, parts, batch, beside)
        return None


class BoundPagedWindow(BoundSparse):
    """A window over keys that stand in pages."""

    def __init__(self, spec: SparseAttention, at: Binding) -> None:
        super().__init__(spec, at)
        a, device = spec.attends, at.weights.device
        tails = [
            RopeTailSpec(device, a.head_dim, spec.rope.n_rot, normed, at.eps) for normed in (True, False)
        ]
        self.normed_tail, self.tail = (rope_tail.bind(tail) for tail in tails)
        self.paged = attend.bind(
            AttendSpec(
                device, a.n_head, 1, a.head_dim, a.head_dim**-0.5, KvFormat.both(at.kv.k), has_sinks=True
            )
        )

    def alone(self, y: Tensor, run: Pass) -> Tensor:
        pool, batch, at = run.memory.kv[self.layer], run.batch, run.batch.positions
        qr, kv = self.first(y, self.norm).split(self.sizes, -1)
        q = self.normed_tail(self.queries(qr)[0], at, self.freq)
        self.write(kv, at, pool, batch.kv_rows)
        o = self.tail(
            self.paged(q, pool, batch, self.spec.window, self.sinks), at, self.freq, sign=-1.0
        ).flatten(1)
        ready = None if self.hands is None else self.hands(o)
        return self.out_b(self.out_a(o) if ready is None else ready)

    def write(self, kv: Tensor, at: Tensor, pool: KVPool, rows: Tensor) -> None:
        """Keys of the product's rows kv [row, dim], of tokens at positions `at` [row], to the pool's `rows` [row]."""
        pool.write(rows, self.normed_tail(kv[:, None], at, self.freq, self.kv_norm), None)
