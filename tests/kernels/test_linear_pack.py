"""Repacking loses nothing: what comes back equals the file's weights bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.kernels.dequant_ref import dequantize
from pyspec.cuda.kernels.linear_pack import CHUNKS, interleave, packed_bytes, repack, unpack
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType


def random_blocks(type: GGMLType, n_out: int, n_in: int, seed: int = 0) -> Tensor:
    """[n_out, row_bytes] uint8: random codes and scales, the half floats finite."""
    gen = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n_out, n_in // type.block_size, type.type_size), generator=gen, dtype=torch.uint8)
    layout = type.layout
    assert layout is not None
    for name in ("d", "dmin"):
        if hasattr(layout, name):
            at = getattr(layout, name).offset
            half = (torch.rand(*blocks.shape[:2], 1, generator=gen) * 0.02).half()
            blocks[..., at : at + 2] = half.view(torch.uint8)
    return blocks.view(n_out, -1)


@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 256), (300, 512), (48, 1024), (513, 256), (1, 2048)])
def test_unpacked_weights_equal_the_files(type: GGMLType, n_out: int, n_in: int) -> None:
    raw = random_blocks(type, n_out, n_in)
    packed = repack(raw, type, (n_out, n_in))
    assert torch.equal(unpack(packed), dequantize(raw, type, (n_out, n_in)))


@pytest.mark.parametrize("n_in", [32, 64, 96, 160, 2688])
def test_columns_that_fill_no_chunk_are_padded(n_in: int) -> None:
    for type in (GGMLType.Q8_0, GGMLType.Q4_0):
        raw = random_blocks(type, 40, n_in)
        assert torch.equal(unpack(repack(raw, type, (40, n_in))), dequantize(raw, type, (40, n_in)))


@pytest.mark.parametrize("type", CHUNKS)
def test_large_matrices_grow_by_less_than_three_percent(type: GGMLType) -> None:
    for n_out, n_in in ((5120, 17408), (16480, 5120), (34816, 5120)):
        raw = n_out * n_in // type.block_size * type.type_size
        assert raw <= packed_bytes(type, n_out, n_in) <= 1.03 * raw


def test_large_matrices_are_repacked_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(GGMLType.Q8_0, 800, 64)
    whole = repack(raw, GGMLType.Q8_0, (800, 64)).data
    monkeypatch.setattr("pyspec.cuda.kernels.linear_pack._SLICE", 1)
    assert torch.equal(repack(raw, GGMLType.Q8_0, (800, 64)).data, whole)


def test_gate_and_up_alternate_by_eight_rows() -> None:
    gate, up = torch.zeros(24, 34, dtype=torch.uint8), torch.ones(24, 34, dtype=torch.uint8)
    assert interleave(gate, up)[:, 0].view(3, 2, 8).float().mean(2).tolist() == [[0.0, 1.0]] * 3


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="has 1088 bytes, got 1089"):
        repack(torch.zeros(1089, dtype=torch.uint8), GGMLType.Q8_0, (16, 64))
    with pytest.raises(ModelError, match="Q2_K can not be repacked"):
        repack(torch.zeros(84, dtype=torch.uint8), GGMLType.Q2_K, (1, 256))
