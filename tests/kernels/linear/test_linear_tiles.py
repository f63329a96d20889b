"""Tiles of the Triton kernel: the file's weights, to the bit."""

from __future__ import annotations

import pytest
import torch

from pyspec.cuda.ops.linear.cuda import random_weights
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.linear.pack import packed_bytes
from pyspec.cuda.ops.linear.tiles import FORMATS, tile, untiled
from pyspec.gguf import GGMLType


@pytest.mark.parametrize("n_out", [64, 130])
@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_tiles_hold_the_files_weights_to_the_bit(type: GGMLType, n_out: int) -> None:
    n_in = 512 if type.block_size == 256 else 320 if type is GGMLType.NVFP4 else 288
    raw = random_weights(type, n_out, n_in, torch.Generator().manual_seed(0))
    tiles, want = tile(raw, type, (n_out, n_in)), dequantize(raw.view(-1), type, (n_out, n_in))
    assert torch.equal(untiled(tiles), want)
    assert n_out < 100 or torch.equal(untiled(tiles, 64, 100), want[64:100])
    scales = torch.rand(n_out)
    assert torch.equal(untiled(tile(raw, type, (n_out, n_in), scales)), want * scales[:, None])


@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_tiles_take_what_a_memory_plan_counts(type: GGMLType) -> None:
    """As many as the CUDA kernels' records take."""
    raw = random_weights(type, 256, 512, torch.Generator().manual_seed(0))
    assert tile(
        raw, type, (256, 512), torch.ones(256) if type is GGMLType.NVFP4 else None
    ).n_bytes == packed_bytes(type, 256, 512)
