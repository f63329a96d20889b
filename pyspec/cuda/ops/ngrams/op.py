"""`ngrams`: rows of a table by n-grams of token ids, and what they add to several residual streams."""

from __future__ import annotations

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.ngrams import cpu, cuda, ref


def shapes(device: torch.device) -> list[ref.NgramsSpec]:
    """Trigrams of 20 heads over four streams of 2,560 columns."""
    sizes = tuple(1_000_003 + 2 * i for i in range(20))
    offsets = tuple(2_000_000 * i for i in range(20))
    multipliers = (35_184_372_088_833, 17_592_186_044_417, 26_388_279_066_625)
    return [ref.NgramsSpec(device, 3, multipliers, sizes, offsets, 5, 4, 2560, 4, 1e-6)]


ngrams: Op[ref.NgramsSpec, ref.Ngrams] = declared(ref, cuda, cpu, shapes=shapes, in_prompts=False)
