"""A model bound to its memory, of any residual stream: embedding, trunk, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pyspec.cpu import tensors
from pyspec.models.target import Lead, ModelConfig, Out, capped, out_of
from pyspec.models.weights import EMBEDDING, Matrix, Weights
from pyspec.slots.batch import Batch
from pyspec.slots.memory import Memory


class BoundModel(ABC):
    """The parts of `Target` that all models share. A subclass binds its trunk, then `output`, so that a file is read in its order.

    factor  multiplies the embedding's rows
    cap     of the logits; 0: none
    """

    output: Matrix

    def __init__(
        self, config: ModelConfig, weights: Weights, memory: Memory, factor: float = 1.0, cap: float = 0.0
    ) -> None:
        self.config: ModelConfig = config
        self.memory = memory
        self.device = weights.device
        self.ranks = weights.ranks
        self.cap = cap
        self.lead: Lead | None = None
        self.embedding = weights.embedding(EMBEDDING, factor)

    @abstractmethod
    def trunk(self, batch: Batch, taps: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(hidden states of all rows, normed rows that logits are wanted of, outputs of the tapped layers)."""

    @property
    def n_vocab(self) -> int:
        return self.config.n_vocab

    @property
    def n_embd(self) -> int:
        return self.config.n_embd

    @property
    def n_layer(self) -> int:
        return self.config.n_layer

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return capped(self.output(hidden), self.cap)

    def forward(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        if self.lead is not None:
            return self.lead.forward(self.run, batch, taps)
        return self.run(batch, taps).whole()

    @torch.inference_mode()
    def run(self, batch: Batch, taps: Sequence[int] = ()) -> Out:
        """A forward of this rank; `forward` has the others run theirs."""
        hidden, wanted, tapped = self.trunk(batch, taps)
        return out_of(self.output, wanted, hidden, tensors.side_by_side(tapped) if taps else None, self.cap)
