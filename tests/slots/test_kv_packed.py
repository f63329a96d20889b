"""Keys and values of 4 and 5 bits: the values of llama.cpp's types, packed; and turned heads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_codes import codes_of, decoded, encoded, turned
from pyspec.slots.kv_types import Q4_0, Q4_1, Q5_0, Q5_1, KvType

CPU = torch.device("cpu")
PACKED = (Q5_1, Q5_0, Q4_1, Q4_0)


@pytest.mark.parametrize("of", PACKED, ids=str)
def test_values_are_those_of_the_reference_python_package(of: KvType) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=gen) * torch.logspace(-6, 4, 400)[:, None]
    x[0], x[1] = 0.0, torch.arange(64) - 31.0  # the largest twice, of both signs
    codes, factors = encoded(x, of)
    assert factors is not None and factors.dtype is torch.float16 and codes.dtype is torch.uint8
    assert codes.shape[1] * 8 == 64 * of.bits and factors.shape[1] == 2 * of.n_factor
    type = GGMLQuantizationType[of.name.upper()]
    want = quants.dequantize(quants.quantize(x.numpy(), type), type)
    assert np.array_equal(decoded(codes, factors, of, torch.float32).numpy(), want)


@pytest.mark.parametrize("of", PACKED, ids=str)
def test_codes_are_packed_and_unpacked_in_the_order_that_is_written_down(of: KvType) -> None:
    x = torch.arange(32.0)[None]
    codes, _ = encoded(x, of)
    found = codes_of(codes, of)[0]
    low = [int(found[2 * i]) & 15 | (int(found[2 * i + 1]) & 15) << 4 for i in range(16)]
    high = [sum((int(found[8 * i + j]) >> 4) << j for j in range(8)) for i in range(4)]
    assert codes[0].tolist() == low + high * (of.bits == 5)
    assert int(found.max()) == (2**of.bits - 1 if of.n_factor == 2 else 2 ** (of.bits - 1))


@pytest.mark.parametrize("of", PACKED, ids=str)
def test_extreme_blocks(of: KvType) -> None:
    rows = torch.zeros(5, 32)
    rows[0, 3] = 1e-30  # no factor is so small
    rows[1, :2] = torch.tensor([torch.inf, -torch.inf])
    rows[2, 0] = torch.nan
    rows[3, 0], rows[3, 1] = 3e9, -1.0
    codes, factors = encoded(rows, of)
    y = decoded(codes, factors, of, torch.float32)
    assert not y[[0, 4]].any() and y[2].isnan().all()
    assert y[[1, 3]].half().isfinite().all() and y[3, 0] > 60000, "finite where kernels compute"
    half = decoded(codes, factors, of, torch.float16)
    assert half[[1, 3]].isfinite().all()


def test_heads_are_turned_by_an_orthogonal_matrix_that_is_its_own_inverse() -> None:
    for dim, n in ((64, 64), (96, 32), (256, 256), (40, 8)):
        matrix = torch.tensor([[1.0]])
        while len(matrix) < n:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        x = torch.randn(3, 2, dim)
        want = (x.unflatten(-1, (-1, n)) @ (matrix / n**0.5)).flatten(-2)
        assert (turned(x, n) - want).abs().max() < 1e-5
        assert (turned(turned(x, n), n) - x).abs().max() < 1e-5


def test_types_of_few_bits_turn_heads_and_others_do_not() -> None:
    kv = KvFormat.named("q8_0", "q4_0")
    assert (kv.turned_k(256), kv.turned_v(256), kv.turned_v(96)) == (0, 64, 32)
    assert KvFormat(replace(Q4_0, turns=False)).turned_k(256) == 0
    assert repr(Q4_0) == "q4_0" != repr(replace(Q4_0, turns=False))


def test_turning_helps_a_head_with_one_large_dim() -> None:
    x = torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(1))
    x[:, :, 5] = 30.0
    off = {}
    for n in (0, 64):
        pool = KVPool(200, 1, 64, KvFormat.both(Q4_0), CPU)
        pool.write(torch.arange(200), turned(x, n), x)
        off[n] = float((turned(pool.read(torch.arange(200), torch.float32)[0], n) - x).norm() / x.norm())
    assert off[64] < 0.5 * off[0]
