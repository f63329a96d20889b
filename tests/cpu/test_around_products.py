"""The CPU's kernels around products: against their references on hostile shapes, and the bits of rows beside others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forced import preloads
from hostile import ATTEND, CPU, Rig, attends, cpu_of, has_own_bits, rigs, sees_no_later_nan, small_rigs
from token_rigs import token_rigs

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda.ops.attend.cases import Case, make, spec_of
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.linear.cpu import gates
from pyspec.cuda.ops.moe.ref import activate
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
SMALL, TOKENS, ALL = dict(small_rigs()), dict(token_rigs()), dict(rigs())
BITS = [
    "ragged",
    "group 16",
    "wide rows",
    "f32",
    "q8_0 odd size",
    "sinks",
    "width 80 of f8",
    "width 9, pages of 3",
]


@pytest.mark.parametrize("name", SMALL)
def test_small_kernels_match_their_references(name: str) -> None:
    assert SMALL[name]() is None


@pytest.mark.parametrize("name", TOKENS)
def test_kernels_over_tokens_match_their_references(name: str) -> None:
    assert TOKENS[name]() is None


@pytest.mark.parametrize("name", ATTEND)
def test_attention_matches_the_reference(name: str) -> None:
    assert attends(ATTEND[name]) is None


@pytest.mark.parametrize(
    "name", [*BITS, "more heads than a pass", "17 rows", "one head a group, a prompt"]
)
def test_bits_of_a_row_are_its_own(name: str) -> None:
    assert has_own_bits(ATTEND[name]) is None


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (6, 2)])
def test_a_row_never_reads_a_later_one(heads: tuple[int, int]) -> None:
    """Causal rows of one block see different keys, and a key that a row must not see may be NaN."""
    assert sees_no_later_nan(Case(*heads, 64, torch.float16, [(250, 9), (30, 40)], 16)) is None


def test_what_is_not_there_is_not_read() -> None:
    rig: Rig = ALL["what is not there"]
    assert rig() is None


def test_a_recorded_call_reads_its_batch_again() -> None:
    """A bucket's call serves other lengths and pages at the same addresses."""
    case = Case(8, 2, 64, torch.float16, [(40, 2), (300, 1)], pad=(1, 1))
    made, other = make(case, CPU), make(case, CPU, seed=5)
    run, batch = cpu_of(attend, spec_of(case, CPU)), made.batch
    recorded = Recorded(lambda: run(made.q, made.pool, batch, 0, None), TapeMemory())
    want = run(made.q, made.pool, batch, 0, None).clone()
    assert torch.equal(recorded.replay(), want)
    batch.hi.copy_(other.batch.hi), batch.lo.add_(3), batch.row_seq.copy_(torch.tensor([0, 1, 1, -1]))
    again = run(made.q, made.pool, batch, 0, None)
    assert torch.equal(recorded.replay(), again) and not torch.equal(again, want)


def test_norms_and_best_tokens_are_recorded() -> None:
    """Their outputs are the recording's, and their inputs are read again."""
    x, rows, weight = torch.randn(4, 96), torch.tensor([3, 0]), torch.randn(96)
    normed, found = cpu_of(norms, NormsSpec(CPU, 96, 1e-6)), cpu_of(best, best.shapes(CPU)[0])
    recorded = Recorded(
        lambda: (*normed.picked(x, weight, rows), found.pairs(x), found.tokens(x)), TapeMemory()
    )
    x.copy_(torch.randn(4, 96)), rows.copy_(torch.tensor([1, 1]))
    y, some, pairs, tokens = recorded.replay()
    assert torch.equal(y, normed(x, weight)) and torch.equal(some, y[rows])
    assert torch.equal(tokens, x.argmax(-1)) and torch.equal(pairs[0].long(), tokens)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["plain", "sanitized"])
def test_other_builds_match_too(way: str, tmp_path: Path) -> None:
    """The plain path, which every CPU has; no access out of bounds or undefined step in the best one."""
    cxx = build.compiler()
    assert cxx is not None
    env = dict(os.environ)
    if way == "sanitized":
        env |= {
            "LD_PRELOAD": preloads(cxx),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
    command = [sys.executable, str(Path(__file__).with_name("forced.py")), way, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("limit", [0.01, 0.4, 7.0, 16.0])
def test_gates_are_cut_behind_silu_below_zero(limit: float) -> None:
    both = 9 * torch.randn(5, 90, generator=torch.Generator().manual_seed(4))
    gate, up = both.chunk(2, 1)
    want = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    assert torch.allclose(gates(both, None, gelu=False, limit=-limit), want, atol=1e-6, rtol=2e-6)
    assert torch.allclose(activate(gate, up, -limit), want, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_and_ups_that_are_no_numbers_stay_none_at_a_limit(gelu: bool) -> None:
    both = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    both[0, 3] = both[1, 25] = torch.nan
    assert gates(both, None, gelu=gelu, limit=2.0).isnan().nonzero().tolist() == [[0, 3], [1, 5]]
