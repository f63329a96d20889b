"""The small network that chooses the keys of latent attention: every token has a short key of its own (glm-dsa), or every few tokens one
(glm5-next), and the best are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pyspec.cuda.ops.compress.ref import SCORES, VALUES, CompressSpec
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.seen_pages.ref import SeenPagesSpec
from pyspec.forward.call import Value, Weight
from pyspec.forward.trace import Forward
from pyspec.models.blocks.sparse_attention import IndexerShape, TailRope
from pyspec.models.part import Place
from pyspec.models.rope import RopeSpec
from pyspec.models.wants import Want
from pyspec.slots.kv_types import floats_of
from pyspec.slots.parts import LayerParts, Paged, Ring

KEYS, PARTIAL = "index_keys", "index_partial"  # names of its memory
GATE, PLACES = "indexer_compressor_gate.weight", "indexer_compressor_ape.weight"
UNTURNED = 2  # dimensions that turn by nothing
EPS = 1e-12  # of the keys' LayerNorm: llama.cpp has none


@dataclass(frozen=True, slots=True)
class Indexer:
    """An indexer as data. rope: its `n_rot` turn the first dimensions of queries and keys"""

    shape: IndexerShape
    rope: RopeSpec

    def tensors(self, at: Place, q_rank: int) -> dict[str, Want]:
        """q_rank: width of the rows that its queries are made of."""
        n, x = at.n_embd, self.shape
        shapes = {
            "attn_q_b.weight": (x.n_head * x.dim, q_rank),
            "attn_k.weight": (x.dim, n),
            "proj.weight": (x.n_head, n),
            "k_norm.weight": (x.dim,),
            "k_norm.bias": (x.dim,),
        }
        return {at.name(f"indexer.{name}"): Want(shape) for name, shape in shapes.items()}

    def memory(self) -> LayerParts:
        return {KEYS: Paged(1, self.shape.dim, keys_only=True, as_floats=True)}

    def forward(self, f: Forward, h: Value, qr: Value) -> Value:
        """Writes the rows' keys, and chooses. h: normed rows of the stream; qr: of the queries. The result stands for the batch."""
        x, pool = self.shape, f.kept(KEYS)
        freq = f.read(frequencies, rope=self.rope, dim=x.dim)
        k = f.product(h, "indexer.attn_k.weight", n_out=x.dim)
        norm, bias = (
            f.read(lengthened, f"indexer.k_norm.{y}", rope=self.rope) for y in ("weight", "bias")
        )
        k = f.norm_apart(k, norm, eps=EPS, takes_mean=True)
        k = f.view(f.biased(k, bias), "[:, None]", (1, x.dim))
        tail = RopeTailSpec(f.device, x.dim, x.dim, False, f.eps)
        k = f.op("rope_tail", tail, k, f.positions, freq, shape=k.shape)
        f.op("write_keys", None, pool, f.kv_rows(f.pool()), k, shape=())
        return self.chosen(f, h, qr, freq, x.dim)

    def chosen(self, f: Forward, h: Value, qr: Value, freq: Weight, n_rot: int, ratio: int = 1) -> Value:
        """The choice among blocks of `ratio` tokens. The last n_rot dimensions of queries turn."""
        x, kind = self.shape, floats_of(f.kv.k).dtype
        q = f.product(qr, "indexer.attn_q_b.weight", n_out=x.n_head * x.dim)
        q = f.view(q, f".view(-1, {x.n_head}, {x.dim})", (x.n_head, x.dim))
        w = f.product(h, "indexer.proj.weight", n_out=x.n_head)
        spec = IndexSpec(f.device, x.n_head, x.dim, x.top_k, ratio, kind, n_rot)
        chosen = f.op("index_rows", spec, q, w, freq, f.kept(KEYS), f.batch, shape=(x.top_k,))
        pages = SeenPagesSpec(f.device, ratio, x.top_k)
        return f.op("seen_pages", pages, chosen, f.batch, shape=(2 * x.top_k + 2,))  # of 64 bits


@dataclass(frozen=True, slots=True)
class PooledIndexer(Indexer):
    """An indexer of pools of `ratio` tokens (glm5-next). Each dimension of a pool's key is a mean of the tokens', weighed by a softmax over
    their gates and places in the pool. Its `top_k` counts pools; rows see the tokens behind the last whole pool, too. eps: of the keys' norm"""

    ratio: int
    eps: float

    def tensors(self, at: Place, q_rank: int) -> dict[str, Want]:
        own = {GATE: (self.shape.dim, at.n_embd), PLACES: (self.ratio, self.shape.dim)}
        wants = {at.name(name): Want(shape) for name, shape in own.items()}
        return Indexer.tensors(self, at, q_rank) | wants

    def memory(self) -> LayerParts:
        n = self.shape.dim
        pooled = Paged(1, n, tokens_per_row=self.ratio, keys_only=True, as_floats=True)
        return {KEYS: pooled, PARTIAL: Ring(self.ratio, {VALUES: (n,), SCORES: (n,)})}

    def forward(self, f: Forward, h: Value, qr: Value) -> Value:
        n, freq, kind = self.shape.dim, f.read(unturned), floats_of(f.kv.k).dtype
        k = f.product(h, "indexer.attn_k.weight", n_out=n)
        k = f.norm_apart(k, f.vector("indexer.k_norm.weight"), eps=self.eps, takes_mean=True)
        k = f.biased(k, f.vector("indexer.k_norm.bias"))
        given = k, f.product(h, GATE, n_out=n), f.vector(PLACES), None, freq
        spec = CompressSpec(f.device, self.ratio, n, False, UNTURNED, f.eps, kind, normed=False)
        f.op("compress", spec, *given, f.kept(PARTIAL), f.kept(KEYS), f.batch, shape=())
        return self.chosen(f, h, qr, freq, UNTURNED, self.ratio)


def unturned(w: Any) -> Tensor:
    """Frequencies of kernels that turn some dimensions always."""
    return torch.zeros(UNTURNED // 2, dtype=torch.float64, device=w.device)


def frequencies(w: Any, *, rope: RopeSpec, dim: int) -> Tensor:
    """Of all pairs of a head [dim / 2] f64, 0 where they do not turn."""
    own = rope.flagged(w.rope)
    s = own.scaling
    tail = TailRope(own.n_rot, own.base, s.divisor, s.n_ctx_orig, *s.turns, ramp=s.ramp)
    freq = torch.zeros(dim // 2, dtype=torch.float64)
    freq[: own.n_rot // 2] = tail.freq()
    return freq.to(w.device)


def lengthened(w: Any, name: str, *, rope: RopeSpec) -> Tensor:
    """Numbers [dim] of keys, of those that turn with the length that the rope gives keys and queries, which products have twice."""
    own, x = rope.flagged(w.rope), w.vector(name).clone()
    x[: own.n_rot] *= own.scaling.length**2
    return cast(Tensor, x)
