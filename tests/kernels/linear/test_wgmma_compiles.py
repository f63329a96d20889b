"""linear_wgmma compiles for Hopper without a GPU, and its rows are laid out as its text says."""

from __future__ import annotations

import pytest
import torch

from pyspec.cuda.jit import compile_cubin
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import PADS, blocks_for_wgmma, defines, limits, shared_bytes, stages
from pyspec.gguf import GGMLType


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize("pad", PADS)
def test_every_type_and_size_fits_a_multiprocessor(type: GGMLType, pad: int) -> None:
    """640 threads start with 96 registers each; the computing ones then take more, and few may spill in the epilogue."""
    assert min(stages(type, pad)) >= 2
    epilogue = Epilogue(pad // 32 % 3)
    code = compile_cubin("linear_wgmma", "sm_90a", defines(type, pad, epilogue), use_cache=False)
    found = code.resources["linear_wgmma"]
    assert found.registers * 640 <= 65536 and found.spill_bytes <= 512
    assert shared_bytes(type, pad) + found.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("n_row", [1, 33, 64])
def test_rows_lie_where_the_text_says(n_row: int) -> None:
    n_in, pad = 320, 64
    x = torch.randn(n_row, n_in).half()
    blocks = blocks_for_wgmma(x, pad)
    want = torch.zeros(512 // 64 * pad * 64, dtype=torch.float16)
    for block in range(n_in // 64):
        for place in range(64):
            s, h, t, e = place // 16, place // 8 % 2, place // 2 % 4, place % 2
            for n in range(n_row):
                at = (block * pad + n) * 64 + ((place // 8) ^ (n % 8)) * 8 + place % 8
                want[at] = x[n, block * 64 + 16 * s + 4 * t + 2 * h + e]
    assert torch.equal(blocks, want)


def test_a_cpu_is_refused_with_a_reason() -> None:
    assert limits(LinearSpec(torch.device("cpu"), GGMLType.Q8_0, 64, 64)) == "runs on NVIDIA GPUs only"
