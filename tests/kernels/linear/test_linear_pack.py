"""Repacking loses nothing: unpacked weights, tiles and codes equal the file's bit for bit, and four-bit copies fit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear import tile_codes
from pyspec.cuda.ops.linear.cuda import HALVES, random_packed, random_weights
from pyspec.cuda.ops.linear.dequant import E2M1, dequantize, quantize
from pyspec.cuda.ops.linear.fit_q4 import TYPES, fit_q4
from pyspec.cuda.ops.linear.formats import CHUNKS, MXFP4_LARGEST
from pyspec.cuda.ops.linear.pack import interleave, packed_bytes, repack, row_scales, unpack
from pyspec.cuda.ops.linear.tiles import FORMATS, TiledFormat, single_places, tile, untiled
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


WORD = 0xFFFFFFFF


def permuted(a: Tensor, b: Tensor, chosen: Tensor) -> Tensor:
    """prmt.b32: each of four bytes is one of eight. None of our selectors asks for a sign."""
    eight, out = a | b << 32, torch.zeros_like(a)
    for i in range(4):
        nibble = chosen >> (4 * i) & 15
        assert not (nibble & 8).any()
        out |= (eight >> (8 * nibble) & 255) << (8 * i)
    return out


def halves(words: Tensor) -> Tensor:
    """[n] words -> [n, 2] f16."""
    return (
        torch.stack((words & 0xFFFF, words >> 16), -1)
        .to(torch.int32)
        .to(torch.int16)
        .view(torch.float16)
    )


def run(text: str, n_out: int, *given: Tensor) -> Tensor:
    """[n, n_out * 2] f16 of n words each."""
    registers = {f"${n_out + i}": word for i, word in enumerate(given)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0)).expand_as(given[0])

    for line in re.sub(r"^{ \.reg [^;]*;|}$", "", text).split(";"):
        if not line.strip():
            continue
        op, rest = line.strip().split(" ", 1)
        to, *args = (x.strip() for x in rest.split(","))
        a = [value(x) for x in args]
        if op == "lop3.b32":
            assert args[3] == "0xEA"
            registers[to] = (a[0] & a[1]) | a[2]
            continue
        made = {
            "mov.b32": lambda a: a[0],
            "and.b32": lambda a: a[0] & a[1],
            "or.b32": lambda a: a[0] | a[1],
            "shl.b32": lambda a: a[0] << a[1],
            "shr.u32": lambda a: a[0] >> a[1],
            "prmt.b32": lambda a: permuted(*a),
        }[op](a)
        registers[to] = made & WORD
    return torch.cat([halves(registers[f"${i}"]) for i in range(n_out)], -1)


def meaning(form: TiledFormat, code: Tensor) -> Tensor:
    """The decoded number of a code."""
    if form.table == E2M1:
        return torch.tensor(form.table, dtype=torch.float32)[code] * 2.0**-15
    whole = torch.tensor(form.table)[code] + form.bias if form.table else code
    return whole.float() * 2.0**-24


def fields(form: TiledFormat, words: list[Tensor], parity: int) -> list[Tensor]:
    """[n, 4] codes of each output, of bytes [n, 4] as they lie in tiles."""
    if form.bits == 8:
        return words[:1]
    if form.bits == 4 and not form.high:
        return [words[0] & 15, words[0] >> 4]
    if form.bits == 4:
        low = [words[i % 2] >> (i // 2 * 4) & 15 for i in range(4)]
    else:
        low = [words[0] >> (2 * i) & 3 for i in range(4)]
    if not form.high:
        return low
    more, mask = words[-1], (1 << form.high) - 1
    places = (0, 2, 4, 6) if form.high == 2 else single_places(parity)
    return [q | (more >> i & mask) << form.bits for q, i in zip(low, places, strict=True)]


@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_codes_become_what_they_stand_for(type: object) -> None:
    form, gen = FORMATS[type], torch.Generator().manual_seed(0)  # type: ignore[index]
    n_word = (2 if form.bits == 4 and form.high else 1) + (form.high > 0)
    given = [
        torch.cat(
            (torch.arange(256)[:, None].expand(-1, 4), torch.randint(0, 256, (4000, 4), generator=gen))
        )
        for _ in range(n_word)
    ]
    given[1:] = [torch.randint(0, 256, given[0].shape, generator=gen) for _ in given[1:]]
    words = [(x << torch.arange(0, 32, 8)).sum(-1) for x in given]
    for parity in (0, 1) if form.high == 1 else (0,):
        codes = fields(form, given, parity)
        shift = [torch.full_like(words[0], 2 * parity * 0x01010101)] if form.high == 1 else []
        got = run(tile_codes.text(form), 2 * len(codes), *words, *shift)
        assert torch.equal(got.float(), torch.cat([meaning(form, c) for c in codes], -1))


Q4_0, IQ4_NL = GGMLType.Q4_0, GGMLType.IQ4_NL


def back(x: Tensor, type: GGMLType) -> Tensor:
    return dequantize(fit_q4(x, type), type, x.shape)


def error(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm())


@pytest.mark.parametrize("type", sorted(TYPES))
def test_what_four_bits_can_hold_comes_back(type: GGMLType) -> None:
    """Blocks that are codes times a scale: their own dequantised weights, and zeros."""
    gen = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (40, 3, 18), generator=gen, dtype=torch.uint8)
    raw[..., :2] = torch.tensor([0.25], dtype=torch.float16).view(torch.uint8)
    # Code 0 is among them, the largest there is, and others
    raw[..., 2:4] = torch.tensor([0x08, 0xF0], dtype=torch.uint8)
    raw[7] = 0
    x = dequantize(raw, type, (40, 96))
    x[7] = 0.0
    assert error(x, back(x, type)) < 1e-3


@pytest.mark.parametrize("type", sorted(TYPES))
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_the_fit_is_better_than_one_division_per_block(type: GGMLType, size: float) -> None:
    x = size * torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    plain = dequantize(quantize(x, Q4_0), Q4_0, x.shape)
    got = back(x, type)
    assert error(x, got) < 0.96 * error(x, plain)
    per_block = lambda y: (x - y).view(-1, 32).square().sum(1)  # noqa: E731
    if (
        type is Q4_0
    ):  # its candidates have that of the division, which differs by the rounding of its scale at most
        assert (per_block(got) <= per_block(plain) * 1.01).all()


@pytest.mark.parametrize("type", sorted(TYPES))
def test_a_fitted_matrix_is_what_the_kernels_take(type: GGMLType) -> None:
    x = torch.randn(300, 160, generator=torch.Generator().manual_seed(2))
    raw = fit_q4(x, type)
    assert raw.dtype == torch.uint8 and raw.shape == (300, 160 // 32 * 18)
    assert torch.equal(unpack(repack(raw, type, (300, 160))), back(x, type))


@pytest.mark.parametrize("type", sorted(TYPES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_blocks_that_are_no_numbers_become_zeros_and_leave_their_neighbours(
    type: GGMLType, bad: float
) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(5))
    want = back(x, type)
    x[2, 40] = bad
    got = back(x, type)
    assert not got[2, 32:64].any()
    assert torch.equal(got[2, :32], want[2, :32])
    assert torch.equal(got[:2], want[:2])
    assert torch.equal(got[3], want[3])
