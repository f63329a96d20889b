"""The check of `moe` against its reference on GPUs, over random experts of the file's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.ops.linear.cuda import random_weights
from pyspec.cuda.ops.moe.cuda import ExpertsLaunch
from pyspec.cuda.ops.moe.host import HostExperts
from pyspec.cuda.ops.moe.ref import Added, ExpertsRun, MoeSpec, Stack, Stacks
from pyspec.cuda.ops.rows.cuda import RowsLaunch
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType


def random_stacks(spec: MoeSpec, n_expert: int, gen: torch.Generator) -> Stacks:
    """Experts of the spec's shape, packed as in a file, where the spec has them."""
    device = _home(spec)

    def stack(type: GGMLType | None, n: int, n_out: int, n_in: int) -> Stack:
        assert type is not None
        raw = random_weights(type, n * n_out, n_in, gen).view(n, -1).to(device)
        scale = 0.5 + torch.rand(n, generator=gen).to(device) if spec.scaled else None
        return Stack(raw, type, n_out, n_in, scale)

    def stacks(n: int, n_ff: int, shared: Stacks | None) -> Stacks:
        gate = stack(spec.up, n, n_ff, spec.n_in) if spec.has_gates else None
        return Stacks(
            gate, stack(spec.up, n, n_ff, spec.n_in), stack(spec.down, n, spec.n_in, n_ff), shared
        )

    made = stacks(n_expert, spec.n_ff, stacks(1, spec.pieces * spec.n_ff, None) if spec.pieces else None)
    return _biased(spec, made, gen) if spec.biased else made


def _home(spec: MoeSpec) -> torch.device:
    return spec.device if spec.slots is None else torch.device("cpu")


def _biased(spec: MoeSpec, stacks: Stacks, gen: torch.Generator) -> Stacks:
    """With biases about as large as the products that they are added to."""

    def size(s: Stack) -> float:
        return float(s.matrix(0).float().norm(dim=-1).mean())

    def add(s: Stack, by: float) -> Stack:
        bias = by * torch.randn(stacks.n_expert, s.n_out, generator=gen)
        return replace(s, bias=bias.to(_home(spec)))

    inner, gate = abs(spec.limit) or size(stacks.up), stacks.gate
    gate = None if gate is None else add(gate, inner)
    return Stacks(gate, add(stacks.up, inner), add(stacks.down, inner**2 * size(stacks.down)))


def check(
    launch: Callable[[Stacks], ExpertsRun],
    reference: Callable[[Stacks], ExpertsRun],
    spec: MoeSpec,
    n_rows: Sequence[int] = (1, 9, 40, 100),
) -> str | None:
    """Rows that spread over experts, and rows, columns of wider ones, that all take the same; a few experts, since more only lie farther.

    Rows are f16 already, so that no rounding of theirs takes part. Random weights with minima have a mean: where a row's
    columns add up to about zero, so do its outputs, and rounding it alone moved them by 9e-3 of the rest. The remaining rounding, of
    the activations, moves no row by more than 5e-4.
    """
    gen = torch.Generator().manual_seed(0)
    n_expert = spec.n_used + 3
    stacks = random_stacks(spec, n_expert, gen)
    own, other, by = launch(stacks), reference(stacks), _far(spec, stacks, gen)
    for n_row in n_rows:
        x = (by * torch.randn(n_row, spec.n_in, generator=gen).half().float()).to(spec.device)
        spread = torch.rand(n_row, n_expert, generator=gen).argsort(-1)[:, : spec.n_used]
        weights = torch.rand(n_row, spec.n_used, generator=gen).to(spec.device)
        beside = torch.cat((x, x), 1)[:, : spec.n_in]
        for rows, ids in ((x, spread), (beside, spread[:1].expand(n_row, -1))):
            given = rows, ids.int().contiguous().to(spec.device), weights
            got, want = own(*given), other(*given)
            off = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())
            if not off < 1e-3:
                return f"outputs for {n_row} rows differ from the reference by {off:.2g}"
    if isinstance(own, HostExperts) and own.can_stream:
        off = float((own.streamed(*given) - want).norm() / want.norm())
        if not off < 1e-3:
            return f"outputs of experts that come to the card differ from the reference by {off:.2g}"
    return _check_around(own, spec.pieces, *given, gen)


def _far(spec: MoeSpec, stacks: Stacks, gen: torch.Generator) -> float:
    """A power of two that rows are multiplied with, so that gates and ups lie on both sides of a limit. 1 without one."""
    if not (most := abs(spec.limit) or spec.betas[0]):
        return 1.0
    rows = torch.randn(8, spec.n_in, generator=gen).to(_home(spec))
    size = float((rows @ stacks.up.matrix(0).float().T).square().mean().sqrt())
    return float(2.0 ** round(math.log2(2 * most / size)))


def _check_around(
    own: ExpertsRun, pieces: int, x: Tensor, ids: Tensor, weights: Tensor, gen: torch.Generator
) -> str | None:
    """Check the operations before and after the products: the norm, a residual, a shared expert."""
    residual, shared = (torch.randn(x.shape, generator=gen).to(x.device) for _ in "rs")
    gate = torch.rand(len(x), 1, generator=gen).to(x.device)
    norm = Norm(0.5 + torch.rand(x.shape[1], generator=gen).to(x.device), 1e-6)
    if pieces:  # the op's own shared expert, by its gate and without one
        without = own(x, ids, weights, None, Added(None, None, torch.zeros_like(gate)))
        plain, shared = without, own(x, ids, weights) - without
        got = own(x, ids, weights, None, Added(residual, None, gate))
    else:
        plain, got = own(x, ids, weights), own(x, ids, weights, None, Added(residual, shared, gate))
    if not torch.allclose(
        got, residual + (plain + shared * gate), rtol=1e-5, atol=1e-5 * float(plain.abs().amax())
    ):
        return "a residual or a shared expert is not added as the reference does"
    if isinstance(own, ExpertsLaunch) and len(x) <= own.x_rows.pads[-1]:
        # Not theirs: as the product behind reads them
        rows = RowsLaunch(x.device, x.shape[1], own.x_rows.pads)
        want = rows(own(x, ids, weights, None, Added(residual))).blocks.clone()
        if not torch.equal(
            rows.summed(own.shares(own.x_rows(x), ids, weights, Added(residual))).blocks, want
        ):
            return "sums on the way to a product are not those made before"
    want, got = own(norm(4 * x), ids, weights), own(4 * x, ids, weights, norm)
    off = float((got - want).norm() / want.norm())
    # The two round rows by other powers
    return None if off < 2e-3 else f"outputs of normed rows differ by {off:.2g}"
