"""rows.cu with RANKS on the CPU, thread by thread: the sum of ranks, and the rows of the product behind it, to the bits of two launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import EmulatedKernel, emulate, needs_compiler
from sampling import slow
from torch import Tensor

from pyspec.cuda import sum_rows
from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.linear.wgmma import PADS
from pyspec.cuda.ops.peer_sum import cuda as peer_sum
from pyspec.cuda.ops.rows.cuda import BLOCKED, ROW_MAJOR, TALL, RowsLaunch, defines
from pyspec.cuda.ops.rows.ref import Norm, PrepKind

FEW = 4  # rows of the product that reads blocks
TURN = threading.Lock()  # the machine runs one launch at a time


class Product:
    """Of few rows it reads blocks, of more those of warpgroup products."""

    def __init__(self, n_in: int, most: int = 9) -> None:
        self.blocked, self.tall = RowsLaunch(CPU, n_in, (8,)), RowsLaunch(CPU, n_in, PADS, TALL)
        self.most, self.packed = most, SimpleNamespace(type=None, n_in=n_in)

    def reads(self, n_row: int) -> RowsLaunch:
        return self.blocked if n_row <= FEW else self.tall

    def most_ready(self, norm: Norm) -> int:
        return self.most


class Ranks:
    """Threads that meet: launches of one come between those of the others, and none waits for another's."""

    def __init__(self, n: int) -> None:
        self.n, self.meeting, self.parts = n, threading.Barrier(n, timeout=60), [torch.empty(0)] * n
        self.places = []
        self.layout = peer_sum.Places(n, blocks=12, place=3 * peer_sum.CHUNK)
        for _ in range(n):
            place = torch.zeros(self.layout.n_bytes // 4)
            place[: self.layout.n_number] = -0.0
            self.places.append(place)

    def of(self, rank: int) -> Any:
        kernel = emulate("peer_sum", self.layout.defines).kernel("peer_sum", peer_sum.SIGNATURE)
        late = torch.zeros(1, dtype=torch.int32)
        peers = peer_sum.PeerSum(
            kernel, kernel, rank, self.places, late, lambda: self.meeting.wait() and None
        )
        peers.layout = self.layout
        own = SimpleNamespace(peers=peers, sum=peers, gather=partial(self.gather, rank))
        own.distrust_peers = lambda: setattr(own, "peers", None)
        return own

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x
        self.meeting.wait()
        found = list(self.parts)
        self.meeting.wait()
        return found

    def run(self, do: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.n) as pool:
            return [f.result() for f in [pool.submit(do, rank) for rank in range(self.n)]]


@contextmanager
def kernels() -> Iterator[None]:
    with emulated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_rows, "compile_cubin", lambda stem, arch, macros: emulate(stem, macros, arch))
        launch = EmulatedKernel.launch

        def one_at_a_time(*args: Any, **how: Any) -> None:
            with TURN:
                launch(*args, **how)

        patch.setattr(EmulatedKernel, "launch", one_at_a_time)
        yield


def made(ranks: Ranks, n_in: int, most: Callable[[int], int] = lambda rank: 9) -> list[tuple[Any, Any]]:
    """Each rank, and its launch for a reader; with a sum that has no reader."""
    weight = 1 + 0.1 * torch.randn(n_in, generator=torch.Generator().manual_seed(9))

    def load(rank: int) -> tuple[Any, Any]:
        own = ranks.of(rank)
        reader: Any = (Product(n_in, most(rank)), Norm(weight, 1e-6))
        found = sum_rows.sums_into(own, [None, reader])
        assert found[0] is None
        return own, found[1]

    return ranks.run(load)


@needs_compiler
@pytest.mark.parametrize("n_rank, n_in", [slow(2, 384), (3, 2688), slow(2, 2720)])
def test_the_sum_and_the_rows_are_those_of_two_launches(n_rank: int, n_in: int) -> None:
    """Bound, which compares them in all sizes; and then as a model runs it: sums of other kinds and sizes between."""
    with kernels():
        ranks = Ranks(n_rank)
        own = made(ranks, n_in)
        gen = torch.Generator().manual_seed(1)
        for n_row in (1, 9, 4, 5, 10, 2):
            x = torch.randn(n_rank, n_row, n_in, generator=gen)
            want = x[0]
            for part in x[1:]:
                want = want + part

            def go(rank: int, x: Tensor = x, want: Tensor = want, n_row: int = n_row) -> None:
                group, into = own[rank]
                total, launch = into(x[rank].clone()), into.product.reads(n_row)
                assert torch.equal(total, want)
                rows = launch.held(total, into.norm)
                assert (rows is None) == (n_row > into.most), "more go by a sum alone"
                if rows is not None:
                    got = rows.blocks.clone()
                    assert launch.held(total, into.norm) is None, "once"
                    launch(total, into.norm)
                    assert torch.equal(got.view(torch.int16), rows.blocks.view(torch.int16))
                assert torch.equal(group.sum(x[rank]), want), "a sum alone uses the same places"

            ranks.run(go)


@pytest.mark.slow
@needs_compiler
def test_ranks_agree_on_how_many_rows_go_so() -> None:
    with kernels():
        assert [into.most for _, into in made(Ranks(2), 384, lambda rank: (9, 5)[rank])] == [5, 5]
        assert [into for _, into in made(Ranks(2), 384, lambda rank: (9, 0)[rank])] == [None, None]


@needs_compiler
def test_a_kernel_that_is_wrong_on_one_rank_is_left_out_on_all(caplog: pytest.LogCaptureFixture) -> None:
    inner = sum_rows.SumRows.__call__

    def wrong(self: sum_rows.SumRows, x: Tensor, limit: int = 0) -> Tensor:
        out = inner(self, x, limit)
        if self.peers.rank == 1:
            self.product.reads(len(x)).blocks[0] += 1
        return out

    with kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_rows.SumRows, "__call__", wrong)
        found = made(Ranks(2), 384)
    assert [(group.peers, into) for group, into in found] == [(None, None)] * 2, (
        "numbers may lie where the next sum finds them"
    )
    assert "rank 1: 1 rows are not those of a sum and a launch behind it" in caplog.text


@needs_compiler
def test_rows_that_others_overwrote_are_not_held() -> None:
    with kernels():
        launch, x, norm = RowsLaunch(CPU, 384, (8,)), torch.randn(2, 384), Norm(torch.ones(384), 1e-6)
        launch.hold(x, norm, launch(x, norm))
        assert launch.held(x.clone(), norm) is None and launch.held(x, None) is None
        launch(x, norm)  # and this prepares rows there
        assert launch.held(x, norm) is None


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    for n_in, n_rank, layout in ((5120, 2, BLOCKED), (3072, 2, TALL), (7168, 8, ROW_MAJOR)):
        macros = defines(n_in, PrepKind.NORM, 0, layout) | peer_sum.Places(n_rank).defines
        assert not compile_cubin("rows", arch, macros, use_cache=False).resources["rows"].spill_bytes
