"""attend_latent.cu and its launcher run thread by thread on the CPU: keys that are their values, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.attend import latent
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, Made, make, only, spec_of, worst
from pyspec.cuda.ops.attend.latent import LatentBuild
from pyspec.slots.kv_types import Q4_0, Q5_1

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
F8 = torch.float8_e4m3fn
CASES = {
    "first token": Case(3, 1, 64, torch.float16, [(0, 1), (0, 5)], n_value=48),
    "ragged": Case(
        5, 1, 128, torch.float16, [(0, 3), (255, 1), (127, 9), (1023, 2)], 32, pad=(5, 2), n_value=96
    ),
    "ragged bf16": Case(17, 1, 64, torch.bfloat16, [(17, 3), (700, 1)], 64, pad=(1, 1), n_value=64),
    "more heads than columns": Case(72, 1, 64, torch.float16, [(70, 2), (3, 1)], n_value=32),
    "small window": Case(6, 1, 64, torch.bfloat16, [(600, 5), (127, 2), (9, 4)], 16, 7, n_value=48),
    "window of one": Case(6, 1, 64, torch.float16, [(600, 5), (128, 1)], 16, 1, n_value=48),
    "drafter block": Case(4, 1, 64, torch.float16, [(1100, 8), (100, 8)], 16, 0, True, (8, 1), n_value=48),
    "q8_0": Case(6, 1, 128, torch.int8, [(0, 3), (127, 9), (260, 1)], 32, pad=(5, 2), n_value=96),
    "f8": Case(6, 1, 64, F8, [(17, 3), (300, 1)], 64, n_value=48),
    "q4_0": Case(6, 1, 64, Q4_0, [(17, 3), (300, 1)], 16, pad=(1, 1), n_value=32),
    "q5_1": Case(6, 1, 64, Q5_1, [(70, 2), (30, 1)], 16, n_value=64),
}
SCALED = {name: replace(case, scale=0.9) for name, case in CASES.items() if name in ("ragged", "q8_0")}


def run(case: Case, made: Made, q: Tensor, batch: object, build: LatentBuild | None = None) -> Tensor:
    return latent.bind(spec_of(case, CPU), build=build)(q, made.pool, batch, case.window)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_the_references_and_padding_comes_out_as_zeros(name: str, seed: int) -> None:
    case = CASES[name]
    made, n = make(case, CPU, seed), sum(width for _, width in case.seqs)
    want = attend_ref.bind(spec_of(case, CPU))(made.q[:n].double(), made.pool, made.plain, case.window)
    assert want.shape[-1] == case.n_value
    with emulated_gpu(seed=seed):
        out = run(case, made, made.q, made.batch)
        assert faults.record(CPU).tolist() == [0] * 5
    assert worst(out[:n], want) < case.tolerance
    assert not out[n:].any()
