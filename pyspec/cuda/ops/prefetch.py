"""Arguments by which a kernel fetches the weights of the next product to L2 (prefetch.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import jit

ARGS = "plii"
MAX_ROWS = 4  # with more rows there is more to do meanwhile
MOST, PIECE = 40 << 20, 2048  # bytes: of all, which is most of an L2 of 50 MB; and at once
NOTHING: list[jit.Arg] = [None, 0, 0, 0]


def prefetch_args(weights: Tensor | None, n_row: int) -> list[jit.Arg]:
    """Arguments of `Prefetch`. weights: as `linear` reads them, each of its CTAs a part from front to back."""
    if weights is None or not 0 < n_row <= MAX_ROWS:
        return NOTHING
    n_share = torch.cuda.get_device_properties(weights.device).multi_processor_count
    share = weights.numel() // n_share // 16 * 16
    return [weights, share, n_share, min(MOST // n_share, share) // PIECE]
