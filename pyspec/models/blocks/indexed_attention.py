"""Attention over blocks of tokens that an indexer chooses, and over the tokens behind the last complete block.

Keys of the indexer are means of a block's, normed and turned at its first position (op `compress`). A row's choice (op `index_rows`) becomes its
own pages (op `seen_pages`), over which the op `attend` runs. The kernels of the first two turn pairs side by side in the last dims of a head; so
the indexer's dims are put in that order, in queries and keys alike, which changes no score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.ops.compress.ref import VALUES, CompressSpec
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.norms.spec import NormsSpec
from pyspec.cuda.ops.seen_pages.ref import SeenPagesSpec
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.sparse_attention import INDEX, IndexerShape
from pyspec.models.part import AttentionShape, Place, Plain
from pyspec.models.rope import RopeSpec
from pyspec.models.ropes import bound
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts, Paged, Ring

PRODUCTS = "indexer.q_proj.weight", "indexer.k_proj.weight"


@dataclass(frozen=True, slots=True)
class IndexedAttention(Plain):
    """The mixer as data. indexer: its `top_k` counts blocks, each of `ratio` tokens."""

    attention: Attention
    indexer: IndexerShape
    ratio: int

    @property
    def attends(self) -> AttentionShape:
        return self.attention.shape

    @property
    def _widths(self) -> tuple[int, int]:
        return self.indexer.n_head * self.indexer.dim, self.indexer.dim

    def tensors(self, at: Place) -> dict[str, Want]:
        wants = {
            at.name(name): Want((n, at.n_embd)) for name, n in zip(PRODUCTS, self._widths, strict=True)
        }
        wants |= {at.name(f"indexer.{x}_norm.weight"): Want((self.indexer.dim,)) for x in "qk"}
        return self.attention.tensors(at) | wants

    def memory(self) -> LayerParts:
        dim, (rows, partial) = self.indexer.dim, INDEX
        pooled = Paged(1, dim, tokens_per_row=self.ratio, keys_only=True, as_floats=True)
        return {**self.attention.memory(), rows: pooled, partial: Ring(self.ratio, {VALUES: (dim,)})}

    def share(self, n: int) -> IndexedAttention:
        """Heads. Each rank has the whole indexer: it chooses for all heads of a row."""
        return replace(self, attention=self.attention.share(n))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        n = f.normed(x)
        seen = self._seen(f, n)
        return self.attention.attended(f, self.attention.projected(f, n), stream, x.width, seen=seen)

    def _seen(self, f: Forward, n: Value) -> Value:
        """The batch over what each row of normed n sees."""
        one, kv, rope = self.indexer, f.kv.floats.k.dtype, self.attention.rope
        n_rot, (rows, partial) = rope.n_rot, INDEX
        both = f.read(_turned, *PRODUCTS, dim=one.dim, n_rot=n_rot)
        q, k = f.split(f.product_by(both, n, sum(self._widths)), self._widths)
        q_norm, k_norm = (f.read(_turned_norm, f"indexer.{x}_norm.weight", rope=rope) for x in "qk")
        freq = f.read(_angles_of_one, rope=rope)
        spec = CompressSpec(f.device, self.ratio, one.dim, False, n_rot, f.eps, kv, weighed=False)
        memory = f.kept(partial), f.kept(rows)
        f.op("compress", spec, k, None, None, k_norm, freq, *memory, f.batch, shape=())
        heads = one.n_head, one.dim
        q = f.view(f.side_by_side(q), f".view(-1, {one.dim})", heads)
        q = f.op("norms", NormsSpec(f.device, one.dim, f.eps), q, q_norm, shape=heads)
        q = f.view(q, f".view(-1, {one.n_head}, {one.dim})", heads)
        choice = IndexSpec(f.device, *heads, one.top_k, self.ratio, kv, n_rot)
        given = q, None, freq, f.kept(rows), f.batch
        chosen = f.op("index_rows", choice, *given, shape=(one.top_k,))
        pages = SeenPagesSpec(f.device, self.ratio, one.top_k)
        return f.op("seen_pages", pages, chosen, f.batch, shape=(2 * one.top_k + 2,))


def _order(dim: int, n_rot: int) -> Tensor:
    """Dims of a head as the indexer's kernels turn them, of one whose first `n_rot` dims turn in halves."""
    pairs = torch.arange(n_rot).view(2, -1).T.flatten()
    return torch.cat([torch.arange(n_rot, dim), pairs])


def _turned(w: Any, *names: str, dim: int, n_rot: int) -> Any:
    """Matrices of heads side by side, each head's rows in that order."""
    order = _order(dim, n_rot)
    for name in names:
        n_head = w.file.tensors[name].shape[0] // dim
        w.reorder(name, (dim * torch.arange(n_head)[:, None] + order).flatten())
    return w.matrix(*names)


def _turned_norm(w: Any, name: str, *, rope: RopeSpec) -> Tensor:
    """Weights in that order; those of dims that turn have the rope's length."""
    weight: Tensor = w.vector(name)
    weight = weight[_order(len(weight), rope.n_rot).to(weight.device)]
    weight[len(weight) - rope.n_rot :] *= bound(rope.flagged(w.rope), w).length
    return weight


def _angles_of_one(w: Any, *, rope: RopeSpec) -> Tensor:
    """Of one position [n_rot / 2] f64, as flags change the rope."""
    own = bound(rope.flagged(w.rope), w)
    return own.freq.double() / own.factor
