"""Products of 8-bit rows (`--cpu-activations q8`), each type against f64 products of the same whole numbers; a rig as in hostile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pyspec.cuda.ops.linear import cpu
from pyspec.cuda.ops.linear.cpu import CpuLinearSpec, CpuRows, has_eight, prepared, with_scales
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.gguf import GGMLType as G

Rig = Callable[[], str | None]
OFF = 3e-6  # of a row's largest sum of sizes: f32 sums
N_ROW = 41
PATTERNS = (0x00, 0xFF, 0x0F, 0xF0, 0x7F, 0x80, 0x81)


def eight_types() -> list[G]:
    """The types that the loaded library has."""
    return sorted(type for type in cpu.TYPES if has_eight(type))


def weights(type: G, n_out: int, n_in: int, fill: int | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of any content, or all alike, with moderate scales [n_out, bytes]; and their values [n_out, n_in]."""
    seed = torch.Generator().manual_seed(n_out * n_in + int(type))
    shape = (max(n_out, 2), n_in // type.block_size, type.type_size)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seed)
    if fill is not None:
        raw[:] = fill
    with_scales(raw.view(len(raw), -1), type)
    return raw.view(len(raw), -1)[:n_out], dequantize(raw.flatten(), type, (len(raw), n_in))[:n_out]


def rounded(x: Tensor) -> Tensor:
    """Rows as their 8-bit whole numbers times their scales, f64."""
    blocks_of = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    top = blocks_of.abs().amax(-1, keepdim=True)
    q = (blocks_of * (127.0 / top)).round().nan_to_num(0.0)
    scale = (top * (1.0 / 127.0)).double()
    return (q.double() * scale).view(len(x), -1)[:, : x.shape[1]]


def product(
    type: G, raw: Tensor, rows: CpuRows, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    out = torch.full((len(rows.x), len(raw)), torch.nan)
    cpu.bind(CpuLinearSpec(torch.device("cpu"), type, 8))(rows, raw, out, scale, residual)
    return out


def of(type: G, raw: Tensor, x: Tensor) -> Tensor:
    return product(type, raw, prepared(x, None, whole=False, eight=True))


def fault_of(y: Tensor, x: Tensor, w: Tensor) -> str | None:
    near, w = rounded(x), w.double()
    bound = (near.abs() @ w.abs().T).amax(1, keepdim=True).clamp_min(1e-300)
    off = float(((y - near @ w.T).abs() / bound).max())
    return None if off < OFF else f"a row is {off:.1e} off"


def follows_its_whole_numbers(type: G, n_out: int, n_in: int) -> str | None:
    """Any number of rows, each with the bits it has alone, on other numbers of threads, too."""
    raw, w = weights(type, n_out, n_in)
    x = (
        torch.randn(N_ROW, n_in, generator=torch.Generator().manual_seed(n_in))
        * torch.logspace(-6, 6, N_ROW)[:, None]
    )
    y = of(type, raw, x)
    if (why := fault_of(y, x, w)) is not None:
        return why
    for n in range(1, N_ROW):
        if not torch.equal(of(type, raw, x[N_ROW - n :]), y[N_ROW - n :]):
            return f"{n} rows have other bits"
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    same = torch.equal(of(type, raw, x), y)
    torch.set_num_threads(before)
    return None if same else "3 threads give other bits"


def holds_the_largest(type: G) -> str | None:
    """Every weight and every value at an end of its range: no sum of 16 bits may overflow."""
    signs = torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0)
    x = torch.stack(
        [
            torch.full((256,), 1.0),
            torch.full((256,), -1.0),
            signs,
            -signs,
            signs.repeat_interleave(2)[:256],
        ]
    )
    for fill in PATTERNS:
        raw, w = weights(type, 9, 256, fill)
        if (why := fault_of(of(type, raw, x), x, w)) is not None:
            return f"weights of bytes {fill:#x}: {why}"
    return None


def keeps_rows_apart(type: G) -> str | None:
    """NaN, infinite, huge, tiny and zero rows between others."""
    raw, w = weights(type, 19, 512)
    good = torch.randn(9, 512, generator=torch.Generator().manual_seed(2))
    one = torch.where(torch.arange(512) == 300, -torch.inf, good[3])
    rows = [torch.full((512,), v) for v in (torch.nan, torch.inf, 1e-42, 0.0)] + [
        one,
        good[0] * 1e30,
        good[0] * 1e-20,
    ]
    x = torch.stack([y for pair in zip(good, [*rows, good[1], good[2]], strict=True) for y in pair])
    y, alone = of(type, raw, x), of(type, raw, good)
    if not torch.equal(y[::2], alone):
        return "a hostile row changes others"
    if y[[1, 3, 9]].isfinite().any() or y[[5, 7]].any():
        return "a row that is not finite has results that are, or one of zeros others than zero"
    return fault_of(y[11:14:2], x[11:14:2], w)


def adds_a_residual(type: G) -> str | None:
    raw, w = weights(type, 13, 512)
    seed = torch.Generator().manual_seed(13)
    x, residual = torch.randn(5, 512, generator=seed), torch.randn(5, 13, generator=seed)
    got = product(type, raw, prepared(x, None, whole=False, eight=True), residual, 0.5)
    want = rounded(x) @ w.double().T * 0.5 + residual
    return None if torch.allclose(got.double(), want, rtol=1e-4, atol=1e-3) else "scale and residual"


def eight_rigs() -> Iterator[tuple[str, Rig]]:
    for type in eight_types():
        long = type.block_size == 256
        for n_out, n_in in ((37, 512 if long else 320), (1, 256), (10, 768)):
            yield (
                f"8 bits, {type.name} {n_out}x{n_in}",
                partial(follows_its_whole_numbers, type, n_out, n_in),
            )
        yield f"8 bits, {type.name}, the largest", partial(holds_the_largest, type)
        yield f"8 bits, {type.name}, hostile rows", partial(keeps_rows_apart, type)
        yield f"8 bits, {type.name}, residual", partial(adds_a_residual, type)
