"""Repacking loses nothing: unpacked weights equal the file's bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear.cuda import HALVES, random_packed
from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.linear.formats import CHUNKS, MXFP4_LARGEST
from pyspec.cuda.ops.linear.pack import interleave, packed_bytes, repack, row_scales, unpack
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType


def random_blocks(type: GGMLType, n_out: int, n_in: int, seed: int = 0) -> Tensor:
    """[n_out, row_bytes] uint8: random codes and scales, the half floats finite."""
    gen = torch.Generator().manual_seed(seed)
    if type in HALVES:
        return quantize(torch.randn(n_out, n_in, generator=gen), type)
    blocks = torch.randint(
        0, 256, (n_out, n_in // type.block_size, type.type_size), generator=gen, dtype=torch.uint8
    )
    layout = type.layout
    assert layout is not None
    for name in ("d", "dmin", "m"):
        if hasattr(layout, name) and getattr(layout, name).size == 2:
            at = getattr(layout, name).offset
            half = (torch.rand(*blocks.shape[:2], 1, generator=gen) * 0.02).half()
            blocks[..., at : at + 2] = half.view(torch.uint8)
    if type is GGMLType.MXFP4:
        blocks[..., 0] %= MXFP4_LARGEST + 1
    return blocks.view(n_out, -1)


@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 256), (300, 512), (48, 1024), (513, 256), (1, 2048)])
def test_unpacked_weights_equal_the_files(type: GGMLType, n_out: int, n_in: int) -> None:
    raw = random_blocks(type, n_out, n_in)
    packed = repack(raw, type, (n_out, n_in))
    assert torch.equal(unpack(packed), dequantize(raw, type, (n_out, n_in)))


@pytest.mark.parametrize("n_in", [32, 64, 96, 160, 2688])
def test_columns_that_fill_no_chunk_are_padded(n_in: int) -> None:
    for type in (t for t in CHUNKS if n_in % t.block_size == 0):
        raw = random_blocks(type, 40, n_in)
        assert torch.equal(unpack(repack(raw, type, (40, n_in))), dequantize(raw, type, (40, n_in)))


@pytest.mark.parametrize("type", CHUNKS)
def test_large_matrices_grow_by_what_their_type_says(type: GGMLType) -> None:
    most = {GGMLType.Q3_K: 1.04, GGMLType.IQ3_XXS: 1.41, GGMLType.IQ2_XXS: 1.61}.get(type, 1.03)
    for n_out, n_in in ((5120, 17408), (16480, 5120), (34816, 5120)):
        raw = n_out * n_in // type.block_size * type.type_size
        assert raw <= packed_bytes(type, n_out, n_in) <= most * raw


@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.NVFP4])
def test_large_matrices_are_repacked_in_slices(type: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(type, 800, 64)
    whole = repack(raw, type, (800, 64)).data
    monkeypatch.setattr("pyspec.cuda.ops.linear.pack._SLICE", 1)
    assert torch.equal(repack(raw, type, (800, 64)).data, whole)


@pytest.mark.parametrize("type", CHUNKS)
def test_what_is_packed_has_the_size_that_is_told(type: GGMLType) -> None:
    for n_out in (1, 255, 257):
        assert repack(random_blocks(type, n_out, 512), type, (n_out, 512)).data.numel() == packed_bytes(
            type, n_out, 512
        )
        assert random_packed(type, n_out, 512, torch.device("cpu")).data.numel() == packed_bytes(
            type, n_out, 512
        )


@pytest.mark.parametrize("type", CHUNKS)
def test_random_bytes_in_place_of_records_are_finite_weights(type: GGMLType) -> None:
    weights = unpack(random_packed(type, 40, 512, torch.device("cpu")))
    assert weights.isfinite().all() and weights.any(1).all()


def test_second_scales_multiply_their_rows() -> None:
    raw, scales = random_blocks(GGMLType.NVFP4, 300, 192), torch.rand(300)
    packed = repack(raw, GGMLType.NVFP4, (300, 192), scales)
    assert torch.equal(row_scales(packed), scales)
    assert torch.equal(unpack(packed), dequantize(raw, GGMLType.NVFP4, (300, 192)) * scales[:, None])
    assert torch.equal(row_scales(repack(raw, GGMLType.NVFP4, (300, 192))), torch.ones(300))


def test_bfloat16_keeps_its_bits_over_the_power_of_two_of_its_row() -> None:
    """Rows of any size, weights down to 2^-32 of the largest; the error of smaller ones is negligible."""
    sizes = torch.tensor([1e-30, 1e-20, 1e-6, 1.0, 3e4, 1e30, 3e38, 0.0])[:, None]
    raw = quantize(
        sizes
        * torch.cat((torch.ones(8, 1), (0.5 + torch.rand(8, 63) / 2) * 2.0 ** -torch.arange(63)), 1),
        GGMLType.BF16,
    )
    got, want = unpack(repack(raw, GGMLType.BF16, (8, 64))), dequantize(raw, GGMLType.BF16, (8, 64))
    assert torch.equal(got[:, :32], want[:, :32]) and got[:-1, 0].all() and not got[-1].any()
    assert ((got - want).abs() <= want.abs().amax(1, keepdim=True) * 2.0**-39).all()


def test_all_scales_of_nvfp4_come_back() -> None:
    raw = torch.full((16, 4, 36), 0x22, dtype=torch.uint8)
    raw[..., :4] = torch.arange(256, dtype=torch.uint8).view(16, 4, 4)
    want = dequantize(raw, GGMLType.NVFP4, (16, 256))
    assert torch.equal(unpack(repack(raw, GGMLType.NVFP4, (16, 256))), want)


def test_scales_no_model_has_are_refused() -> None:
    raw = torch.zeros(16, 17, dtype=torch.uint8)
    raw[3, 0] = MXFP4_LARGEST
    assert float(unpack(repack(raw, GGMLType.MXFP4, (16, 32))).sum()) == 0.0
    raw[5, 0] = 255
    with pytest.raises(ModelError, match=r"an MXFP4 scale of 2\^128"):
        repack(raw, GGMLType.MXFP4, (16, 32))


def test_gate_and_up_alternate_by_eight_rows() -> None:
    gate, up = torch.zeros(24, 34, dtype=torch.uint8), torch.ones(24, 34, dtype=torch.uint8)
    assert interleave(gate, up)[:, 0].view(3, 2, 8).float().mean(2).tolist() == [[0.0, 1.0]] * 3


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="has 1088 bytes, got 1089"):
        repack(torch.zeros(1089, dtype=torch.uint8), GGMLType.Q8_0, (16, 64))
    with pytest.raises(ModelError, match="IQ1_S can not be repacked"):
        repack(torch.zeros(50, dtype=torch.uint8), GGMLType.IQ1_S, (1, 256))
