"""Block layouts and torch dequantisation against the gguf package, bit for bit."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch

from pyspec.cuda.ops.linear import dequant as dequant_ref
from pyspec.cuda.ops.linear.dequant import SUPPORTED, dequantize, dequantize_rows, quantize
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, LlamaFileType
from pyspec.gguf.types import file_type_words

BLOCK_TYPES = sorted(t for t in SUPPORTED if t.block_size > 1)
HALVES = {"d", "m", "dmin"}


def theirs(kind: GGMLType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(kind)


def random_blocks(kind: GGMLType, n: int, seed: int = 0) -> np.ndarray:
    """[n, type_size] uint8: random bits, but half-precision scales without inf and nan; some zero, some subnormal."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, kind.type_size), dtype=np.uint8)
    layout = kind.layout
    assert layout is not None
    for name in HALVES & {field[0] for field in layout._fields_}:
        field = getattr(layout, name)
        if field.size != 2:
            continue  # NVFP4's d: any bits are numbers
        scales = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float16)
        scales[::7], scales[1::7], scales[2::7] = 0, np.float16(6e-8), np.float16(-3.1e-5)
        raw[:, field.offset : field.offset + 2] = scales.view(np.uint8).reshape(n, 2)
    return raw


def same_bits(ours: torch.Tensor, reference: np.ndarray) -> bool:
    return np.array_equal(ours.numpy().view(np.int32), np.ascontiguousarray(reference).view(np.int32))


def test_all_types_have_the_sizes_of_the_gguf_package() -> None:
    ours = {int(t): (t.block_size, t.type_size) for t in GGMLType if t is not GGMLType.Q8_1}
    # Q8_1 is never stored; the package still gives the size it had with float32 scales.
    assert ours == {int(t): size for t, size in gguf.GGML_QUANT_SIZES.items() if t.name != "Q8_1"}
    assert {t.name for t in GGMLType} == {t.name for t in gguf.GGMLQuantizationType}


def test_layouts_are_packed_and_hold_one_block() -> None:
    for kind in SUPPORTED:
        layout = kind.layout
        assert layout is not None
        assert (
            sum(getattr(layout, f[0]).size for f in layout._fields_)
            == ctypes.sizeof(layout)
            == kind.type_size
        )


def test_file_types_are_those_of_the_gguf_package() -> None:
    named = {t.value: t.name.removeprefix("ALL_").removeprefix("MOSTLY_") for t in gguf.LlamaFileType}
    assert {t.value: t.name for t in LlamaFileType} == {k: v for k, v in named.items() if v != "GUESSED"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((0, "all F32"), (1, "F16"), (7, "Q8_0"), (10, "Q2_K - Medium"), (21, "Q2_K - Small"), (13, "Q3_K - Large")),
        *((15, "Q4_K - Medium"), (18, "Q6_K"), (25, "IQ4_NL - 4.5 bpw"), (27, "IQ3_S mix - 3.66 bpw"), (32, "BF16")),
        *((36, "TQ1_0 - 1.69 bpw ternary"), (38, "MXFP4 MoE"), (39, "NVFP4"), (None, ""), (999, "unknown, may not work")),
    ],
)  # fmt: skip
def test_file_types_have_llama_servers_names(number: int | None, words: str) -> None:
    assert file_type_words(number) == words


@pytest.mark.parametrize("n", [1, 700])  # fields of a single block are contiguous at any byte
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda t: t.name)
def test_random_blocks_decode_bit_for_bit(kind: GGMLType, n: int) -> None:
    raw = random_blocks(kind, n)
    with np.errstate(over="ignore"):
        want = gguf.quants.dequantize(raw, theirs(kind))
    assert same_bits(dequantize(torch.from_numpy(raw), kind, want.shape), want)


@pytest.mark.parametrize(
    ("kind", "place"), [(GGMLType.MXFP4, 0), (GGMLType.NVFP4, 2)], ids=lambda x: str(x)
)
def test_every_scale_code_of_the_fp4_types_decodes_bit_for_bit(kind: GGMLType, place: int) -> None:
    raw = random_blocks(kind, 256)
    raw[:, place] = np.arange(256)
    with np.errstate(over="ignore"):
        want = gguf.quants.dequantize(raw, theirs(kind))
    assert same_bits(dequantize(torch.from_numpy(raw), kind, want.shape), want)


@pytest.mark.parametrize("kind", [GGMLType.IQ2_XXS, GGMLType.IQ3_XXS], ids=lambda t: t.name)
def test_every_lattice_point_sign_and_scale_decodes_bit_for_bit(kind: GGMLType) -> None:
    points, words = np.arange(256, dtype=np.uint8), np.arange(128, dtype=np.uint32)
    raw = random_blocks(kind, 16)
    signs = words | (words + 1 & 127) << 7 | (words + 2 & 127) << 14 | (words + 3 & 127) << 21
    packed = (
        (signs | np.arange(128, dtype=np.uint32) % 16 << 28)
        .astype("<u4")
        .view(np.uint8)
        .reshape(16, 8, 4)
    )
    if kind is GGMLType.IQ2_XXS:
        groups = np.concatenate((np.tile(points, 2).reshape(16, 8, 4), packed), 2)
        raw[:, 2:] = groups.reshape(16, 64)
    else:
        raw[:, 2:66], raw[:, 66:] = np.tile(points, 4).reshape(16, 64), packed.reshape(16, 32)
    raw[:, :2] = np.full(16, 0.37, "<f2").view(np.uint8).reshape(16, 2)
    want = gguf.quants.dequantize(raw, theirs(kind))
    assert same_bits(dequantize(torch.from_numpy(raw), kind, want.shape), want)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda t: t.name)
