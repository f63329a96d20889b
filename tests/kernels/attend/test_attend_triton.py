"""`attend` in Triton against the reference, in the interpreter; and compiled for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from attend_cases import CASES, MIXED
from attend_checks import (
    check_company,
    check_graph,
    check_rows,
    check_rows_without_keys,
    check_wild_page,
    run,
)
from machines import CPU, INTERPRETED
from sampling import few

from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.cases import Case, make, spec_of
from pyspec.cuda.ops.attend.shared import Workspace

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def small(case: Case) -> Case:
    """As many heads a group, and all else, of fewer groups, keys and rows."""
    n_kv = min(case.n_kv, 2)
    seqs = [(min(past, 600), min(width, 7)) for past, width in case.seqs][:3]
    return replace(
        case,
        n_head=case.n_head // case.n_kv * n_kv,
        n_kv=n_kv,
        seqs=seqs,
        pad=(min(case.pad[0], 3), case.pad[1]),
    )


def test_a_row_and_a_first_token_are_the_references() -> None:
    case = Case(4, 2, 64, torch.float16, [(37, 1), (0, 3)], pad=(2, 1), sinks=True)
    check_rows(INTERPRETED, attend_triton.bind, case)


@pytest.mark.parametrize("name", MIXED)
def test_keys_and_values_may_have_different_types(name: str) -> None:
    check_rows(INTERPRETED, attend_triton.bind, MIXED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str) -> None:
    check_rows(INTERPRETED, attend_triton.bind, small(CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one head a group", "q8_0 odd size", "sinks", "drafter block"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str) -> None:
    check_company(INTERPRETED, attend_triton.bind, small(CASES[name]))


@pytest.mark.parametrize("n_once", few([1, 2], 1))
@pytest.mark.parametrize("bucket", few([None, 10], 10))
def test_some_tiles_at_a_time_are_all_of_them_to_the_bit(
    bucket: int | None, n_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial sums of all tiles would take more memory than there is; rows without a sequence are zeros in any pass."""
    case = Case(12, 2, 64, torch.float16, [(300, 5), (0, 3), (40, 2)], pad=(3, 1), sinks=True)
    made = make(case, CPU)
    batch = replace(made.batch, bucket=bucket and len(made.q))
    whole = run(attend_triton.bind(spec_of(case, CPU)), case, made, None, batch)
    monkeypatch.setattr(attend_triton, "workspace", Workspace)
    n_split = attend_triton.n_splits(
        batch.page_table.shape[1] * batch.page_size if bucket else max(batch.max_hi)
    )
    size, launched = attend_triton.tile_floats(spec_of(case, CPU), 32, n_split), []
    monkeypatch.setattr(attend_triton, "FEWEST_FLOATS", n_once * size + 1)
    monkeypatch.setattr(attend_triton, "MOST_FLOATS", n_once * size + 1)
    launch = attend_triton.tri.launch
    monkeypatch.setattr(
        attend_triton.tri, "launch", lambda *ask: (launched.append(ask[1][0]), launch(*ask))
    )
    attend = attend_triton.bind(spec_of(case, CPU))
    for _ in range(2):
        launched.clear()
        assert torch.equal(attend(made.q, made.pool, batch, case.window, made.sinks), whole)
        assert max(launched[::2]) == n_once and len(launched) > 2
        monkeypatch.setattr(
            attend_triton, "MOST_FLOATS", 1 << 26
        )  # no more than there is room for is as good
    assert len(attend.spaces.buffers) == 1


@pytest.mark.slow
def test_a_replay_serves_batches_of_other_lengths_in_the_same_grid() -> None:
    case = Case(4, 2, 64, torch.float16, [(600, 4), (400, 4)])
    check_graph(INTERPRETED, attend_triton.bind, case, (0, -1, -399), bucket=8)


@pytest.mark.parametrize("page", [1 << 33, -5, 1000])
def test_a_page_out_of_the_pool_is_reported_and_harms_no_other_sequence(page: int) -> None:
    case = Case(2, 1, 64, torch.float16, [(37, 1), (40, 1)])
    check_wild_page(INTERPRETED, attend_triton.bind, attend_triton.GUARD.number, case, 1, 2, page)


def test_rows_without_keys_come_out_as_zeros() -> None:
    case = Case(2, 1, 64, torch.float16, [(30, 3)])
    check_rows_without_keys(INTERPRETED, attend_triton.bind, case, 1)
