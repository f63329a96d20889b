"""Products of rows with packed weights, unpacking, and rows as whole numbers, held against f64 products of the reference's weights."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import pytest
import torch
from sampling import few
from torch import Tensor

from pyspec.cpu import build, kernels
from pyspec.cuda.ops.linear.cpu import table_of, with_scales
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGMLType as G

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
PLAIN = (G.F32, G.F16, G.BF16)
SHORT = (G.Q8_0, G.Q4_0, G.Q4_1, G.Q5_0, G.Q5_1, G.IQ4_NL, G.MXFP4, G.NVFP4)  # blocks of 32 or 64
LONG = (G.Q2_K, G.Q3_K, G.Q4_K, G.Q5_K, G.Q6_K, G.IQ2_XXS, G.IQ3_XXS, G.IQ4_XS)  # blocks of 256
N_ROW = 70


@cache
def opened(isa: str) -> ctypes.CDLL:
    return kernels._opened(str(build.find(isa) or build.build(isa)))


def call(isa: str, n_thread: int, name: str, layout: str, *args: Tensor | float | None) -> None:
    lib = opened(isa)
    packed = struct.pack(
        "<" + layout, *[a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in args]
    )
    lib.pyspec_run(ctypes.cast(getattr(lib, name), ctypes.c_void_p), packed, n_thread)


@cache
def weights(kind: G, n_out: int, n_in: int) -> tuple[Tensor, Tensor]:
    """Bytes of any content with moderate scales, and their values [n_out, n_in]."""
    seed = torch.Generator().manual_seed(n_out * n_in + int(kind))
    if kind in PLAIN:
        dtype = {G.F32: torch.float32, G.F16: torch.float16, G.BF16: torch.bfloat16}[kind]
        x = torch.randn(n_out, n_in, generator=seed).to(dtype)
        return x.view(torch.uint8), x.float()
    n_made = max(n_out, 2)  # the reference unpacks one block alone only where it is aligned
    raw = torch.randint(
        0, 256, (n_made, n_in // kind.block_size, kind.type_size), dtype=torch.uint8, generator=seed
    )
    with_scales(raw.view(n_made, -1), kind)
    return raw[:n_out], dequantize(raw.flatten(), kind, (n_made, n_in))[:n_out]


def quantised(x: Tensor, isa: str, n_thread: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    n_row, n_in = x.shape
    n_chunk = -(-n_in // 256)
    q, scales = torch.empty(n_row, n_chunk * 256, dtype=torch.int16), torch.empty(n_row, n_chunk)
    sums = torch.empty(n_row, n_chunk, 24)
    call(isa, n_thread, "pyspec_quantise_rows", "7q", x, q, scales, sums, n_row, n_in, x.stride(0))
    return q, scales, sums


def product(
    kind: G,
    n_out: int,
    x: Tensor,
    y: Tensor | None = None,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    isa: str = build.isas()[0],
    n_thread: int = 1,
) -> Tensor:
    raw, _ = weights(kind, n_out, x.shape[1])
    y = torch.full((x.shape[0], n_out), torch.nan) if y is None else y
    args = (
        raw,
        x.contiguous(),
        *quantised(x, isa, n_thread),
        y,
        residual,
        bias,
        table_of(kind),
        int(kind),
        *x.shape,
        n_out,
    )
    strides = (y.stride(0), 0 if residual is None else residual.stride(0))
    call(isa, n_thread, "pyspec_product", "15qd", *args, *strides, scale)
    return y


def close(y: Tensor, x: Tensor, kind: G, n_out: int) -> None:
    """Each row to 1e-4 of its largest result's bound: whole numbers of 16 bits err by 2^-16 of a block's largest."""
    w = weights(kind, n_out, x.shape[1])[1].double()
    bound = (x.double().abs() @ w.abs().T).amax(1, keepdim=True)
    assert (((y - x.double() @ w.T).abs() / bound.clamp_min(1e-300)).max()) < 1e-4


SHAPES = [(k, n_in, n_out) for k in (*PLAIN, *SHORT) for n_in, n_out in ((320, 37), (64, 1), (512, 8))]
SHAPES += [(k, n_in, n_out) for k in LONG for n_in, n_out in ((512, 37), (256, 1), (768, 10))]
SHAPES += [(k, n_in, 5) for k in PLAIN for n_in in (1, 7, 13)]


@pytest.mark.parametrize(("kind", "n_in", "n_out"), SHAPES, ids=str)
def test_a_product_has_the_bits_of_its_row_alone(kind: G, n_in: int, n_out: int) -> None:
    x = torch.randn(N_ROW, n_in, generator=torch.Generator().manual_seed(n_in))
    y = product(kind, n_out, x)
    close(y, x, kind, n_out)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 33, 64, 69):
        first = N_ROW - n
        assert torch.equal(product(kind, n_out, x[first:]), y[first:]), n
    for n in (1, 5, N_ROW):
        assert torch.equal(product(kind, n_out, x[:n], n_thread=2), y[:n])


@pytest.mark.parametrize("kind", few((*PLAIN, *SHORT, *LONG), G.Q4_K), ids=lambda k: k.name)
def test_blocks_of_rows_and_panels_give_each_output_once(kind: G) -> None:
    """Of one task to many of two panels; ends within a panel and within a block."""
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(3))
    for n_out in (1, 16, 333):
        y = product(kind, n_out, x)
        close(y, x, kind, n_out)
        for n_thread in (2, 5, 33):
            assert torch.equal(product(kind, n_out, x, n_thread=n_thread), y), (n_out, n_thread)
        assert torch.equal(product(kind, n_out, x[130:131]), y[130:131])


@pytest.mark.slow
@pytest.mark.parametrize("kind", (*PLAIN, *SHORT, *LONG), ids=lambda k: k.name)
def test_the_plain_build_agrees(kind: G) -> None:
    x = torch.randn(19, 512, generator=torch.Generator().manual_seed(1))
    y = product(kind, 21, x, isa="plain")
    close(y, x, kind, 21)
    for n in (1, 3, 8):
        assert torch.equal(product(kind, 21, x[:n], isa="plain", n_thread=2), y[:n])


@pytest.mark.slow
@pytest.mark.parametrize("isa", [isa for isa in build.isas()[1:] if isa != "plain"] or ["plain"])
@pytest.mark.parametrize("kind", (G.Q8_0, G.Q4_K, G.Q6_K, G.Q2_K), ids=lambda k: k.name)
def test_builds_with_other_vectors_give_the_same_bits(kind: G, isa: str) -> None:
    x = torch.randn(14, 768, generator=torch.Generator().manual_seed(5))
    for n_out in (37, 40, 56):  # panels by the odd, and a last one that reaches back
        for n in (1, 2, 4, 5, 7, 12, 14):
            y, best = product(kind, n_out, x[:n], isa=isa), product(kind, n_out, x[:n])
            assert torch.equal(y, best) or isa == "plain", (n_out, n)


@pytest.mark.parametrize("isa", few(sorted({"plain", build.isas()[0]}), build.isas()[0]))
@pytest.mark.parametrize("kind", (*SHORT, *LONG), ids=lambda k: k.name)
def test_unpacked_weights_are_those_of_the_reference(kind: G, isa: str) -> None:
    for n_out, n_in in ((1, 256), (3, 512), (21, 512 if kind in LONG else 320)):
        raw, want = weights(kind, n_out, n_in)
        got = torch.empty(n_out, n_in)
        call(isa, 2, "pyspec_unpack", "6q", raw, got, table_of(kind), int(kind), n_out, n_in)
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("kind", (G.F32, G.BF16, G.Q8_0, G.Q4_K, G.Q6_K, G.Q2_K), ids=lambda k: k.name)
def test_a_hostile_row_spoils_no_other(kind: G) -> None:
    good = torch.randn(12, 512, generator=torch.Generator().manual_seed(2))
    alone = product(kind, 19, good)
    x = good.repeat_interleave(2, 0)
    rows = [torch.full((512,), v) for v in (torch.nan, torch.inf, 3e38, 1e-42, 0.0)]
    rows += [good[0] * 1e30, good[0] * 1e-20]
    for i, row in enumerate(rows):
        x[2 * i] = row
    x[2 * len(rows)] = torch.where(torch.arange(512) == 300, -torch.inf, good[3])
    y = product(kind, 19, x)
    assert torch.equal(y[1::2], alone)
    assert (
        not y[0].isfinite().any() and not y[2].isfinite().any() and not y[2 * len(rows)].isfinite().any()
    )
    assert (y[6].abs() < 1e-30).all() and (y[8] == 0).all()
    close(y[10:14:2] if kind in PLAIN else y[12:13], x[10:14:2] if kind in PLAIN else x[12:13], kind, 19)


@pytest.mark.parametrize("kind", (G.F16, G.Q8_0, G.Q4_K), ids=lambda k: k.name)
@pytest.mark.parametrize("n_row", [1, 8, 21])
@pytest.mark.parametrize("n_out", [3, 16, 29])
def test_strides_bias_residual_and_scale(kind: G, n_row: int, n_out: int) -> None:
    x = torch.randn(n_row, 512)
    bias, wide, residual = torch.randn(n_out), torch.full((n_row, 40), 7.0), torch.randn(n_row, 50)
    plain = product(kind, n_out, x)
    y = product(kind, n_out, x, y=wide[:, :n_out], residual=residual[:, :n_out], bias=bias, scale=0.5)
    assert torch.allclose(y, plain * 0.5 + bias + residual[:, :n_out], rtol=1e-5, atol=1e-5)
    assert (wide[:, n_out:] == 7).all()


def numbers(q: Tensor, isa: str) -> Tensor:
    """The numbers in the order of the row. Each four lie as 0 2 1 3, or for arm64 as high bytes and low bytes less 128."""
    if isa == "neon":
        high, low = q.view(torch.int8).view(3, -1, 2, 4).short().unbind(2)
        return (256 * high + low + 128).reshape(3, -1)
    return q.view(3, -1, 4)[..., [0, 2, 1, 3]].reshape(3, -1)


@pytest.mark.parametrize("isa", few(sorted({"plain", build.isas()[0]}), build.isas()[0]))
@pytest.mark.parametrize("n_in", [1, 100, 256, 300])
def test_rows_as_whole_numbers(n_in: int, isa: str) -> None:
    """Sums of 32 and of 16; zeros behind the end; rows may be strided."""
    x = torch.randn(3, n_in + 5)[:, :n_in]
    q, scales, sums = quantised(x, isa, 2)
    back = numbers(q, isa)
    assert (back[:, n_in:] == 0).all()
    value = back.view(3, -1, 256).double() * scales.double()[..., None]
    error = (value.view(3, -1)[:, :n_in] - x).abs()
    assert error.max() <= 0.501 * scales.max()
    assert torch.equal(sums[..., :8], back.view(3, -1, 8, 32).sum(-1).float())
    assert torch.equal(sums[..., 8:], back.view(3, -1, 16, 16).sum(-1).float())


def test_no_rows() -> None:
    assert product(G.Q8_0, 8, torch.empty(0, 256)).shape == (0, 8)
