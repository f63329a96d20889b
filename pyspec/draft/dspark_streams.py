"""DSpark over DeepSeek-V4's layers: a block's rows go through several residual streams, over one key a token that is its value, too.

A context key is made of the taps of its token as a key of the block is made of a row. The window counts tokens from each row, as in
llama.cpp; the checkpoint's own code lets all rows of a block see what its first one sees, which differs by as many rows as a block has
at most. The confidence head reads the merged streams before the last norm. Sources: llama.cpp `dflash` (layout), DeepSpec (training).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from pyspec.draft.dflash_file import MARKOV
from pyspec.draft.dspark_heads import SURE, DSparkConfig, DSparkNet
from pyspec.errors import PairError
from pyspec.gguf import GGUFFile
from pyspec.models.arch.deepseek4 import read_experts, read_mixer, read_residual, stream_block
from pyspec.models.binding import Pass, bound_at
from pyspec.models.block import BlockSpec
from pyspec.models.blocks.sparse_attention import SparseAttention
from pyspec.models.blocks.stream_experts import StreamExperts
from pyspec.models.bound import BoundForward
from pyspec.models.read import block_count, read_limits
from pyspec.models.residual import HEAD_MIX, Residual
from pyspec.models.rope import RopeSpec
from pyspec.models.ropes import Angles
from pyspec.models.streams import BoundStreams, bound_residual
from pyspec.models.target import Matrix, Target
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


@dataclass(frozen=True, kw_only=True)
class StreamsConfig(DSparkConfig):
    """feeds: the experts of each layer, with their limits."""

    mixer: SparseAttention
    feeds: tuple[StreamExperts, ...]
    residual: Residual

    @property
    def divides(self) -> bool:
        """Streams and experts of a drafter run on the first rank."""
        return False

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return tuple(stream_block(self.mixer, feed, self.residual.n) for feed in self.feeds)

    @property
    def row_bytes(self) -> int:
        """With streams, and heads in f32 and f16."""
        heads = self.attention.n_head * self.attention.head_dim
        return super().row_bytes + self.residual.row_bytes(self.n_embd) + 10 * heads

    def layer_tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The manifest of layers and of the mixers behind them."""
        wants = self.residual.tensors(self.n_embd)
        for i, block in enumerate(self.blocks):
            wants |= block.tensors(self.place(file, i))
        return wants


def read_streams(file: GGUFFile) -> StreamsConfig:
    """The configuration of a drafter with these layers; PairError with what is not supported."""
    h, n_layer = file.hparams, block_count(file)
    ratios = h.integers("attention.compress_ratios") if "attention.compress_ratios" in h else ()
    if any(ratios):
        raise PairError(
            f"{h.key('attention.compress_ratios')} of the drafter is {list(ratios[:8])}; layers without compressed rows (0) are supported"
        )
    if n_hash := h.integer("hash_layer_count", 0):
        raise PairError(
            f"tables name the experts of {n_hash} of the drafter's layers; routers are supported"
        )
    mixer, experts = replace(read_mixer(file), in_pages=True), read_experts(file)
    return StreamsConfig(
        n_embd=h.integer("embedding_length"),
        n_ff=experts.n_inner,
        attention=mixer.attends,
        eps=h.number("attention.layer_norm_rms_epsilon"),
        rope=RopeSpec(mixer.rope.n_rot, mixer.rope.base, False),
        block=h.integer("block_size", 16),
        n_trained=h.integer("context_length", 0),
        mask_id=file.fields.integer("tokenizer.ggml.mask_token_id"),
        taps=tuple(x - 1 for x in h.integers("target_layers")),
        windows=(mixer.window,) * n_layer,
        causal=(h.flag("attention.causal", False),) * n_layer,
        alias=_aliases(file),
        rank=file.tensors[MARKOV].shape[-1],
        from_anchor=h.flag("sample_from_anchor", True),
        is_sure=h.flag("has_confidence_head", SURE in file.tensors),
        mixer=mixer,
        feeds=tuple(
            replace(experts, limits=limits) for limits in read_limits(file, n_layer, one_for_both=True)
        ),
        residual=read_residual(file),
    )


def _aliases(file: GGUFFile) -> dict[str, str]:
    """Converters name the head's mixers as the trunk's are named, or as the checkpoint does."""
    names = (f"{{}}_{x}.weight" for x in ("fn", "base", "scale"))
    found = {name.format(HEAD_MIX): name.format("hc_head") for name in names}
    return {} if any(name in file.tensors for name in found) else found


class StreamsNet(DSparkNet):
    """The layers, bound to pages of keys alone. Rows of a block are merged streams, not normed."""

    c: StreamsConfig

    def __init__(
        self, c: StreamsConfig, w: Weights, memory: Memory, target: Target, head: Matrix | None
    ) -> None:
        super().__init__(c, w, memory, target, head)
        residual = bound_residual(c.residual, w, c.n_embd, c.eps, self.norm, self.blocks)
        assert isinstance(residual, BoundStreams)
        self.residual = residual

    def _residual(self) -> Residual:
        return self.c.residual

    def _bind_context(self, w: Weights) -> None:
        c, kv = self.c, self.memory.kv_format
        self.context = [
            BoundForward(
                c.mixer.write,
                bound_at(w, f"blk.{i}", i, c.n_embd, c.eps, kv, self.ropes),
                *(c.n_embd, 1, 1),
            )
            for i in range(len(self.blocks))
        ]

    def _write(self, c: Tensor, angles: tuple[Angles, ...], rows: Tensor, positions: Tensor) -> None:
        run = Pass(angles, self.memory, cast(Batch, None))  # rows are given
        for write in self.context:
            write.run(c, rows, positions, run)

    def forward(self, batch: Batch) -> Tensor:
        """The block rows of `batch` (laid out with see_block) -> [row, n_embd] before the final norm."""
        x, whole, causal = self._given(batch)
        run: Pass = causal if self.c.causal[0] else whole
        streams = self.residual.begin(x)
        for block in self.blocks:
            block.run(streams, run)
        return self.residual.merged(streams.x)

    def _normed(self, rows: Tensor) -> Tensor:
        return self.norms(rows, self.norm)
