"""The contract of a model: its specification before a load, its forward over a ragged batch, and its MTP block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.cuda.collective import Collective
from pyspec.gguf import GGUFFile
from pyspec.models.gathered import Gathered, shared
from pyspec.models.matrices import Matrix
from pyspec.models.own_vocabulary import BestDrafts
from pyspec.models.part import AttentionShape, LoadTypes, Request
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.parts import LayerParts
from pyspec.slots.round import ALL, LogitsNeed


@dataclass(frozen=True, slots=True)
class Out:
    """Results of a forward.

    logits  [out, vocab]      f32  for the batch's `out_rows`
    hidden  [row, n_hidden]   f32  after the final norm, every row (the MTP seed); of several residual streams all, not normed
    taps    [row, T * n_embd] f32  outputs of the asked layers, side by side, before the next layer's norm; or None
    best    [2, out]          f64  each row's largest logit's token (the lowest on ties) and value; or None
    head    of several ranks, while the logits are the columns of this rank alone: brings all of them together
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None
    best: Tensor | None = None
    head: Gathered | None = None

    def whole(self, reads: LogitsNeed = ALL) -> Out:
        """The same with the logits of all ranks, a call that every rank makes; or without logits if `reads` needs only `best`."""
        if self.head is None:
            return self
        if reads.logits:
            return replace(self, logits=self.head.together(self.logits), head=None)
        best = self.head.best_but(self.logits, reads.bans) if reads.bans else self.best
        return replace(self, logits=self.head.left_out(self.logits), best=best, head=None)


@dataclass(frozen=True, slots=True)
class Bend:
    """What happens to logits behind the head: a factor, then c tanh(logits / c) unless c is 0."""

    factor: float = 1.0
    cap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        return tensors.capped(tensors.scaled(logits, self.factor), self.cap)


def out_of(output: Matrix, wanted: Tensor, hidden: Tensor, taps: Tensor | None, bent: Bend) -> Out:
    """Results whose logits are those of the rows `wanted`, bent. Of several ranks they are this one's columns until `whole` is called."""
    head = shared(output)
    if head is None:
        return Out(bent(output(wanted)), hidden, taps)
    columns = bent(head.own(wanted))
    return Out(columns, hidden, taps, head.best(columns), head)


class MtpNet(Protocol):
    """One step of a chain, over keys and values of its own.

    n_hidden   width of the hidden states that it takes; 0: it takes none, and reads tokens alone
    first_key  position of the first row that others see: 1 where row 0, which has no hidden state, is no context
    best       maps its tokens to the target's
    """

    n_hidden: int
    first_key: int
    memory: Memory
    best: BestDrafts

    def forward(self, batch: Batch, hidden: Tensor) -> Tensor:
        """hidden [row, n_hidden] f32: h_{p-1} of each row -> that of each row's own position, the same shape if it takes any."""
        ...

    def propose(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The best next token of each hidden state that `forward` made, into `out` [row] int64: ids of the target's vocabulary.

        Returns the logits [row, n] that they are the best of, in the block's own vocabulary.
        """
        ...

    def states_of(self, out: Out) -> Tensor:
        """The exact hidden states [row, n_hidden] of a target's forward. They are kept for rounds to come."""
        ...


class MtpSpec(Protocol):
    """An MTP block as data."""

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Shapes of its attention."""
        ...

    def tensors(self, file: GGUFFile, target: GGUFFile) -> dict[str, Want]:
        """The tensors that it needs of `file`, which is the target's or one of its own. PairError where it can not stand there."""
        ...

    def layers(self) -> tuple[LayerParts, ...]:
        """Memory of each layer for its slots; the trunk's layers have none."""
        ...

    def shared(self, file: GGUFFile, target: GGUFFile) -> tuple[str, ...]:
        """Tensors that the file has byte by byte as the target: they are loaded once."""
        ...

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        """The ops that binding it asks for, products apart."""
        ...

    def bind(
        self,
        weights: Weights,
        memory: Memory,
        target: Target,
        head: Matrix | None,
        skips: tuple[str, ...],
    ) -> MtpNet:
        """head: stands for the target's if it is given. skips: the result of `shared`."""
        ...


class ModelConfig(Protocol):
    """A model as its architecture's module reads it from a file, before anything is allocated.

    n_layer    blocks of the trunk; n_nextn: MTP blocks that the metadata announces
    n_ff       inner values of a row
    n_hidden   width of the hidden states that an MTP block reads
    attention  the distinct shapes of attention over pages
    mtp        the MTP block behind the trunk; None: the architecture has none
    captures_prompts  a CUDA graph may hold the forward of a prompt that stands alone, kernels permitting
    """

    @property
    def arch(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_nextn(self) -> int: ...
    @property
    def n_ff(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def n_hidden(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def attention(self) -> tuple[AttentionShape, ...]: ...
    @property
    def mtp(self) -> MtpSpec | None: ...
    @property
    def captures_prompts(self) -> bool: ...

    def parts(self) -> list[LayerParts]:
        """Memory of each trunk layer for its slots."""
        ...

    def scratch_bytes(self, file: GGUFFile, on: LoadTypes, n_row: int, n_token: int) -> int:
        """Bytes that a forward of `n_row` rows takes while it runs, beyond those that every model takes; contexts have up to `n_token` tokens."""
        ...

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The tensors that the trunk needs."""
        ...

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        """The ops that a load of the trunk asks for, products and the embedding apart."""
        ...

    def share(self, n: int) -> ModelConfig:
        """The model of each of `n` ranks."""
        ...

    def build(self, weights: Weights, memory: Memory) -> Target:
        """The model, bound to its memory."""
        ...


class Target(Protocol):
    """The model that decides. It knows no drafter; it exports taps and hidden states when asked.

    memory  of its layers, for the slots
    output  the matrix behind `head`, of which each of several ranks has a part
    ranks   the processes that run it together, with this one among them; None: this one alone
    lead    the way of a forward on the first of several ranks
    """

    memory: Memory
    output: Matrix
    lead: Lead | None

    @property
    def config(self) -> ModelConfig: ...
    @property
    def ranks(self) -> Collective | None: ...

    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold a forward."""
        ...

    @property
    def most_captured_prompt(self) -> int:
        """Rows of the longest prompt whose forward a CUDA graph may hold, if it stands alone; 0: none."""
        ...

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """`taps` are 0-based layer indices whose outputs are wanted."""
        ...

    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """This rank's part of one, if there are several: its logits are not brought together yet."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [row] int64 -> [row, n_embd] f32. Drafters share it."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [row, n_embd] f32, normed -> logits [row, n_vocab] f32. Drafters share it."""
        ...


class Lead(Protocol):
    """Runs the forwards of the first of several ranks on the others, too."""

    def forward(
        self, run: Callable[[Batch, Sequence[int]], Out], batch: Batch, taps: Sequence[int]
    ) -> Out:
        """`run(batch, taps)` on every rank."""
        ...
