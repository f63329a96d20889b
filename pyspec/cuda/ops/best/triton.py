"""`best` in Triton: rows are cut into parts, as many as keep all multiprocessors at work; a second launch has the best of them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.best.ref import BestSpec, IntoMemory

COLUMNS = 1024  # of a step
PER_SM = 4  # programs of a multiprocessor that a launch has about
MAX_PARTS = 128
MAX_ROWS = 32768  # of a launch
MAX_VOCAB = 1 << 30


class BestTriton(IntoMemory):
    def __init__(self, device: torch.device) -> None:
        self.n_sm = tri.n_multiprocessor(device)
        self.none = torch.zeros(1, dtype=torch.int64, device=device)

    def _run(self, logits: Tensor, tokens: Tensor | None, pairs: Tensor | None) -> None:
        from pyspec.cuda.ops.best import triton_kernels as kernels

        logits, (n_row, n_vocab) = logits.contiguous(), logits.shape
        assert logits.dtype == torch.float32 and 0 < n_vocab <= MAX_VOCAB
        for first in range(0, n_row, MAX_ROWS):
            n = min(MAX_ROWS, n_row - first)
            n_part = max(1, min(-(-n_vocab // COLUMNS), MAX_PARTS, PER_SM * self.n_sm // n))
            found, own = torch.empty(n, n_part, dtype=torch.int64, device=logits.device), logits[first:]
            tri.launch(
                kernels.best_of_parts, (n_part, n), (own, found, n_vocab, n_part), {"N": COLUMNS}, 4
            )
            into = (
                self.none if tokens is None else tokens[first:],
                self.none if pairs is None else pairs.view(-1)[first:],
            )
            constants = {"PARTS": MAX_PARTS, "HAS_PAIRS": pairs is not None}
            tri.launch(
                kernels.best_of_rows, (n,), (own, found, *into, n_vocab, n_part, n_row), constants, 1
            )


_launch = per_device(BestTriton)


def bind(spec: BestSpec) -> BestTriton:
    """One for all of a device, and quickly: every round asks."""
    return _launch(spec.device)
