"""What holds for experts of any kernels on any machine: a row has the same bits alone and in any company, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from machines import Machine
from torch import Tensor

from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe.ref import Added, ExpertsRun, MoeSpec, Stacks

Bind = Callable[[MoeSpec], Callable[[Stacks], ExpertsRun]]


def experts(machine: Machine, bind: Bind, spec: MoeSpec, n_expert: int, seed: int = 0) -> ExpertsRun:
    return bind(spec)(moe_check.random_stacks(spec, n_expert, torch.Generator().manual_seed(seed)))


def drawn(
    machine: Machine, spec: MoeSpec, n_row: int, n_expert: int, crowd: int
) -> tuple[Tensor, Tensor, Tensor, Added]:
    """Rows, chosen experts (of the first `crowd` rows one is the same), weights, and what else is added."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(n_row, spec.n_in, generator=gen)
    weights = torch.rand(n_row, spec.n_used, generator=gen)
    ids = torch.rand(n_row, n_expert, generator=gen).argsort(-1)[:, : spec.n_used].int()
    ids[:crowd, 0] = 0
    gate = torch.rand(n_row, 1, generator=gen).to(machine.device) if spec.pieces else None
    x, ids, weights = (t.to(machine.device) for t in (x, ids, weights))
    return x, ids, weights, Added(x, None, gate)


def check_company(
    machine: Machine,
    run: ExpertsRun,
    spec: MoeSpec,
    n_row: int,
    n_expert: int,
    crowd: int,
    parts: Sequence[slice],
) -> None:
    x, ids, weights, added = drawn(machine, spec, n_row, n_expert, crowd)
    whole = run(x, ids, weights, None, added)
    for part in parts:
        got = run(x[part], ids[part], weights[part], None, added.part(part))
        assert torch.equal(got, whole[part]), part


def check_hostile(
    machine: Machine,
    run: ExpertsRun,
    spec: MoeSpec,
    n_row: int,
    n_expert: int,
    crowd: int,
    sizes: Sequence[int],
) -> None:
    """Rows that are no numbers, or zeros, and experts that are none (clamped) harm no other row."""
    x, ids, weights, added = drawn(machine, spec, n_row, n_expert, crowd)
    added = Added(None, None, added.gate)
    clean = run(x, ids, weights, None, added)
    x[1, 5], x[3], x[4, -7], x[6], ids[7] = torch.nan, torch.nan, torch.inf, 0.0, -7
    ids[5, -1] = 1 << 30
    for n in sizes:
        got = run(x[:n], ids[:n], weights[:n], None, added.part(slice(0, n)))
        keep = [i for i in range(n) if i not in (1, 3, 4, 5, 6, 7)]
        assert torch.equal(got[keep], clean[:n][keep])
        assert n < 4 or not got[[1, 3]].isfinite().any()
        assert n < 8 or (
            not got[4].isfinite().all() and not got[6].any() and got[[5, 7]].isfinite().all()
        )
