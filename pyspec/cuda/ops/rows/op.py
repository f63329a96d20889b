"""`rows`: prepare rows for a product (norms, gates) while they are rounded to f16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyspec.cuda.op import Impl, Op, implemented
from pyspec.cuda.ops.rows import cuda, ref, triton

Launch = Callable[[Tensor, ref.Prep | None], tuple[Tensor, Tensor | None]]


def _reference(spec: ref.RowsSpec) -> Launch:
    def rows(x: Tensor, prep: ref.Prep | None = None) -> tuple[Tensor, Tensor | None]:
        x = x if prep is None else prep(x)
        power = (
            torch.full_like(x[:, :1], prep.power)
            if isinstance(prep, ref.Norm | ref.HeadNorm)
            else ref.power_of(x)
        )
        return (x / power).half(), power[:, 0]

    return rows


def make(spec: ref.RowsSpec, n_row: int, gen: torch.Generator) -> tuple[Tensor, ref.Prep | None]:
    """A random case: strided rows of very different sizes, and the preparation of the spec's kind."""
    n, device = spec.n_in, spec.device

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device)

    x = draw(n_row, spec.kind.halves * n + 8)[:, :-8]
    x *= torch.logspace(-3, 3, n_row, device=device)[:, None] if spec.kind.halves == 1 else 1.0
    prep: ref.Prep | None = None
    if spec.kind is ref.PrepKind.NORM:
        prep = ref.Norm(1 + 0.1 * draw(n), 1e-6)
    elif spec.kind is ref.PrepKind.HEADS:
        prep = ref.HeadNorm(1 + 0.1 * draw(spec.dim), 1e-6, draw(n_row, n + 32)[:, 32:])
    elif spec.kind is ref.PrepKind.GATE:
        prep = ref.HeadGate(draw(n_row, n // spec.dim, 2 * spec.dim)[..., spec.dim :])
    elif spec.kind is ref.PrepKind.GROUPS:
        weight, gate = 1 + 0.1 * draw(n), draw(n_row, n + 32)[:, 32:]
        prep = ref.GroupNorm(weight, 1e-6, gate, n // spec.dim, ref.norm_power(weight))
    elif spec.kind is ref.PrepKind.GLU:
        prep = ref.Glu()
    elif spec.kind is ref.PrepKind.GEGLU:
        prep = ref.GeluGlu()
    elif spec.kind is ref.PrepKind.RELU2:
        prep = ref.RELU2
    return x, prep


def check(launch: Launch, reference: Launch, spec: ref.RowsSpec) -> str | None:
    """Values after scaling back: rounding to f16 moves each by 2^-11 of itself, or by the smallest step of its row near zero."""
    gen = torch.Generator().manual_seed(0)
    more = [] if spec.n_in < cuda.PARTS_FROM else [cuda.PARTS_ROWS + 1]  # other builds take these
    for n_row in (1, 5, *more):
        x, prep = make(spec, n_row, gen)
        (got, got_power), (want, want_power) = launch(x, prep), reference(x, prep)
        got = got.double()
        want = want.double() * (1.0 if want_power is None else want_power.double()[:, None])
        got = got if got_power is None else got * got_power.double()[:, None]
        off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())
        if not off < 1e-3:
            return f"rows differ from the reference by {off:.2g}"
    return None


def shapes(device: torch.device) -> list[ref.RowsSpec]:
    """27B, gemma-4 31B, and the groups of Nemotron 3 Super."""
    return [
        ref.RowsSpec(device, 5120, ref.PrepKind.NORM),
        ref.RowsSpec(device, 6144, ref.PrepKind.HEADS, 128),
        ref.RowsSpec(device, 6144, ref.PrepKind.GATE, 256),
        ref.RowsSpec(device, 17408, ref.PrepKind.GLU),
        ref.RowsSpec(device, 21504, ref.PrepKind.GEGLU),
        ref.RowsSpec(device, 8192, ref.PrepKind.GROUPS, 1024),
    ]


rows: Op[ref.RowsSpec, Launch] = Op(
    "rows", Impl("torch", _reference), implemented(cuda, triton), check, shapes=shapes
)
