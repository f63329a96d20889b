"""`deepseek4` (DeepSeek-V4 Flash and Pro): four residual streams; attention of one key that is its value over a window of raw rows and over compressed
ones; experts that a table of tokens or a router names.

The configuration is in `deepseek4_config`; the maths of each part is the reference of the op it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.compress.op import compress
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.index_rows.op import index_rows
from pyspec.cuda.ops.index_rows.ref import IndexSpec
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Added, MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rows.ref import Norm, norm_power
from pyspec.cuda.ops.sparse_attend.op import sparse_attend
from pyspec.cuda.ops.sparse_attend.ref import KeyTail, SparseSpec
from pyspec.cuda.ops.streams.op import streams
from pyspec.cuda.ops.streams.ref import Reading, StreamMix, Streams, StreamsSpec
from pyspec.errors import ModelError
from pyspec.models.blocks.attention import SINKS
from pyspec.models.blocks.moe import stacks_of
from pyspec.models.bound import BoundModel
from pyspec.models.deepseek4_config import CSA, INDEX, INDEX_PARTIAL, PARTIAL, ROWS, WINDOW, Deepseek4Config, read
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.memory import Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.ring import RingRows

__all__ = ["Deepseek4", "read"]


def mix_of(w: Weights, name: str) -> StreamMix:
    """The coefficients of one part of a block."""
    return StreamMix(*(w.vector(f"{name}_{x}.weight") for x in ("fn", "scale", "base")))


def streams_spec(c: Deepseek4Config, device: torch.device) -> StreamsSpec:
    return StreamsSpec(device, c.streams.n, c.n_embd, c.streams.n_iter, c.eps, c.streams.floor)


class Compressor:
    """Makes the compressed rows of one layer, of keys or of the indexer. Its products are the layer's first ones."""

    def __init__(self, c: Deepseek4Config, w: Weights, name: str, ratio: int, dim: int, kv: torch.dtype) -> None:
        self.names = [f"{name}_kv.weight", f"{name}_gate.weight"]
        self.ratio, self.width = ratio, dim * (1 + (ratio == CSA))
        self.places, self.norm = w.vector(f"{name}_ape.weight"), w.vector(f"{name}_norm.weight")
        self.freq = c.freq(ratio).to(w.device)
        spec = CompressSpec(w.device, ratio, dim, ratio == CSA, c.n_rot, c.eps, kv)
        self.compress, self.capturable = compress.bind(spec), compress.chosen(spec).capturable

    def __call__(
        self, products: Tensor, ring: RingRows, pool: KVPool, batch: Batch, beside: dict[str, bool] | None = None
    ) -> None:
        """products [row, 2 * width] f32: values, and scores without the bias of a token's place in its block. beside: further arguments of the op."""
        values, scores, places, norm, *_ = self.given(products, ring, pool)
        self.compress(values, scores, places, norm, self.freq, ring, pool, batch, **(beside or {}))

    def given(
        self, products: Tensor, ring: RingRows, pool: KVPool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, RingRows, KVPool]:
        """Arguments of the op, except angles and the batch."""
        values, scores = products.split(self.width, -1)
        return values, scores, self.places, self.norm, ring, pool


