"""The best token of each row. Reference in plain torch.

The largest logit counts, the lowest column of equal ones (both zeros are equal), and a NaN counts as larger than all else,
the first one of several. Its value is the logit itself, NaN included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 128  # divides the usual vocabulary sizes


@dataclass(frozen=True, slots=True)
class BestSpec:
    """For any number of rows and columns, so drafters and targets of all vocabularies share one launch."""

    device: torch.device


class Best(Protocol):
    """The launch that the op binds. logits [row, n_vocab] f32, with one column at least."""

    def tokens(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """[row] int64, contiguous; in `out` if it is given."""
        ...

    def pairs(self, logits: Tensor) -> Tensor:
        """[2, row] f64: tokens, then their logits, to be read by the host in one copy. Ids are exact in f64."""
        ...


def argmax(logits: Tensor) -> Tensor:
    """Index of each row's largest value, the lowest one on ties; a NaN counts as largest. [row, vocab] -> [row] int64

    torch.argmax documents the first index on ties (held on an H200 too). On the CPU it runs without SIMD; maxima of blocks
    first take 1.5 ms for 64 rows of 248,320 there instead of 20.
    """
    if logits.is_cuda or logits.shape[1] % _BLOCK:
        return logits.argmax(-1)
    best = logits.unflatten(1, (-1, _BLOCK)).amax(-1).argmax(-1)
    block = (
        logits.unflatten(1, (-1, _BLOCK)).gather(1, best[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    )
    return best * _BLOCK + block.argmax(-1)


class IntoMemory(ABC):
    """Implements `Best` by a kernel that writes into memory."""

    @abstractmethod
    def _run(self, logits: Tensor, tokens: Tensor | None, pairs: Tensor | None) -> None:
        """Write the tokens [row], the pairs [2, row], or both."""

    def _empty(self, logits: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    def tokens(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        out = self._empty(logits, len(logits), dtype=torch.int64) if out is None else out
        assert out.dtype == torch.int64 and out.is_contiguous() and out.shape == logits.shape[:1]
        self._run(logits, out, None)
        return out

    def pairs(self, logits: Tensor) -> Tensor:
        out = self._empty(logits, 2, len(logits), dtype=torch.float64)
        self._run(logits, None, out)
        return out


class TorchBest:
    """Implements `Best`."""

    def tokens(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        found = argmax(logits)
        return found if out is None else out.copy_(found)

    def pairs(self, logits: Tensor) -> Tensor:
        tokens = argmax(logits)
        return torch.stack([tokens.double(), logits.gather(1, tokens[:, None]).squeeze(1).double()])


def bind(spec: BestSpec) -> TorchBest:
    return TorchBest()
