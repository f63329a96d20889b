"""seen_pages.cu, thread by thread on the CPU and on a card, against the reference; and attention over its pages is that over the tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated.gpu import emulated_gpu
from emulated.machine import needs_compiler
from machines import CPU, NO_FAULT, Machine, cases, compiled

from pyspec.cpu import build
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.ops.attend import cpu as attend_cpu
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, worst
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.index_rows.cases import fill, pool_for
from pyspec.cuda.ops.ragged import Ragged, place
from pyspec.cuda.ops.seen_pages import cuda as seen_cuda
from pyspec.cuda.ops.seen_pages import ref as seen_ref
from pyspec.cuda.ops.seen_pages.ref import SeenPagesSpec
from pyspec.slots.kv_types import F16, F32, Q4_0, Q8_0, KvFormat, KvType

KEYS = SeenPagesSpec(CPU, 1, 7)  # of single keys, as latent attention's indexer chooses them
CASE = Ragged([(40, 5), (0, 3), (6, 1), (333, 1)], 16, (3, 2))
SPECS = [SeenPagesSpec(CPU, ratio, top_k) for ratio, top_k in ((4, 3), (3, 4), (16, 2), (1, 5))]


@cases("spec", both=SPECS)
def test_pages_are_the_references(machine: Machine, spec: SeenPagesSpec) -> None:
    spec = replace(spec, device=machine.device)
    with machine.started():
        own, other = seen_cuda.bind(spec), seen_ref.bind(spec)
        assert seen_cuda.check(own, other, spec) is None
        assert machine.faults().tolist() == NO_FAULT
        late = seen_cuda.check(
            lambda chosen, batch: own(chosen, replace(batch, positions=batch.positions + 1)), other, spec
        )
        assert (late is None) == (spec.ratio == 1), (
            "without tokens behind blocks all positions are alike"
        )


@cases(both=[()])
def test_a_page_out_of_bounds_is_reported(machine: Machine) -> None:
    spec = replace(SPECS[0], device=machine.device)
    batch = place(Ragged([(20, 1)]), spec.device).plain
    chosen = torch.tensor([[1, 1 << 20, -1]], dtype=torch.int32, device=spec.device)
    with machine.started():
        seen_cuda.bind(spec)(chosen, batch)
        assert machine.faults().tolist()[:3] == [1, seen_cuda.GUARD.number, 0]
        machine.faults().zero_()


@pytest.mark.parametrize("kv", [F32, F16, Q8_0, Q4_0])
@pytest.mark.parametrize("ratio", [4, 3])
def test_attention_over_chosen_blocks_is_that_over_their_tokens(kv: KvType, ratio: int) -> None:
    """Of each row alone, by the reference over a mask; memory that no row sees holds NaN."""
    case = Case(4, 2, 32, kv, [(0, 5), (37, 1), (90, 7)], 16)
    made, spec = make(case, CPU), SeenPagesSpec(CPU, ratio, 3)
    batch, at = made.plain, made.plain.positions
    gen = torch.Generator().manual_seed(1)
    chosen = torch.full((len(at), 3), -1, dtype=torch.int32)
    own = AttendSpec(CPU, 4, 2, 32, 32**-0.5, KvFormat.both(kv))
    wants = []
    for row, p in enumerate(at.tolist()):
        taken = torch.randperm((p + 1) // ratio, generator=gen)[:3].sort().values
        chosen[row, : len(taken)] = taken.int()
        tail = range((p + 1) // ratio * ratio, p + 1)
        seen = [ratio * int(b) + i for b in taken for i in range(ratio)] + list(tail)
        seq = int(batch.row_seq[row])
        pages = batch.page_table[seq]
        rows = torch.tensor([int(pages[t // 16]) * 16 + t % 16 for t in seen])
        k, v = (x.repeat_interleave(2, 1) for x in made.pool.read(rows, torch.float32))
        weights = (torch.einsum("hd,khd->hk", made.q[row], k) * 32**-0.5).softmax(-1)
        wants.append(torch.einsum("hk,khd->hd", weights, v))
    seen_batch = seen_ref.bind(spec)(chosen, batch)
    for run in (attend_ref.bind(own), attend.bind(own)):
        got = run(made.q[: len(at)], made.pool, seen_batch)
        assert (got - torch.stack(wants)).abs().max() < 1e-4


KINDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")),
    pytest.param("cuda", marks=needs_compiler),
]


@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention_over_blocks_of_one_token_is_that_over_the_chosen_keys_alone(kind: str) -> None:
    """By hand, with a softmax over each row's keys."""
    placed, gen = place(CASE, CPU), torch.Generator().manual_seed(3)
    pool = pool_for(placed, 1, 64, torch.float16, CPU)
    fill(pool, placed.plain, gen)
    spec = AttendSpec(CPU, 6, 1, 64, 0.125, KvFormat.named("f16"), n_value=48, scattered=True)
    n = placed.plain.n_row
    chosen = torch.full((len(placed.batch.positions), KEYS.top_k), -1, dtype=torch.int32)
    for r, at in enumerate(placed.plain.positions.tolist()):
        taken = torch.randperm(at + 1, generator=gen)[: KEYS.top_k].sort().values
        chosen[r, : len(taken)] = taken.int()
    q = torch.randn(len(chosen), 6, 64, generator=gen)
    if kind == "cuda":
        with emulated_gpu(seed=2):
            seen = seen_cuda.bind(KEYS)(chosen, placed.batch)
            got = attend_cuda.bind(spec)(q, pool, seen)
        assert not got[n:].any()
    else:
        bind = attend_ref.bind if kind == "torch" else attend_cpu.bind
        assert kind != "cpu" or attend_cpu.limits(spec) is None
        got = bind(spec)(q[:n], pool, seen_ref.bind(KEYS)(chosen[:n], placed.plain))
    want = torch.zeros(n, 6, 48)
    for r in range(n):
        at = chosen[r][chosen[r] >= 0].long()
        pages = placed.plain.page_table[placed.plain.row_seq[r], at // 16]
        keys = pool.read(pages * 16 + at % 16, torch.float32)[0][:, 0]
        want[r] = (q[r] @ keys.T * 0.125).softmax(-1) @ keys[:, :48]
    assert worst(got[:n], want) < TOLERANCE[torch.float16]


def test_no_kernel_starts_before_the_pages_are_there() -> None:
    """Attention reads a batch's layout before it waits."""
    source = Path(seen_cuda.__file__).with_name("seen_pages.cu").read_text()
    assert "wait_for_predecessor();" in source and "let_successor_start();" not in source


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    assert set(compiled("seen_pages", arch, seen_cuda.FILE.defines(KEYS))) == {"seen_pages"}
