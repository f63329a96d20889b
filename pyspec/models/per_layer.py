"""Inputs of each block for each token, besides the stream: a second embedding, and a product of the first (Gemma's E models).

    inputs = (norm(product(x) / sqrt(n_embd)) + table[token] sqrt(n)) / sqrt(2)

x is the row of the embedding that the stream begins with. A block has n numbers of a token; the norm is over each block's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.models.wants import TOKEN_INPUTS, Want

PRODUCT, NORM = "per_layer_model_proj.weight", "per_layer_proj_norm.weight"


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Inputs of `n_layer` blocks, `n` numbers each, of a model of this width and eps."""

    n_layer: int
    n: int
    n_vocab: int
    n_embd: int
    eps: float

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.n_layer * self.n

    def tensors(self) -> dict[str, Want]:
        return {
            TOKEN_INPUTS: Want((self.n_vocab, self.width)),
            PRODUCT: Want((self.width, self.n_embd)),
            NORM: Want((self.n,)),
        }
