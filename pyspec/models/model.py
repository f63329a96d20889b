"""A model as data: embedding, blocks, head, and the numbers of its file, over which plans are folds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pyspec.gguf import GGUFFile
from pyspec.models.block import BlockSpec
from pyspec.models.cuts import Cut, Units
from pyspec.models.mtp import HEAD_NORM, MtpOfBlock
from pyspec.models.part import AttentionShape, Place
from pyspec.models.per_layer import PerLayer
from pyspec.models.residual import Residual
from pyspec.models.wants import EMBEDDING, HEAD, Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as its architecture's module reads it from a file, checked, before anything is allocated.

    n_nextn      MTP blocks that the metadata announces
    n_ff         inner values of a row; with experts, those of all that it uses
    blocks       of the trunk
    mtp_block    the block behind the trunk, where the architecture has one
    mtp_more     the blocks behind that one, where each drafts one token more
    mtp_norm     the norm before that block's head
    residual     one stream or several
    per_layer    inputs of each block besides the stream
    last_norm    the name of the norm before the head; "": there is none
    ties_head    a file without a head has the embedding for it
    embed_factor  the embedding's rows are multiplied with it
    logit_factor  logits are multiplied with it
    final_cap    c: logits are c tanh(logits / c); 0: as they are
    sees_pictures  blocks in which rows of a picture see all of it: "", "near" (those with a window), "all"
    n_deep       parts of a picture's rows behind the first one, which are added behind the first blocks
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_nextn: int = 0
    n_ff: int
    n_ctx_train: int
    eps: float
    blocks: tuple[BlockSpec, ...]
    mtp_block: BlockSpec | None = None
    mtp_more: tuple[BlockSpec, ...] = ()
    mtp_norm: str = HEAD_NORM
    residual: Residual = Residual()  # noqa: RUF009 - frozen
    per_layer: PerLayer | None = None
    last_norm: str = "output_norm.weight"
    ties_head: bool = True
    embed_factor: float = 1.0
    logit_factor: float = 1.0
    final_cap: float = 0.0
    sees_pictures: Literal["", "near", "all"] = ""
    n_deep: int = 0

    @property
    def picture_width(self) -> int:
        """Numbers of a picture's row."""
        return (1 + self.n_deep) * self.n_embd

    @property
    def n_layer(self) -> int:
        """Blocks of the trunk."""
        return len(self.blocks)

    @property
    def n_hidden(self) -> int:
        """Width of the hidden states that an MTP block reads."""
        return self.residual.of_mtp.n * self.n_embd

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """The distinct shapes of attention."""
        return tuple(dict.fromkeys(shape for block in self.blocks for shape in block.attention))

    @property
    def mtp(self) -> MtpOfBlock | None:
        """The MTP block with its projections and norms, and those behind it; None: the architecture has none."""
        if self.mtp_block is None:
            return None
        own = self.n_layer, self.n_vocab, self.n_embd, self.eps, self.mtp_norm, self.mtp_more
        return MtpOfBlock(self.mtp_block, self.residual.of_mtp, *own)

    def place(self, file: GGUFFile, i: int) -> Place:
        """Of block `i`."""
        return Place(file, f"blk.{i}", self.n_embd, self.eps)

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The tensors that the trunk needs."""
        wants = {
            EMBEDDING: Want((self.n_vocab, self.n_embd)),
            **({self.last_norm: Want((self.n_embd,))} if self.last_norm else {}),
            HEAD: Want(
                (self.n_vocab, self.n_embd),
                self.ties_head,
                cut=Cut(0, (Units(self.n_vocab, "tokens", uneven=True),)),
            ),
            **self.residual.tensors(self.n_embd),
            **({} if self.per_layer is None else self.per_layer.tensors()),
        }
        for i, block in enumerate(self.blocks):
            wants |= block.tensors(self.place(file, i))
        return wants

    def parts(self) -> list[LayerParts]:
        """Memory of each trunk layer for its slots."""
        return [block.memory() for block in self.blocks]

    def share(self, n: int) -> ModelSpec:
        """The model of each of `n` ranks: a share of the heads, states and inner widths of every block. The stream keeps its width."""
        if n == 1:
            return self
        blocks = tuple(block.share(n) for block in self.blocks)
        return replace(self, n_ff=-(-self.n_ff // n), blocks=blocks)

    def of_file(self, file: GGUFFile) -> ModelSpec:
        """The model with the sizes of blocks of this file's types, where shares of its parts depend on them."""
        blocks = tuple(block.of_file(self.place(file, i)) for i, block in enumerate(self.blocks))
        return replace(self, blocks=blocks)
