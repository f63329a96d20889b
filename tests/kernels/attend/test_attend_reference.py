"""The reference of `attend` against the formula, one row and head at a time in float64."""

import math

import pytest
import torch

from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import Case, make, spec_of
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import TYPES

CPU = torch.device("cpu")
SEQS = [(0, 3), (40, 1), (21, 9)]
PAIRS = [
    KvFormat.named(k, v)
    for k, v in (("f16", "q8_0"), ("q8_0", "f16"), ("f8_e4m3", "bf16"), ("f32", "f8_e4m3"))
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("window", "block", "cap"),
    [(0, False, 0.0), (7, False, 2.0), (-8, False, 0.0), (0, True, 1.5), (16, True, 0.0)],
)
@pytest.mark.parametrize("kv", [*map(KvFormat.both, TYPES.values()), *PAIRS], ids=lambda kv: kv.name)
def test_rows_are_weighted_means_of_what_they_see(
    kv: KvFormat, window: int, block: bool, cap: float, sinks: bool
) -> None:
    case = Case(6, 2, 64, kv.k, SEQS, 16, window, block, sinks=sinks, cap=cap, v_dtype=kv.v)
    made = make(case, CPU)
    b, spec = made.plain, spec_of(case, CPU)
    got = attend_ref.bind(spec)(made.q, made.pool, b, window, made.sinks)
    for s, seq in enumerate(b.seqs):
        k, v = made.pool.read(attend_ref.key_rows(b, s), torch.float64)
        for i in range(b.starts[s], b.starts[s + 1]):
            p = seq.n_past + i - b.starts[s]
            first, end = (
                max(0, p - window + 1) if window > 0 else p // 8 * 8 if window else 0,
                seq.n_past + seq.width if block else p + 1,
            )
            for head in range(6):
                logits = (k[first:end, head // 3] @ made.q[i, head].double()) / math.sqrt(64)
                weights = (cap * (logits / cap).tanh() if cap else logits).exp()
                below = weights.sum() + (
                    made.sinks[head].double().exp() if made.sinks is not None else 0
                )
                want = weights @ v[first:end, head // 3] / below
                assert (got[i, head] - want).norm() < 2e-6 * max(1, want.norm()), (s, i, head)


def test_a_sink_of_minus_infinity_changes_nothing_and_a_large_one_takes_all() -> None:
    case = Case(4, 2, 64, torch.float16, SEQS, 16, sinks=True)
    made = make(case, CPU)
    attend = attend_ref.bind(spec_of(case, CPU))
    none = attend(made.q, made.pool, made.plain, 0, torch.full((4,), -torch.inf))
    assert torch.allclose(none, attend(made.q, made.pool, made.plain, 0), atol=1e-6)
    assert attend(made.q, made.pool, made.plain, 0, torch.full((4,), 1e4)).abs().max() == 0
