"""The small network that chooses the keys of latent attention (glm-dsa): every token has a short key of its own, and the best are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.cuda.ops.seen_pages.ref import SeenPagesSpec
from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.blocks.sparse_attention import IndexerShape, TailRope
from pyspec.models.part import Place
from pyspec.models.rope import RopeSpec
from pyspec.models.wants import Want
from pyspec.slots.kv_types import floats_of
from pyspec.slots.parts import LayerParts, Paged

KEYS = "index_keys"  # name of its memory
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
        q = f.product(qr, "indexer.attn_q_b.weight", n_out=x.n_head * x.dim)
        q = f.view(q, f".view(-1, {x.n_head}, {x.dim})", (x.n_head, x.dim))
        w = f.product(h, "indexer.proj.weight", n_out=x.n_head)
        kind = floats_of(f.kv.k).dtype
        spec = IndexSpec(f.device, x.n_head, x.dim, x.top_k, 1, kind, x.dim)
        chosen = f.op("index_rows", spec, q, w, freq, pool, f.batch, shape=(x.top_k,))
        pages = SeenPagesSpec(f.device, 1, x.top_k)
        return f.op("seen_pages", pages, chosen, f.batch, shape=(2 * x.top_k + 2,))  # of 64 bits


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
