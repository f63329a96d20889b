"""The layers of a DFlash drafter, bound: they make context rows of taps, and run blocks; the head gives the drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from pyspec.cpu.tensors import next_positions
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.draft.dflash_file import DFlashConfig
from pyspec.draft.draws import Drawing, Draws
from pyspec.models.binding import Pass, bound_at
from pyspec.models.blocks.attention import Attention
from pyspec.models.blocks.convolved import Convolved
from pyspec.models.bound import Block, BoundForward, link_sums
from pyspec.models.gathered import Gathered
from pyspec.models.own_vocabulary import BestDrafts, read_d2t
from pyspec.models.part import PartSpec
from pyspec.models.residual import Residual
from pyspec.models.ropes import Angles, Ropes
from pyspec.models.streams import bound_block
from pyspec.models.target import Matrix, Target
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory

PIECE = 64  # rows whose probabilities are found at once: they need as much memory as their logits


class DFlashNet:
    """The drafter's layers bound to their context memory; `head` stands for the target's if it is given.

    find_best  finds best tokens on several ranks together, by the target's head; None: `head` is read here
    parts      the target's head, where ranks divide this drafter: each reads its part of it
    """

    def __init__(
        self, c: DFlashConfig, w: Weights, memory: Memory, target: Target, head: Matrix | None = None
    ) -> None:
        self.c = c
        self.memory = memory
        self.n_feature = len(c.taps) * target.n_embd
        self.ropes = Ropes(w)
        self.blocks: list[Any] = [
            bound_block(
                self._residual(),
                spec,
                bound_at(w, f"blk.{i}", i, c.n_embd, c.eps, memory.kv_format, self.ropes),
            )
            for i, spec in enumerate(c.blocks)
        ]
        if w.ranks is not None:
            link_sums(w.ranks, [block for block in self.blocks if isinstance(block, Block)])
        self._bind_context(w)
        self.fc, self.fc_norm = w.matrix("fc.weight"), w.vector("enc.output_norm.weight")
        self.norm = w.vector("output_norm.weight")
        self.norms = norms.bind(NormsSpec(w.device, c.n_embd, c.eps))
        self.embed = w.embedding("token_embd.weight") if w.has("token_embd.weight") else target.embed
        has_head = w.has("output.weight")
        self.head = w.matrix("output.weight") if has_head else head or target.head
        self.find_best: Callable[[Tensor], Tensor] | None = None
        self.parts: Gathered | None = None
        self.best = BestDrafts(w.device, read_d2t(w, target.n_vocab))
        self.drawing = Drawing.of(target.n_vocab, self.best.to_target, w.device)

    def _residual(self) -> Residual:
        """Of its blocks."""
        return Residual()

    def _bind_context(self, w: Weights) -> None:
        """Keys and values of context rows are made with the layers' own weights."""
        c, kv = self.c, self.memory.kv_format
        self.context = [
            BoundForward(
                attention_in(block.specs[0]).write,
                bound_at(w, f"blk.{i}", i, c.n_embd, c.eps, kv, self.ropes),
                *(c.n_embd, 1),
            )
            for i, block in enumerate(c.blocks)
        ]

    def inject(self, taps: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Context keys and values of committed tokens: taps [row, T * n_target], pool rows [row], positions [row]."""
        angles = self.ropes.angles(positions)  # first: the kernels behind it start early
        self._write(self.norms(self.fc(taps), self.fc_norm), angles, rows, positions)

    def _write(self, c: Tensor, angles: tuple[Angles, ...], rows: Tensor, positions: Tensor) -> None:
        """Keys and values of context rows c [row, n_embd]."""
        run = Pass(angles, self.memory, cast(Batch, None))  # rows are given
        for write in self.context:
            write.run(c, rows, run)

    def forward(self, batch: Batch) -> Tensor:
        """The block rows of `batch` (laid out with see_block) -> [row, n_embd] after the final norm."""
        x, whole, causal = self._given(batch)
        for block, is_causal in zip(self.blocks, self.c.causal, strict=True):
            x = block.run(x, causal if is_causal else whole)
        return self.norms(x, self.norm)

    def _given(self, batch: Batch) -> tuple[Tensor, Pass, Pass]:
        """The rows of a block's tokens, and what its layers read: of those that see all of the block, and of causal ones."""
        x, angles = self.embed(batch.tokens), self.ropes.angles(batch.positions)
        whole = Pass(angles, self.memory, batch)
        if not any(self.c.causal):
            return x, whole, whole
        return x, whole, replace(whole, batch=replace(batch, hi=next_positions(batch.positions)))

    def drafts(
        self, block: Tensor, n_draft: int, anchors: Tensor, *, tells: bool, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The target's tokens that blocks stand for, [seq * n_draft] int64, and the probability of each row's likeliest, [seq * n_draft] f32.

        block    [seq, row, n_embd] f32 of `forward`
        anchors  [seq] int64
        tells    the probabilities are wanted; else there may be none
        draws    the tokens are drawn; None: they are the likeliest
        """
        rows = block[:, 1 : 1 + n_draft].flatten(0, 1)  # row 0 is the anchor, whose output means nothing
        if self.find_best is not None or self.parts is not None:
            assert not tells and draws is None, "ranks that find the best together have no logits"
            find = self.find_best or self._best_of_parts
            return self.best.mapped(find(rows)), None
        logits = self.head(rows)
        best = self.best(logits)
        tokens = best if draws is None else draws.block(logits, best)
        if not tells:
            return tokens, None
        pieces = [piece.softmax(-1).amax(-1) for piece in logits.split(PIECE)]
        return tokens, torch.cat(pieces)

    def _best_of_parts(self, rows: Tensor) -> Tensor:
        """[row] int64: the best token of each row [row, n_embd], which every rank has."""
        assert self.parts is not None
        return self.parts.best(self.parts.own(rows.contiguous()))[0].long()


def attention_in(part: PartSpec) -> Attention:
    """The attention of a layer's first part."""
    part = part.part if isinstance(part, Convolved) else part
    assert isinstance(part, Attention)
    return part
