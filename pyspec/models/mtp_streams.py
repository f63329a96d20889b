"""The MTP block of a model with several residual streams (deepseek4).

It pairs a token with all streams of the position before it, as the trunk left them behind its last block, and chaining feeds its own
streams. Its keys stand in the target's pages, one row a token, and it sees the last `window` of them. In a file of its own the names
`output_hc_*` mean the mixers of its own head, which are others than the trunk's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_tail.op import rope_tail
from pyspec.cuda.ops.rope_tail.ref import RopeTailSpec
from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.deepseek4 import StreamBlock, StreamHead, WindowAttention
from pyspec.models.deepseek4_config import Deepseek4Config, limits_of, mix_tensors
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import AttentionShape, LoadTypes, Request
from pyspec.models.target import Out, Target
from pyspec.models.wants import Want
from pyspec.models.weights import EMBEDDING, HEAD, Embedding, Matrix, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KvFormat
from pyspec.slots.memory import KV, Memory
from pyspec.slots.parts import LayerParts, Paged

MIXERS = "output_hc"
PIECE = 1 << 26  # bytes compared at once


@runtime_checkable
class StreamsParts(Protocol):
    """The parts of a target that its MTP block shares."""

    config: Deepseek4Config
    embedding: Embedding
    norm: Tensor

    def head(self, hidden: Tensor) -> Tensor:
        """Normed rows [row, n_embd] to logits [row, n_vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class MtpOfStreams:
    """The block as data. Implements `MtpSpec`."""

    config: Deepseek4Config

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        return self.config.attention

    def tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        if file is target:
            raise PairError(
                "the MTP block stands in the target's file, where the mixers of its head have no place beside the trunk's"
                f" ({MIXERS}_fn): give the block's own file with -md, or --spec-type none"
            )
        c = self.config
        p, n, s = f"blk.{c.n_layer}", c.n_embd, c.streams.n
        return {
            **c.block_tensors(file, p, 0),
            **mix_tensors(MIXERS, s * n, s, 1),
            f"{p}.nextn.eh_proj.weight": Want((n, 2 * n)),
            f"{p}.nextn.enorm.weight": Want((n,)),
            f"{p}.nextn.hnorm.weight": Want((n,)),
            f"{p}.nextn.shared_head_norm.weight": Want((n,), optional=True),
            f"{p}.nextn.embed_tokens.weight": Want((c.n_vocab, n), optional=True),
            f"{p}.nextn.shared_head_head.weight": Want((c.n_vocab, n), optional=True),
            EMBEDDING: Want((c.n_vocab, n), optional=True),
            HEAD: Want((c.n_vocab, n), optional=True),
        }

    def layers(self) -> tuple[LayerParts, ...]:
        """The trunk's keep nothing, the block's one row a token."""
        return (*[{}] * self.config.n_layer, {KV: Paged(1, self.config.heads.head_dim, keys_only=True)})

    def shared(self, file: GGUFFile, target: GGUFFile) -> tuple[str, ...]:
        return tuple(name for name in (EMBEDDING, HEAD) if _is_same(file, target, name))

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        return iter(())

    def bind(
        self, weights: Weights, memory: Memory, target: Target, head: Matrix | None, skips: tuple[str, ...]
    ) -> StreamsMtpBlock:
        if not isinstance(target, StreamsParts):
            raise PairError("this target does not give what its MTP block shares with it")
        return StreamsMtpBlock(weights, memory, target, head, skips)


def _is_same(a: GGUFFile, b: GGUFFile, name: str) -> bool:
    x, y = a.tensors.get(name), b.tensors.get(name)
    if x is None or y is None or (x.type, x.shape) != (y.type, y.shape):
        return False
    for at in range(0, x.n_bytes, PIECE):
        one, other = (np.empty(min(PIECE, x.n_bytes - at), np.uint8) for _ in range(2))
        a.read_into(name, one, at)
        b.read_into(name, other, at)
        if not np.array_equal(one, other):
            return False
    return True


class PagedWindow(WindowAttention):
    """The block's mixer: a window over keys that stand in pages."""

    def __init__(self, c: Deepseek4Config, w: Weights, p: str, kv: torch.dtype) -> None:
        super().__init__(c, w, p, 0, kv)
        a = c.heads
        tails = [RopeTailSpec(w.device, a.head_dim, c.n_rot, normed, c.eps) for normed in (True, False)]
        self.normed_tail, self.tail = (rope_tail.bind(spec) for spec in tails)
        self.paged = attend.bind(
            AttendSpec(w.device, a.n_head, 1, a.head_dim, a.head_dim**-0.5, KvFormat.both(kv), has_sinks=True)
        )

    def __call__(
        self, y: Tensor, memory: Memory, layer: int, batch: Batch, place: fuse.RowBuffer | None = None
    ) -> Tensor:
        pool, at = memory.kv[layer], batch.positions
        qr, kv = fuse.product_of(self.first, y, self.norm, place).split(self.sizes, -1)
        q = self.normed_tail(self.queries(qr)[0], at, self.freq)
        pool.write(batch.kv_rows, self.normed_tail(kv[:, None], at, self.freq, self.kv_norm), None)
        o = self.paged(q, pool, batch, self.c.window, self.sinks)
        return self.finish(self.tail(o, at, self.freq, sign=-1.0))


class StreamsMtpBlock:
    """Implements `MtpNet`: hidden states are all streams of a row, side by side."""

    def __init__(
        self, weights: Weights, memory: Memory, target: StreamsParts, head: Matrix | None, skips: tuple[str, ...]
    ) -> None:
        c = target.config
        c = replace(c, limits=limits_of(weights.file, c.n_layer + 1))
        p, own = f"blk.{c.n_layer}", f"blk.{c.n_layer}.nextn"
        self.config = c
        self.memory = memory
        self.layer = c.n_layer
        self.n_hidden = c.n_hidden
        self.block = StreamBlock(c, weights, c.n_layer, PagedWindow(c, weights, p, memory.kv_format.k))
        self.eh = weights.matrix(f"{own}.eh_proj.weight")
        self.enorm, self.hnorm = weights.vector(f"{own}.enorm.weight"), weights.vector(f"{own}.hnorm.weight")
        self.norms = norms.bind(NormsSpec(weights.device, c.n_embd, c.eps))
        norm = weights.optional(f"{own}.shared_head_norm.weight")
        self.last = StreamHead(c, weights, target.norm if norm is None else norm, MIXERS)
        names = [name for name in (f"{own}.embed_tokens.weight", EMBEDDING) if weights.has(name) and name not in skips]
        self.embedding = weights.embedding(names[0]) if names else target.embedding
        names = [name for name in (f"{own}.shared_head_head.weight", HEAD) if weights.has(name) and name not in skips]
        self.output = weights.matrix(names[0]) if names else head or target.head
        self.best = BestDrafts(weights.device)

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_hidden] f32: the streams of each row's last position. Returns those of its own."""
        n, s = len(hidden), self.config.streams.n
        e = self.norms(self.embedding(batch.tokens), self.enorm)[:, None].expand(-1, s, -1)
        h = self.norms(hidden.view(n * s, -1), self.hnorm).view(n, s, -1)
        x = self.eh(torch.cat((e, h), -1).view(n * s, -1)).view(n, s, -1)
        return self.block(x, self.memory, self.layer, batch).flatten(1)

    def head(self, hidden: Tensor) -> Tensor:
        return self.output(self.last(hidden.view(len(hidden), self.config.streams.n, -1)))

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The block's vocabulary is the target's."""
        logits = self.head(hidden)
        self.best(logits, out)
        return logits

    def states_of(self, out: Out) -> Tensor:
        """The block reads the target's streams as they are."""
        return out.hidden
