"""The contract of a bound model: its forward over a ragged batch, and its MTP block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.rows.ref import Prep
from pyspec.models.model import ModelSpec
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory
from pyspec.slots.round import ALL, LogitsNeed


@dataclass(frozen=True, slots=True)
class Out:
    """Results of a forward.

    logits  [out, vocab]      f32  for the batch's `out_rows`
    hidden  [row, n_hidden]   f32  after the final norm, every row (the MTP seed); not normed where `Residual` says so; of several streams all, not normed
    taps    [row, T * n_embd] f32  outputs of the asked layers, side by side, before the next layer's norm; or None
    best    [2, out]          f64  each row's largest logit's token (the lowest on ties) and value; or None
    head    of several ranks, while the logits are the columns of this rank alone: the results with those of all (`Gathered.whole`)
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None
    best: Tensor | None = None
    head: Callable[[Out, LogitsNeed], Out] | None = None

    def whole(self, reads: LogitsNeed = ALL) -> Out:
        """The same with the logits of all ranks, a call that every rank makes; or without logits if `reads` needs only `best`."""
        return self if self.head is None else self.head(self, reads)


Lead = Callable[[Callable[[Batch, Sequence[int]], Out], Batch, Sequence[int]], Out]
"""(this rank's part of a forward, batch, taps) -> the results of all ranks."""


class Matrix(Protocol):
    """y = prep(x) W^T + residual for a weight [out, in]: x [row, in] f32 -> [row, out] f32.

    Preparation (norms, gates) and residual are arguments because kernels do them on the way. A gated matrix gives
    silu(gate) * up.
    """

    def __call__(
        self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None
    ) -> Tensor: ...


class OwnTokens(Protocol):
    """Tokens of a block's own vocabulary. to_target: the target's for each, int64; None: they are the same."""

    to_target: Tensor | None


class MtpNet(Protocol):
    """One step of a chain, over keys and values of its own.

    n_hidden   width of the hidden states that it takes; 0: it takes none, and reads tokens alone
    first_key  position of the first row that others see: 1 where row 0, which has no hidden state, is no context
    best       maps its tokens to the target's
    """

    n_hidden: int
    first_key: int
    memory: Memory

    @property
    def best(self) -> OwnTokens: ...

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


class Target(Protocol):
    """The model that decides. It knows no drafter; it exports taps and hidden states when asked.

    memory  of its layers, for the slots
    output  the matrix behind `head`, of which each of several ranks has a part
    ranks   the processes that run it together, with this one among them; None: this one alone
    lead    on the first of several ranks: runs a forward of each rank's part, on all of them
    """

    memory: Memory
    output: Matrix
    lead: Lead | None

    @property
    def config(self) -> ModelSpec: ...
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
