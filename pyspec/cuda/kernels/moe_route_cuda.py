"""`moe_route` on NVIDIA GPUs: moe_route.cu's two kernels. Sums are those of a row alone, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda.jit import Kernel, arch_of, compile_cubin
from pyspec.cuda.kernels.moe_ref import Routes, RouteSpec

MAX_EXPERT, MAX_USED, ROWS = 512, 32, 4


def limits(spec: RouteSpec) -> str | None:
    if spec.device.type != "cuda":
        return "runs on NVIDIA GPUs only"
    if spec.n_expert > MAX_EXPERT or spec.n_used > MAX_USED:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MAX_USED} of {MAX_EXPERT}"
    if spec.n_in % 4:
        return f"{spec.n_in} columns are not a multiple of 4"
    return None


def defines(spec: RouteSpec) -> dict[str, int | str]:
    """Macros of moe_route.cu."""
    return {
        "N_EXPERT": spec.n_expert,
        "N_USED": spec.n_used,
        "SIGMOID": int(spec.router == "sigmoid"),
        "RENORM": int(spec.renorm),
        "BIASED": int(spec.biased),
        "GATED": int(spec.gated),
    }


@cache
def _kernels(spec: RouteSpec) -> tuple[Kernel, Kernel]:
    code = compile_cubin("moe_route", arch_of(torch.cuda.get_device_capability(spec.device)), defines(spec))
    return code.kernel("moe_scores", "pppii"), code.kernel("moe_choose", "pppppf")


def bind(spec: RouteSpec) -> Callable[..., Routes]:
    scores, choose = _kernels(spec)
    n_score = spec.n_expert + spec.gated
    overlap = torch.cuda.get_device_capability(spec.device) >= (9, 0)

    def route(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Routes:
        assert matrix.shape == (n_score, spec.n_in) and matrix.is_contiguous() and (bias is not None) == spec.biased
        x, n_row = x.contiguous(), x.shape[0]
        floats = {"dtype": torch.float32, "device": x.device}
        logits, weights = torch.empty(n_row, n_score, **floats), torch.empty(n_row, spec.n_used, **floats)
        gate = torch.empty(n_row, 1, **floats) if spec.gated else None
        ids = torch.empty(n_row, spec.n_used, dtype=torch.int32, device=x.device)
        if n_row:
            sizes = np.int32(n_row), np.int32(spec.n_in // 4)
            scores.launch((-(-n_score // 8), -(-n_row // ROWS)), 256, (x, matrix, logits, *sizes), overlap=overlap)
            args = (logits, logits if bias is None else bias, ids, weights, logits if gate is None else gate)
            choose.launch((n_row,), 32, (*args, np.float32(spec.scale)), overlap=overlap)
        return Routes(ids, weights, gate)

    return route


def check(launch: Callable[..., Routes], reference: Callable[..., Routes], spec: RouteSpec) -> str | None:
    """Random rows, and a row of zeros, where all experts are equal."""
    gen = torch.Generator().manual_seed(0)
    matrix = torch.randn(spec.n_expert + spec.gated, spec.n_in, generator=gen) / spec.n_in**0.5
    bias = torch.rand(spec.n_expert, generator=gen).to(spec.device) if spec.biased else None
    for n_row in (1, 7, 40):
        x = 2 * torch.randn(n_row, spec.n_in, generator=gen)
        x[n_row // 2] = 0 if n_row > 1 else x[0]
        given = (x.to(spec.device), matrix.to(spec.device)) + ((bias,) if bias is not None else ())
        got, want = launch(*given), reference(*given)
        if not torch.equal(got.ids, want.ids):
            return f"{int((got.ids != want.ids).any(-1).sum())} of {n_row} rows choose other experts than the reference"
        off = float((got.weights - want.weights).abs().amax() / want.weights.abs().amax())
        if want.gate is not None and got.gate is not None:
            off = max(off, float((got.gate - want.gate).abs().amax()))
        if not off < 1e-4:
            return f"weights differ from the reference by {off:.2g}"
    return None