class WindowAttention:
    """The layer's mixer: a row read from the streams [row, n_embd] f32, not normed yet, to the row that goes back to them."""

    def __init__(self, c: Deepseek4Config, w: Weights, p: str, ratio: int, kv: torch.dtype) -> None:
        self.c = c
        self.ratio = ratio
        a = c.heads
        x = c.indexer
        self.norm, self.q_norm = (
            Norm(w.vector(f"{p}.attn_norm.weight"), c.eps),
            Norm(w.vector(f"{p}.attn_q_a_norm.weight"), c.eps),
        )
        self.kv_norm, self.sinks = w.vector(f"{p}.attn_kv_a_norm.weight"), w.vector(f"{p}.{SINKS}")
        self.freq = c.freq(ratio).to(w.device)
        self.key_tail = KeyTail(self.kv_norm, self.freq)
        norms = [self.kv_norm]  # of the keys: results are sums of keys whose weights add up to 1 at most
        first, second = [f"{p}.attn_q_a.weight", f"{p}.attn_kv.weight"], [f"{p}.attn_q_b.weight"]
        self.sizes = [c.q_rank, a.head_dim]
        self.rows = self.indexed = self.both = None
        if ratio:
            self.rows = Compressor(c, w, f"{p}.attn_compressor", ratio, a.head_dim, kv)
            norms.append(self.rows.norm)
            first += self.rows.names
            self.sizes.append(2 * self.rows.width)
        if ratio == CSA:
            self.indexed = Compressor(c, w, f"{p}.indexer_compressor", ratio, x.dim, kv)
            first += [*self.indexed.names, f"{p}.indexer.proj.weight"]
            second.append(f"{p}.indexer.attn_q_b.weight")
            self.sizes += [2 * self.indexed.width, x.n_head]
            choice = IndexSpec(w.device, x.n_head, x.dim, x.top_k, ratio, kv, c.n_rot)
            self.index, self.can_choose = index_rows.bind(choice), index_rows.chosen(choice).capturable
            assert self.rows is not None
            self.both = fuse.both(self.rows.compress, self.indexed.compress)
        self.first, self.second = w.matrix(*first), w.matrix(*second)
        self.power = norm_power(torch.cat(norms))
        spec = SparseSpec(w.device, a.n_head, a.head_dim, c.window, ratio, kv, c.n_rot, c.eps)
        self.attend, self.can_attend = sparse_attend.bind(spec), sparse_attend.chosen(spec).capturable
        self.out_a = w.grouped(f"{p}.attn_output_a.weight", c.n_group)
        self.out_b: fuse.Product = w.summed(f"{p}.attn_output_b.weight")  # of rows that are handed on, too
        largest = max(float(norm.abs().amax()) for norm in norms) * (a.n_head // c.n_group * a.head_dim) ** 0.5
        self.hands = fuse.handing(self.out_a.few, self.out_b, largest * self.out_a.reach())

    @property
    def capturable(self) -> bool:
        """A CUDA graph may hold it: none of its ops looks at lists of the host."""
        made = all(part is None or part.capturable for part in (self.rows, self.indexed))
        return made and self.can_attend and (self.indexed is None or self.can_choose)

    def queries(self, qr: Tensor, late: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """Of a row's low-rank query: heads [row, head, dim], and the rest of the product. late: further arguments of the product."""
        a = self.c.heads
        q, rest = self.second(qr, self.q_norm, **(late or {})).split([a.n_head * a.head_dim, self._n_rest], -1)
        return q.view(-1, a.n_head, a.head_dim), rest

    @property
    def _n_rest(self) -> int:
        return self.c.indexer.n_head * self.c.indexer.dim if self.indexed is not None else 0

    def _compress(
        self,
        products: Sequence[Tensor],
        parts: dict[str, PartMemory],
        pool: KVPool,
        batch: Batch,
        beside: dict[str, bool],
    ) -> None:
        """Rows of the keys' compressor, then of the indexer's if the layer has one."""
        assert self.rows is not None
        ring = cast(RingRows, parts[PARTIAL])
        if self.indexed is None:
            return self.rows(products[0], ring, pool, batch, beside)
        own, index = cast(RingRows, parts[INDEX_PARTIAL]), cast(KVPool, parts[INDEX])
        if self.both is None:
            self.rows(products[0], ring, pool, batch, beside)
            return self.indexed(products[1], own, index, batch, beside)
        given = self.rows.given(products[0], ring, pool), self.indexed.given(products[1], own, index)
        self.both(*given, self.rows.freq, batch, **beside)

    def place(self, streams: Streams, n_row: int) -> fuse.RowBuffer | None:
        """Where `streams` may put the row that the layer reads."""
        return fuse.place_for(streams, self.first, n_row, self.norm)

    def finish(self, o: Tensor) -> Tensor:
        """Heads' outputs [row, head, dim], turned back, projected in groups."""
        ready = None if self.hands is None else self.hands(o.flatten(1))
        return self.out_b(self.out_a(o.flatten(1)) if ready is None else ready)

    def __call__(
        self, y: Tensor, memory: Memory, layer: int, batch: Batch, place: fuse.RowBuffer | None = None
    ) -> Tensor:
        """place: where y lies ready for the first product, if it does."""
        parts = memory.layers[layer]
        qr, kv, *rest = fuse.product_of(self.first, y, self.norm, place).split(self.sizes, -1)
        # ops that read the first product alone run beside the second product
        compressors = [of.compress for of in (self.rows, self.indexed) if of is not None]
        keys = fuse.keys_room(self.attend, compressors, self.second, (kv, *rest))
        q, index_q = self.queries(qr, {} if keys is None else {"late": True})
        pool, chosen = None, None
        if self.rows is not None:
            pool = cast(KVPool, parts[ROWS])
            self._compress(rest, parts, pool, batch, {} if keys is None else {"beside": True})
        if keys is not None:
            fuse.put_keys(self.attend, kv, self.key_tail, batch, keys)
        if self.indexed is not None:
            index_pool = cast(KVPool, parts[INDEX])
            index_q = index_q.view(-1, self.c.indexer.n_head, self.c.indexer.dim)
            chosen = self.index(index_q, rest[2], self.freq, index_pool, batch)
        window = cast(RingRows, parts[WINDOW])
        given = q, kv, self.key_tail, window, pool, chosen, self.sinks
        return self.out_b(fuse.attended(self.attend, given, batch, self.out_a, self.power, self.hands))


class StreamExperts:
    """The layer's feed-forward: a row read from the streams [row, n_embd] f32, not normed yet, to the row that goes back to them."""

    def __init__(self, c: Deepseek4Config, w: Weights, p: str, limits: tuple[float, float], *, is_hashed: bool) -> None:
        m, (limit, own), self.ranks = c.moe, limits, w.ranks
        self.norm = Norm(w.vector(f"{p}.ffn_norm.weight"), c.eps)
        self.router = w.vector(f"{p}.ffn_gate_inp.weight")
        self.table = w.table(f"{p}.ffn_gate_tid2eid.weight") if is_hashed else None
        if self.table is not None and not bool(((self.table >= 0) & (self.table < m.n_expert)).all()):
            raise ModelError(f"{p}.ffn_gate_tid2eid.weight names an expert outside 0..{m.n_expert - 1}")
        self.bias = None if is_hashed else w.optional(f"{p}.exp_probs_b.bias")
        has_bias = self.bias is not None
        route = RouteSpec(
            w.device, c.n_embd, m.n_expert, m.n_used, m.router, m.renorm, m.scale, has_bias, eps=c.eps, given=is_hashed
        )
        self.route, self.capturable = moe_route.bind(route), moe_route.chosen(route).capturable
        stacks = stacks_of(w, p, m.act)
        type = stacks.up.type if stacks.gate is not None and stacks.gate.type is stacks.up.type else None
        spec = MoeSpec(
            w.device, m.n_used, c.n_embd, m.n_ff, "swiglu", type, stacks.down.type, n_expert=m.n_expert, limit=limit
        )
        self.experts, self.capturable = moe.bind(spec)(stacks), self.capturable and moe.chosen(spec).capturable
        self.gate_up = self.down = None
        if m.n_ff_shared:
            self.gate_up = w.gated(f"{p}.ffn_gate_shexp.weight", f"{p}.ffn_up_shexp.weight", own)
            self.down = w.matrix(f"{p}.ffn_down_shexp.weight")
        self.hands = fuse.handing(self.gate_up, self.down, own * own)  # silu of a cut value is no larger

    def place(self, streams: Streams, n_row: int) -> fuse.RowBuffer | None:
        """Where `streams` may put the row that the shared expert reads."""
        return fuse.place_for(streams, self.gate_up, n_row, self.norm)

    def __call__(
        self, y: Tensor, given: Tensor | None, place: fuse.RowBuffer | None = None, streams: Streams | None = None
    ) -> Tensor | fuse.Shares:
        """given: experts of the rows' tokens by the table. place: where y lies ready for the shared expert, if it does. streams: the op that
        merges the result with the next reading, if one does; of one rank it may also sum the experts' outputs."""
        shared = None
        if self.gate_up is not None and self.down is not None:
            shared = fuse.one_after_other(self.gate_up, self.down, self.hands, y, self.norm, place)
        parts = fuse.at_once(self.route, self.experts, len(y), self.norm, self.norm)
        # several parts are no few rows, which alone are left for streams to sum: the last of them may be
        chosen = partial(self._chosen, streams if self.ranks is None and len(parts) == 1 else None)
        whole = fuse.by_parts(parts, chosen, y, given, shared)
        return whole if self.ranks is None else self.ranks.sum(whole)

    def _chosen(
        self, streams: Streams | None, y: Tensor, given: Tensor | None, shared: Tensor | None
    ) -> Tensor | fuse.Shares:
        """experts(norm(y)) + shared, for as many rows as experts take at once."""
        ready, beside = fuse.before_choice(self.route, self.experts, y, self.norm, self.norm)
        routes = self.route(y, self.norm.weight, self.router, self.bias, given, **beside)
        return fuse.experts_into(self.experts, y, routes, self.norm, Added(shared), ready, streams)


class StreamBlock:
    """Attention, then experts, each between a row that is read from the streams and its way back into them."""

    def __init__(self, c: Deepseek4Config, w: Weights, i: int, mixer: WindowAttention) -> None:
        p = f"blk.{i}"
        mix = streams_spec(c, w.device)
        self.streams = streams.bind(mix)
        self.attn_mix, self.feed_mix = mix_of(w, f"{p}.hc_attn"), mix_of(w, f"{p}.hc_ffn")
        self.mixer, self.feed = mixer, StreamExperts(c, w, p, c.limits[i], is_hashed=i < min(c.n_hash, c.n_layer))
        self.parts = [self.mixer, self.feed]
        self.capturable = streams.chosen(mix).capturable and mixer.capturable and self.feed.capturable

    def __call__(self, x: Tensor, memory: Memory, layer: int, batch: Batch) -> Tensor:
        """The streams x [row, stream, n_embd] f32 behind the block."""
        given = None if self.feed.table is None else self.feed.table[batch.tokens]
        return self.run(x, None, memory, layer, batch, given)[0]

    def run(
        self,
        x: Tensor,
        reading: Reading | None,
        memory: Memory,
        layer: int,
        batch: Batch,
        given: Tensor | None,
        behind: StreamBlock | None = None,
    ) -> tuple[Tensor, Reading | None]:
        """The same, and the reading of the block `behind`. reading: this block's, made by the block before it. given: experts of the rows, if
        the block has a table of them."""
        streams, n = self.streams, len(x)
        place = self.mixer.place(streams, n)
        if reading is None:
            reading = fuse.reading(streams, x, self.attn_mix, place)
        y, post, comb = reading
        y, place = self.mixer(y, memory, layer, batch, place), self.feed.place(streams, n)
        x, (y, post, comb) = fuse.merged(streams, y, x, (post, comb), self.feed_mix, place)
        made = self.feed(y, given, place, None if behind is None else streams)
        if behind is None:
            assert isinstance(made, Tensor)  # no streams were given to sum the experts' outputs
            return streams.merge(made, x, post, comb), None
        return fuse.merged(streams, made, x, (post, comb), behind.attn_mix, behind.mixer.place(streams, n))


class StreamHead:
    """From streams to normed rows, which the model's head reads."""

    def __init__(self, c: Deepseek4Config, w: Weights, norm: Tensor, name: str = "output_hc") -> None:
        self.norm, self.mix = norm, mix_of(w, name)
        self.streams = streams.bind(streams_spec(c, w.device))
        self.norms = norms.bind(NormsSpec(w.device, c.n_embd, c.eps))

    def __call__(self, x: Tensor) -> Tensor:
        """x [row, stream, n_embd] -> [row, n_embd]"""
        return self.norms(self.streams.head(x, self.mix), self.norm)


class Deepseek4(BoundModel):
    """The model bound to its memory. Implements `Target`; its hidden states are all streams behind the last block, side by side."""

    captures_prompts = False  # its attention of many rows has counts of the host

    def __init__(self, config: Deepseek4Config, weights: Weights, memory: Memory) -> None:
        super().__init__(config, weights, memory)
        own, self.n_stream = config.share(weights.n_rank), config.streams.n
        self.blocks = [
            StreamBlock(own, weights, i, WindowAttention(own, weights, f"blk.{i}", ratio, memory.kv_format.k))
            for i, ratio in enumerate(config.ratios[: config.n_layer])
        ]
        tables = [block.feed.table for block in self.blocks if block.feed.table is not None]  # of the first blocks
        self.tables = torch.stack(tables) if tables else None
        for block, table in zip(self.blocks, () if self.tables is None else self.tables, strict=False):
            block.feed.table = table
        self.norm = weights.vector("output_norm.weight")
        self.last = StreamHead(config, weights, self.norm)
        self.output = weights.head()
        may = self.ranks is None or self.ranks.capturable
        self.capturable = may and all(block.capturable for block in self.blocks)

    def trunk(self, batch: Batch, taps: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = self.embedding(batch.tokens)[:, None].repeat(1, self.n_stream, 1)
        # of all layers at once: between kernels that begin before the one before them is over each gather would cost five microseconds
        named = None if self.tables is None else self.tables[:, batch.tokens].unbind()
        tapped: dict[int, Tensor] = {}
        reading: Reading | None = None
        for i, block in enumerate(self.blocks):
            given = None if named is None or block.feed.table is None else named[i]
            x, reading = block.run(x, reading, self.memory, i, batch, given, *self.blocks[i + 1 : i + 2])
            if i in taps:
                tapped[i] = x.mean(1)
        wanted = self.last(x[batch.out_rows])
        return x.flatten(1), wanted, [tapped[i] for i in taps]
