"""What holds for attention of any kernels on any machine: rows of the reference, bits in company, graphs, pages that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from machines import NO_FAULT, Machine, same
from torch import Tensor

from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, Made, make, only, spec_of, worst
from pyspec.slots.batch import Batch

Bind = Callable[[Any], Any]


def wanted(case: Case, made: Made, batch: Batch | None = None) -> Tensor:
    """The reference's rows, of queries in float64."""
    batch = batch or made.plain
    q, spec = made.q[: batch.n_row].double(), spec_of(case, made.q.device)
    return attend_ref.bind(spec)(q, made.pool, batch, case.window, made.sinks)


def run(
    attend: Any, case: Case, made: Made, q: Tensor | None = None, batch: Batch | None = None
) -> Tensor:
    """A launch on what was made, or on other queries and another batch."""
    given = (case.window, made.sinks) if case.sinks else (case.window,)
    out: Tensor = attend(made.q if q is None else q, made.pool, batch or made.batch, *given)
    return out


def check_rows(machine: Machine, bind: Bind, case: Case, seed: int = 0, **settings: Any) -> None:
    """Every row is the reference's, padding comes out as zeros; a card gives the same bits again."""
    made = make(case, machine.device, seed)
    n, want = made.plain.n_row, wanted(case, made)
    with machine.started(**settings):
        attend = bind(spec_of(case, machine.device))
        out = run(attend, case, made)
        assert machine.is_emulated or torch.equal(out, run(attend, case, made))
        assert machine.faults().tolist() == NO_FAULT
    assert out.shape[1:] == (case.n_head, case.n_value or case.dim)
    assert worst(out[:n], want) < case.tolerance and not out[n:].any()


def check_company(
    machine: Machine,
    bind: Bind,
    case: Case,
    seed: int = 1,
    row_alone: Callable[[int, int], bool] = lambda past, width: True,
    **settings: Any,
) -> None:
    """A sequence has the same bits alone and in any company; so has a row of it, if `row_alone(its past, width)`."""
    made = make(case, machine.device, seed)
    with machine.started(**settings):
        attend = bind(spec_of(case, machine.device))
        out = run(attend, case, made)
        for i, (past, width) in enumerate(case.seqs):
            start = made.plain.starts[i]
            rows = {width - 1} if machine.is_emulated else {0, width // 2, width - 1}
            for first, n in ((0, width), *((row, 1) for row in rows if row_alone(past, width))):
                alone = run(attend, case, made, *only(made, i, first, n))
                assert torch.equal(out[start + first : start + first + n], alone), (i, first)


def check_graph(
    machine: Machine, bind: Bind, case: Case, shifts: tuple[int, ...], bucket: int | None = None
) -> None:
    """A graph serves batches of other lengths."""
    made = make(case, machine.device)
    b = replace(
        made.batch, hi=made.batch.hi.clone(), positions=made.batch.positions.clone(), bucket=bucket
    )
    with machine.started():
        attend = bind(spec_of(case, machine.device))
        replay, out = machine.captured(lambda: attend(made.q, made.pool, b, 0))
        for shift in shifts:
            b.hi.copy_(made.batch.hi + shift)
            b.positions.copy_(made.batch.positions + shift)
            replay()
            machine.waited()
            plain = replace(made.plain, hi=made.plain.hi + shift, positions=made.plain.positions + shift)
            assert worst(out, wanted(case, made, plain)) < case.tolerance, shift
        assert machine.faults().tolist() == NO_FAULT


def check_wild_page(
    machine: Machine, bind: Bind, op: int, case: Case, seq: int, column: int, page: int
) -> None:
    """A page that does not exist is reported; the other sequences have the bits that they have without it."""
    made = make(case, machine.device)
    for plane in made.pool.planes:  # the page that is read instead may have no owner
        if plane.dtype is not torch.int8:
            plane[plane.isnan()] = 0
    table, starts = made.batch.page_table.clone(), [*made.plain.starts, made.plain.n_row]
    table[seq, column] = page
    with machine.started(seed=5):
        attend = bind(spec_of(case, machine.device))
        want = run(attend, case, made)
        got = run(attend, case, made, None, replace(made.batch, page_table=table))
        machine.waited()
        index = page if -1 <= page < 1 << 31 else -1
        assert machine.faults().tolist() == [1, op, seq, index, made.pool.n_row // case.page_size]
        machine.faults().zero_()
    assert same(got[: starts[seq]], want[: starts[seq]]) or not seq
    assert same(got[starts[seq + 1] :], want[starts[seq + 1] :]) and bool(got.isfinite().all())


def check_rows_without_keys(machine: Machine, bind: Bind, case: Case, row: int) -> None:
    """They come out as zeros."""
    made = make(case, machine.device)
    hi = made.batch.hi.clone()
    hi[row] = 0
    with machine.started():
        out = run(bind(spec_of(case, machine.device)), case, made, None, replace(made.batch, hi=hi))
    assert not out[row].any() and bool(out.isfinite().all()) and out.any()


def check_large_pool(machine: Machine, bind: Bind) -> None:
    """6.5 GB each of keys and values."""
    case = Case(8, 4, 256, torch.float16, [(100, 3)], 16, spare=200_000)
    check_rows(machine, bind, case, 3)
