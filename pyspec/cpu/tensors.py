"""The few operations between kernels, which a recording needs as kernels; elsewhere they are torch's. f32 rows, values contiguous.

torch computes the last few numbers of a tensor by another routine than the others, so a number's bits depend on how many there are. Where that shows
(exp, tanh, log) CPUs have kernels without a recording, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty, here, missing
from pyspec.slots.kv import KVPool

_ADD = CpuKernel("pyspec_add", "qqqqqqqd")
_COPY = CpuKernel("pyspec_copy", "qqqqqqqqd")
_NEXT = CpuKernel("pyspec_next_positions", "qqq")
_FACTORS = CpuKernel("pyspec_query_factors", "qqqqqd")
_TIMES = CpuKernel("pyspec_times_rows", "qqqqq")
_GATE = CpuKernel("pyspec_gate_times", "9q")
_KEYS = CpuKernel("pyspec_write_keys", "10q")

GATE_ACTS: dict[str, Callable[[Tensor], Tensor]] = {  # in the order of tensors.cpp
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softplus2": lambda x: torch.logaddexp2(x, torch.zeros_like(x)),  # log2(1 + 2^x)
    "none": lambda x: x,
}


def _bends_by_torch(x: Tensor) -> bool:
    """Whether torch computes functions of numbers here."""
    return here.tape is None and (x.device.type != "cpu" or missing() is not None)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x [row, n] + y [row, n] or [n]"""
    if here.tape is None:
        return x + y
    out = empty(*x.shape)
    _ADD(x, y, out, x.shape[0], x.shape[1], x.stride(0), 0 if y.dim() == 1 else y.stride(0), 0.0)
    return out


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of x [row, n]; x itself for a cap of 0"""
    if not cap:
        return x
    if _bends_by_torch(x):
        return (x / cap).tanh_().mul_(cap)
    out = empty(*x.shape)
    _ADD(x, None, out, x.shape[0], x.shape[1], x.stride(0), 0, cap)
    return out


def scaled(x: Tensor, factor: float) -> Tensor:
    """x [row, n] * factor; x itself for a factor of 1"""
    if factor == 1.0:
        return x
    return x * factor if here.tape is None else _copied(x, None, factor)


def query_factors(positions: Tensor, scale: float, n_ctx: int, offset: int = 0) -> Tensor:
    """1 + scale ln(floor((p + offset) / n_ctx) + 1) of positions p [row] int64. [row] f32"""
    if _bends_by_torch(positions):
        n = (positions + offset).div(n_ctx, rounding_mode="floor")
        return (n.double().log1p() * scale + 1).float()
    out = empty(len(positions))
    _FACTORS(positions, out, len(positions), n_ctx, offset, scale)
    return out


def times_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x [row, head, dim], contiguous, * factors [row]"""
    if here.tape is None:
        return x * factors.view(-1, 1, 1)
    assert x.is_contiguous()
    out = empty(*x.shape)
    _TIMES(x, factors, out, x.shape[0], x.shape[1] * x.shape[2])
    return out


def gate_times(gate: Tensor, y: Tensor, act: str) -> Tensor:
    """act(gate) * y of y [row, n]: gate [row, n], or one number for as many columns each. act: of `GATE_ACTS`"""
    n_row, n = y.shape
    per = n // gate.shape[1]
    if _bends_by_torch(y):
        factors = GATE_ACTS[act](gate)
        return factors * y if per == 1 else (y.unflatten(1, (-1, per)) * factors[..., None]).flatten(1)
    out = empty(n_row, n)
    code = list(GATE_ACTS).index(act)
    _GATE(gate, y, out, n_row, n, gate.stride(0), y.stride(0), per, code)
    return out


def picked(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: rows [out] int64"""
    return x[rows] if here.tape is None else _copied(x, rows, 1.0)


def write_keys(pool: KVPool, rows: Tensor, keys: Tensor) -> None:
    """Keys [row, head, dim] that are values, too, to rows [row] int64 of a pool."""
    if here.tape is None:
        pool.write(rows, keys, None)
        return
    n_row, n_head, dim = keys.shape
    assert keys.stride(2) == 1 and (n_head == 1 or keys.stride(1) == dim)
    given = keys, rows, pool.k, pool.k_scale
    _KEYS(*given, n_row, keys.stride(0), n_head, dim, pool.n_row, pool.kv.k.kind)


def next_positions(positions: Tensor) -> Tensor:
    """positions [row] int64 + 1"""
    if here.tape is None:
        return positions + 1
    out = empty(len(positions), dtype=torch.int64)
    _NEXT(positions, out, len(positions))
    return out


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Parts [row, n] next to each other."""
    if here.tape is None:
        return torch.cat(list(parts), -1)
    out = empty(parts[0].shape[0], sum(part.shape[1] for part in parts))
    for part, to in zip(parts, out.split([part.shape[1] for part in parts], 1), strict=True):
        _COPY(part, to, None, *part.shape, part.stride(0), to.stride(0), part.shape[0], 1.0)
    return out


def copied(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [row, n] in new memory, or in `out`, while recording."""
    return _copied(x, None, 1.0, out)


def _copied(x: Tensor, rows: Tensor | None, factor: float, out: Tensor | None = None) -> Tensor:
    n = x.shape[0] if rows is None else len(rows)
    out = empty(n, x.shape[1]) if out is None else out
    assert out.dtype == x.dtype == torch.float32 and out.shape == (n, x.shape[1])
    _COPY(x, out, rows, n, x.shape[1], x.stride(0), out.stride(0), x.shape[0], factor)
    return out