def test_hostile_bits_decode_as_the_package_decodes_them(kind: GGMLType) -> None:
    """All zeros, all ones, and half-precision scales that are infinite, not a number or the largest there is."""
    raw = np.concatenate([np.full((1, kind.type_size), byte, np.uint8) for byte in (0, 255, 0x55, 0xAA)])
    layout = kind.layout
    assert layout is not None
    for value in (np.inf, -np.inf, np.nan, 65504, -0.0):
        blocks = random_blocks(kind, 4, seed=1)
        for name in HALVES & {field[0] for field in layout._fields_}:
            if (field := getattr(layout, name)).size == 2:
                blocks[:, field.offset : field.offset + 2] = (
                    np.full(4, value, "<f2").view(np.uint8).reshape(4, 2)
                )
        raw = np.concatenate((raw, blocks))
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, theirs(kind))
    got = dequantize(torch.from_numpy(raw), kind, want.shape).numpy()
    known = ~np.isnan(want)
    assert np.array_equal(np.isnan(got), ~known)  # which of the many NaNs it is, is the processor's
    assert np.array_equal(got[known].view(np.int32), want[known].view(np.int32))


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks(GGMLType.Q6_K, 50))
    whole = dequantize(raw, GGMLType.Q6_K, (10, 1280))
    monkeypatch.setattr(dequant_ref, "CPU_CHUNK", 256 * 7)
    assert torch.equal(dequantize(raw, GGMLType.Q6_K, (10, 1280)), whole)


def test_other_output_types_round_the_float32_result() -> None:
    raw = torch.from_numpy(random_blocks(GGMLType.Q4_K, 9))
    exact = dequantize(raw, GGMLType.Q4_K, (9, 256))
    assert torch.equal(dequantize(raw, GGMLType.Q4_K, (9, 256), torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize(
    "kind",
    [GGMLType.Q5_K, GGMLType.IQ2_XXS, GGMLType.IQ3_XXS, GGMLType.Q8_0, GGMLType.F16],
    ids=lambda t: t.name,
)
def test_chosen_rows_equal_the_rows_of_the_whole(kind: GGMLType) -> None:
    if kind is GGMLType.F16:
        raw = torch.randn(12, 512).half().view(torch.uint8)
    else:
        raw = torch.from_numpy(random_blocks(kind, 12 * 512 // kind.block_size)).view(12, -1)
    whole = dequantize(raw, kind, (12, 512))
    rows = torch.tensor([11, 0, 3, 3])
    assert torch.equal(dequantize_rows(raw, kind, rows), whole[rows])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8]
)
def test_plain_types_are_copied(dtype: torch.dtype) -> None:
    kinds = {v: k for k, v in dequant_ref._PLAIN.items()}
    values = (torch.randn(6, 4) * 50).to(dtype)
    got = dequantize(values.view(torch.uint8), kinds[dtype], (6, 4), dtype)
    assert torch.equal(got, values)
    assert got.data_ptr() != values.data_ptr()


def test_an_unsupported_type_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="IQ2_XS"):
        dequantize(torch.zeros(74, dtype=torch.uint8), GGMLType.IQ2_XS, (256,))


@pytest.mark.parametrize(
    "kind", [GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.BF16, GGMLType.F16], ids=lambda t: t.name
)
def test_quantising_equals_the_gguf_package(kind: GGMLType) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((40, 128)) * np.exp(rng.uniform(-9, 9, (40, 1)))).astype(np.float32)
    x[3], x[4, 32:64] = 0, np.round(x[4, 32:64]) + 0.5
    x[5, :8] = [1, -1, 1, -1, 1, -1, 1, -1]  # ties for the largest
    want = gguf.quants.quantize(x, theirs(kind)).view(np.uint8)
    got = quantize(torch.from_numpy(x), kind)
    assert got.shape == want.shape
    assert np.array_equal(got.numpy(), want)


def test_bf16_keeps_nan_and_infinity() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3.4e38], dtype=np.float32)
    want = gguf.quants.quantize(x.reshape(1, 4), theirs(GGMLType.BF16)).view(np.uint8)
    assert np.array_equal(quantize(torch.from_numpy(x.reshape(1, 4)), GGMLType.BF16).numpy(), want)


def test_quantising_refuses_ragged_rows_and_other_types() -> None:
    with pytest.raises(ModelError, match="33"):
        quantize(torch.zeros(2, 33), GGMLType.Q8_0)
    with pytest.raises(ModelError, match="Q4_K"):
        quantize(torch.zeros(2, 256), GGMLType.Q4_K)
