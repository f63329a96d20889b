"""`attend` in Triton where keys are their values, against the reference, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from attend_checks import check_company, check_rows, check_wild_page
from machines import CPU, INTERPRETED
from sampling import few

from pyspec.cuda.ops.attend import latent_triton
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend import triton as attend_triton
from pyspec.cuda.ops.attend.cases import Case, spec_of
from pyspec.cuda.ops.attend.op import attend, check
from pyspec.slots.kv_types import Q4_0

F8 = torch.float8_e4m3fn
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CASES = {
    "first token": Case(3, 1, 64, torch.float16, [(0, 1), (0, 5)], n_value=48),
    "DeepSeek-V3": Case(16, 1, 576, torch.float16, [(70, 2), (300, 1)], 64, pad=(2, 1), n_value=512),
    "ragged": Case(5, 1, 128, torch.float16, [(0, 3), (255, 1), (127, 9)], 32, pad=(5, 2), n_value=96),
    "bf16": Case(17, 1, 64, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1), n_value=64),
    "f32": Case(6, 1, 80, torch.float32, [(17, 3), (270, 1)], 16, n_value=64),
    "a verify of 17 rows": Case(5, 1, 96, torch.float16, [(250, 17), (0, 1)], 16, n_value=64),
    "a prompt": Case(3, 1, 48, torch.float16, [(33, 100)], 16, n_value=32),
    "more heads than columns": Case(72, 1, 64, torch.float16, [(70, 2), (3, 1)], n_value=32),
    "small window": Case(6, 1, 64, torch.float16, [(600, 5), (127, 2), (9, 4)], 16, 7, n_value=48),
    "odd size": Case(5, 1, 24, torch.float16, [(40, 3), (0, 2)], 16, pad=(1, 1), n_value=16),
    "values in both pieces": Case(5, 1, 88, torch.float16, [(40, 3), (7, 2)], 16, n_value=80),
    "values are whole keys": Case(5, 1, 96, torch.int8, [(40, 3), (7, 2)], 16, n_value=96),
    "drafter block": Case(
        4, 1, 64, torch.float16, [(300, 8), (100, 8)], 16, 0, True, (8, 1), n_value=48
    ),
    "q8_0": Case(6, 1, 160, torch.int8, [(0, 3), (127, 9), (260, 1)], 32, pad=(5, 2), n_value=128),
    "f8": Case(6, 1, 104, F8, [(17, 3), (300, 1)], 64, n_value=80),
}


@pytest.mark.parametrize(
    "name", few(CASES, "ragged", "odd size", "q8_0", "values in both pieces", "f32")
)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str) -> None:
    assert attend_triton.limits(spec_of(CASES[name], CPU)) is None or not attend_triton.tri.interprets()
    check_rows(INTERPRETED, attend_triton.bind, CASES[name])


@pytest.mark.parametrize(
    "name", few(["ragged", "more heads than columns", "small window", "q8_0"], "ragged")
)
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str) -> None:
    check_company(INTERPRETED, attend_triton.bind, CASES[name])


def test_a_wild_page_is_reported_and_other_sequences_are_right() -> None:
    case = Case(3, 1, 64, torch.float16, [(40, 2), (33, 3)], 16, spare=0, n_value=48)
    check_wild_page(INTERPRETED, attend_triton.bind, attend_triton.GUARD.number, case, 0, 1, 99)


@pytest.mark.slow
def test_the_ops_own_check_passes() -> None:
    spec = attend_ref.AttendSpec(CPU, 5, 1, 96, 0.1, n_value=64)
    assert check(attend_triton.bind(spec), attend.reference.bind(spec), spec) is None


def test_what_it_does_not_take_is_said() -> None:
    spec = spec_of(CASES["ragged"], CPU)
    assert latent_triton.shape_limits(spec) is None
    assert "one head" in (latent_triton.shape_limits(replace(spec, n_kv_head=5)) or "")
    assert "1032 wide" in (latent_triton.shape_limits(replace(spec, head_dim=1032)) or "")
    packed = spec_of(replace(CASES["ragged"], dtype=Q4_0), CPU)
    assert "q4_0" in (latent_triton.shape_limits(packed) or "")
    for wide, pieces in ((576, (512, 64)), (512, (512, 0)), (24, (16, 16)), (104, (64, 64))):
        assert latent_triton.pieces_of(replace(spec, head_dim=wide)) == pieces
