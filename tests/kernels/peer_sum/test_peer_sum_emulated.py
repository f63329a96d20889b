"""peer_sum.cu on the CPU: all ranks in one launch, their blocks one among the other, and ranks that do not come."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from emulated.gpu import CPU
from emulated.machine import Emulated, emulate, needs_compiler, order
from torch import Tensor

from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.peer_sum import cuda as peer_sum
from pyspec.engine.plan import memory_plan

CHUNK, BLOCKS = 64, 3
BOTH = peer_sum.SEND | peer_sum.SUM
ALL = BOTH | peer_sum.TAKE  # of a sum that is shared


def layout(n: int) -> peer_sum.Places:
    """Places of two chunks: blocks have one turn or two."""
    return peer_sum.Places(n, CHUNK, BLOCKS, 2 * CHUNK)


def buffers(n: int) -> list[Tensor]:
    made = torch.zeros(n, layout(n).n_bytes // 4)
    made[:, : layout(n).n_number] = -0.0
    return list(made)


def kernel(n: int) -> Emulated:
    return emulate("peer_sum", layout(n).defines)


def run(
    x: Tensor,
    places: list[Tensor],
    first: int = 0,
    limit: int = 0,
    steps: int = BOTH,
    name: str = "",
) -> tuple[Tensor, int]:
    """x [rank, n]: those of the ranks that launch. Returns their sums, and whether one gave up."""
    out, late = torch.full_like(x, torch.nan), torch.zeros(1, dtype=torch.int32)
    numbers = (np.int32(x.shape[1]), np.int32(first), np.int32(steps), np.int32(limit))
    args = (x, out, *places, *[places[0]] * (peer_sum.MOST_RANKS - len(places)), late, *numbers)
    grid = (min(BLOCKS, -(-x.shape[1] // CHUNK)), len(x))
    name = name or ("peer_sum_shared" if steps == ALL else "peer_sum")
    kernel(len(places)).kernel(name, peer_sum.SIGNATURE).launch(grid, peer_sum.THREADS, args)
    return out, int(late.item())


@pytest.mark.sampled(1, most=1)
@needs_compiler
@pytest.mark.parametrize("n_rank", [2, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [(BOTH,), (ALL,), (ALL, BOTH)], ids=["whole", "shared", "in turns"])
def test_all_ranks_have_the_sum_in_the_order_of_ranks(
    n_rank: int, seed: int, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gen, places = torch.Generator().manual_seed(seed), buffers(n_rank)
    monkeypatch.setattr(order, "seed", seed)
    monkeypatch.setattr(order, "resident", BLOCKS * n_rank)
    scale = torch.logspace(8, -8, n_rank)[:, None]
    way = itertools.cycle(steps)
    for n in (
        4,
        CHUNK,
        BLOCKS * CHUNK,
        CHUNK + 12,
        8,
        2 * BLOCKS * CHUNK,
        (BLOCKS + 1) * CHUNK + 4,
        2 * CHUNK,
    ):
        x = torch.randn(n_rank, n, generator=gen) * scale  # blocks come and go between calls
        x[:, ::3] = -0.0  # the neutral element
        out, late = run(x, places, steps=next(way))
        want = x[0].clone()
        for part in x[1:]:
            want = want + part
        assert not late and all(torch.equal(own, want) for own in out), n


@needs_compiler
def test_what_the_others_sent_before_is_there() -> None:
    """A rank that comes last does not wait; one that gets no answer gives up, if it may."""
    places, x = buffers(2), torch.randn(2, 8)
    assert run(x[:1], places, first=0, limit=20)[1] == 1
    out, late = run(x[1:], places, first=1, limit=20)
    assert not late and torch.equal(out[0], x[0] + x[1])


@needs_compiler
def test_ranks_that_take_turns_send_all_and_then_sum() -> None:
    """None waits for another's launch: each of them may run by itself. Calls in one launch may come between."""
    gen, places = torch.Generator().manual_seed(3), buffers(3)
    for n in (4, CHUNK + 12, BLOCKS * CHUNK, 8):
        x = torch.randn(3, n, generator=gen)
        for rank in (2, 0, 1):
            assert not run(x[rank : rank + 1], places, rank, 20, peer_sum.SEND)[1]
        for rank in (1, 2, 0):
            out, late = run(x[rank : rank + 1], places, rank, 20, peer_sum.SUM)
            assert not late and torch.equal(out[0], x[0] + x[1] + x[2]), (n, rank)


