"""What the engine asks of a model: one forward over a ragged batch, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.gguf import GGUFFile
from pyspec.models.gathered import Gathered, shared
from pyspec.models.layers import AttentionShape
from pyspec.models.wants import Want
from pyspec.models.weights import Matrix, Weights
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
    head    of several ranks, as long as the logits are the columns of this one alone: what brings all together
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None
    best: Tensor | None = None
    head: Gathered | None = None

    def whole(self, reads: LogitsNeed = ALL) -> Out:
        """The same with the logits of all ranks, which all have to ask for; or with none, where nobody reads more than `best`."""
        if self.head is None:
            return self
        if reads.logits:
            return replace(self, logits=self.head.together(self.logits), head=None)
        best = self.head.best_but(self.logits, reads.bans) if reads.bans else self.best
        return replace(self, logits=self.head.left_out(self.logits), best=best, head=None)


def out_of(output: Matrix, wanted: Tensor, hidden: Tensor, taps: Tensor | None) -> Out:
    """Results whose logits are those of the rows `wanted`. Of several ranks they are this one's columns, as far as `whole` is not asked for."""
    head = shared(output)
    if head is None:
        return Out(output(wanted), hidden, taps)
    columns = head.own(wanted)
    return Out(columns, hidden, taps, head.best(columns), head)


class ModelConfig(Protocol):
    """What an architecture's module reads from a file: all that is known of a model before anything is allocated."""

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
    def attention(self) -> AttentionShape: ...

    def parts(self) -> list[LayerParts]:
        """What each trunk layer keeps for its slots."""
        ...

    def scratch_bytes(self, n_row: int, n_token: int, kv: torch.dtype, device: torch.device) -> int:
        """What a forward of `n_row` rows takes while it runs beside what every model does, contexts having up to `n_token` tokens."""
        ...

    def tensors(self, file: GGUFFile) -> dict[str, Want]:
        """The tensors that the trunk needs."""
        ...

    def share(self, n: int) -> ModelConfig:
        """What each of `n` ranks runs and keeps."""
        ...

    def build(self, weights: Weights, memory: Memory) -> Target:
        """The model, bound to its memory."""
        ...


class Target(Protocol):
    """The model that decides. It never knows who drafts; it exports taps and hidden states when asked.

    memory  what its layers keep for the slots
    output  the matrix behind `head`, of which each of several ranks has a part
    ranks   the processes that run it together, with this one among them; None: this one alone
    lead    what the first of several ranks has its forwards go through
    """

    memory: Memory
    output: Matrix
    lead: Lead | None

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
    def captures_prompts(self) -> bool:
        """Whether a CUDA graph may hold the forward of a prompt that stands alone."""
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
    """What the first of several ranks has its forwards go through: the others run them as well."""

    def forward(self, run: Callable[[Batch, Sequence[int]], Out], batch: Batch, taps: Sequence[int]) -> Out:
        """`run(batch, taps)` on every rank."""
        ...