@needs_compiler
def test_ranks_that_take_turns_share_a_sum_in_three_launches() -> None:
    gen, places = torch.Generator().manual_seed(4), buffers(3)
    for n in (4, CHUNK + 12, 2 * BLOCKS * CHUNK, BLOCKS * CHUNK, 8):
        x, out = torch.randn(3, n, generator=gen), torch.full((3, n), torch.nan)
        for step, ranks in (
            (peer_sum.SEND, (2, 0, 1)),
            (peer_sum.SUM, (1, 2, 0)),
            (peer_sum.TAKE, (0, 2, 1)),
        ):
            for rank in ranks:
                part, late = run(x[rank : rank + 1], places, rank, 20, step, "peer_sum_shared")
                assert not late
                out[rank] = torch.where(part[0].isnan(), out[rank], part[0])
        assert torch.equal(out, (x[0] + x[1] + x[2]).expand(3, n)), n


@needs_compiler
def test_launches_that_take_turns_meet_between() -> None:
    said: list[str] = []

    names = {peer_sum.SEND: "send", peer_sum.SUM: "sum", peer_sum.TAKE: "take", BOTH: "both", ALL: "all"}

    class Kernel:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def launch(self, grid: object, block: int, args: list[object], *, overlap: bool) -> None:
            said.append(names[int(args[-2])] + self.kind)

    late, meets, large = torch.zeros(1, dtype=torch.int32), lambda: said.append("meet"), peer_sum.SHARED
    for n_rank, n, meet, want in (
        (2, 8, meets, ["send", "meet", "sum"]),
        (2, large, None, ["both"]),
        (4, large - 4, None, ["both"]),
        (4, large, None, ["all shared"]),
        (4, large, meets, ["send shared", "meet", "sum shared", "meet", "take shared"]),
    ):
        said.clear()
        peer_sum.PeerSum(Kernel(""), Kernel(" shared"), 0, buffers(n_rank), late, meet)(torch.zeros(n))
        assert said == want


@needs_compiler
def test_a_rank_that_is_told_that_another_is_lost_waits_for_nobody() -> None:
    places = buffers(2)
    places[0].view(torch.int32)[layout(2).n_bytes // 4 - 1] = 1
    for _ in range(3):  # and so do later launches of a graph
        assert run(torch.randn(1, 3 * CHUNK), places)[1] == 0, "it ends, without a limit"


def test_places_are_whole_chunks_and_memory_is_planned() -> None:
    for n in range(2, peer_sum.MOST_RANKS + 1):
        made = peer_sum.Places(n)
        assert made.place % made.chunk == 0 and made.most >= 136 * 5120, "a verify of eight slots"
        assert made.n_bytes < memory_plan.rank_bytes(n) - memory_plan.LIBRARY_BYTES


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    found = compile_cubin("peer_sum", arch, peer_sum.Places(4).defines, use_cache=False).resources
    assert set(found) == {"peer_sum", "peer_sum_shared"}
    assert not any(r.spill_bytes for r in found.values())


def test_ranks_go_on_without_it_where_one_can_not_have_it() -> None:
    """All ranks receive the objection of one, and the library sums."""
    said = ["", "no memory"]
    texts: list[Tensor] = []
    for text in said:
        peer_sum.agreed(text, CPU, lambda x: texts.append(x) or [x])
    assert peer_sum.agreed("", CPU, partial(lambda parts, x: parts, texts)) == "rank 1: no memory"
    launch, why = peer_sum.make(0, 2, CPU, lambda x: [x, x])
    assert launch is None and "runs on NVIDIA GPUs only" in why


def test_only_small_whole_rows_are_summed_so() -> None:
    takes = peer_sum.PeerSum(None, None, 0, buffers(2), torch.zeros(1)).takes
    assert takes(torch.zeros(3, 5120))
    assert not takes(torch.zeros(3, 5120).half())
    assert not takes(torch.zeros(0, 8))
    assert takes(torch.zeros(136, 5120)), "a verify of eight slots"
    assert not takes(torch.zeros(peer_sum.Places(2).most + 4))
    assert not takes(torch.zeros(7))
    assert not takes(torch.zeros(9)[1:])
    assert not takes(torch.zeros(8, 8).T)
