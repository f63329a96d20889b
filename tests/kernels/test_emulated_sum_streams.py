"""streams.cu with RANKS on the CPU, thread by thread: sums of ranks on their way into the streams, to the bits of a sum and a launch behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import CPU
from emulated.machine import needs_compiler
from test_emulated_sum_rows import Ranks, kernels
from torch import Tensor

from pyspec.cuda import sum_streams
from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.peer_sum import cuda as peer_sum
from pyspec.cuda.ops.rows.cuda import Place, RowsLaunch, Shares
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.cuda.ops.streams.ref import StreamMix, StreamsSpec, TorchStreams

SPEC = StreamsSpec(CPU, 4, 132, 2, 1e-6, 1e-6)  # columns that end within a warp: two CTAs a row


def made(ranks: Ranks, spec: StreamsSpec = SPEC) -> list[tuple[Any, sum_streams.SumStreams]]:
    """Of each rank: itself, and its streams."""

    def load(rank: int) -> tuple[Any, sum_streams.SumStreams]:
        own = ranks.of(rank)
        return own, sum_streams.summing(own, streams_cuda.bind(spec))

    return ranks.run(load)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def given(spec: StreamsSpec, n_row: int, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Streams, and how they are written and mixed."""
    shapes = (n_row, 4, spec.n), (n_row, 4), (n_row, 4, 4)
    x, post, comb = (torch.randn(*shape, generator=gen) for shape in shapes)
    return x, post, comb


def bits(found: tuple[Tensor, tuple[Tensor, ...]]) -> list[Tensor]:
    return [t.view(torch.int32) for t in (found[0], *found[1])]


def same(found: Iterable[Tensor], want: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@needs_compiler
@pytest.mark.parametrize(
    ("n_rank", "n", "blocks", "most"), [(2, 132, 12, 8), (2, 132, 4, 8), (3, 64, 12, 3), (8, 64, 12, 1)]
)
def test_streams_are_those_of_a_sum_and_a_launch_behind_it(
    n_rank: int, n: int, blocks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound, which compares them in all sizes; and then as a model runs it: sums of other kinds and sizes between. A CTA has one row, or several at
    once, or one batch after the other."""
    monkeypatch.setattr(sum_streams, "MOST", most)
    spec = replace(SPEC, n=n)
    with kernels():
        ranks, gen = Ranks(n_rank, blocks), torch.Generator().manual_seed(1)
        own = made(ranks, spec)
        mix = streams_cuda.random_mix(24, spec, gen)
        for n_row in (1, 8, 2, 3, 9, 4)[: 6 if most == 8 else 4]:
            beside = given(spec, n_row, gen)
            parts = torch.randn(n_rank, n_row, n, generator=gen) * torch.logspace(4, -4, n_rank)[:, None, None]
            parts[:, :, ::3] = -0.0
            ranks.run(lambda rank, parts=parts, beside=beside: compare(*own[rank], rank, parts, beside, mix))
            assert all(launch.few.most == most for _, launch in own)  # type: ignore[union-attr]
            is_few = n_row <= min(most, streams_cuda.SUMMED)
            assert all(launch.sums_of(n_row) == is_few for _, launch in own)
            if not is_few:
                continue
            shares = [list(streams_cuda.shares_and_sums(n_row, n, CPU, gen)) for _ in range(n_rank)]
            for of in zip(*shares, strict=True):
                want = bits(own[0][1].streams.merge_split(in_order([t for _, t in of]), *beside, mix))
                got = ranks.run(lambda rank, of=of, beside=beside: bits(own[rank][1].merge_split(of[rank][0], *beside, mix)))  # fmt: skip
                assert all(same(found, want) for found in got)


def compare(
    group: Any,
    launch: sum_streams.SumStreams,
    rank: int,
    parts: Tensor,
    beside: tuple[Tensor, Tensor, Tensor],
    mix: StreamMix,
) -> None:
    """On each rank: all that streams do with its part."""
    y, total, plain, n = parts[rank], in_order(list(parts)), launch.streams, parts.shape[2]
    want = bits(plain.merge_split(total + 0.0, *beside, mix))
    assert same(bits(launch.merge_split(y, *beside, mix)), want), len(y)
    assert torch.equal(launch.merge(y, *beside), plain.merge(total, *beside))
    assert torch.equal(group.sum(y), total), "a sum alone uses the same places"
    if n % 32 == 0:
        rows = RowsLaunch(CPU, n, (16,))
        place = Place(rows, rows.blocks, 1.0, Norm(torch.ones(n), 1e-6))
        assert same(bits(launch.merge_split(y, *beside, mix, place)), want), "rows go where the next product reads"
    assert same(launch.split(beside[0], mix), plain.split(beside[0], mix))


def alone(limit: int) -> tuple[Ranks, list[sum_streams.FewSummed]]:
    """Of each of two ranks what sums and merges, which nobody has compared: each launch is one, of both steps or of one."""
    ranks, few = Ranks(2), []
    for rank in range(2):
        peers, launch = ranks.of(rank).peers, streams_cuda.bind(SPEC)
        own = sum_streams._kernels(CPU, SPEC.n, SPEC.n_iter, ranks.layout)
        few.append(sum_streams.FewSummed(peers, launch, own, 8, limit))
    return ranks, few


@needs_compiler
@pytest.mark.parametrize("n_row", [1, 3, 8])
def test_a_rank_that_comes_last_waits_for_nobody_and_one_that_is_left_alone_gives_up(n_row: int) -> None:
    with kernels():
        _, few = alone(limit=20)
        gen = torch.Generator().manual_seed(n_row)
        x, post, comb = given(SPEC, n_row, gen)
        mix, parts = streams_cuda.random_mix(24, SPEC, gen), torch.randn(2, n_row, SPEC.n, generator=gen)
        want = bits(streams_cuda.bind(SPEC).merge_split(in_order(list(parts)), x, post, comb, mix))

        def launched(rank: int, *steps: int) -> list[Tensor]:
            few[rank].peers.steps = lambda: iter(steps)
            return bits(few[rank](parts[rank], x, post, comb, mix))

        for _ in range(3):  # places of even and odd calls
            launched(0, peer_sum.SEND)
            assert same(launched(1, peer_sum.SEND | peer_sum.SUM), want)
            assert same(launched(0, peer_sum.SUM), want)
            assert not any(f.peers.late.item() for f in few)
        launched(0, peer_sum.SEND | peer_sum.SUM)
        assert few[0].peers.late.item() == 1


@needs_compiler
def test_a_rank_that_is_told_that_another_is_lost_waits_for_nobody() -> None:
    with kernels():
        ranks, few = alone(limit=0)
        ranks.places[0].view(torch.int32)[ranks.layout.n_bytes // 4 - 1] = 1
        few[0].peers.steps = lambda: iter([peer_sum.SEND | peer_sum.SUM])
        gen = torch.Generator().manual_seed(0)
        mix = streams_cuda.random_mix(24, SPEC, gen)
        for n_row in (1, 8, 4):
            x, post, comb = given(SPEC, n_row, gen)
            few[0](torch.randn(n_row, SPEC.n, generator=gen), x, post, comb, mix)
        assert few[0].peers.late.item() == 0, "it ends, without a limit"


@needs_compiler
def test_ranks_agree_on_how_many_rows_go_so(monkeypatch: pytest.MonkeyPatch) -> None:
    most = sum_streams.most_rows
    with kernels():
        ranks = Ranks(2)
        for limits, want in (((8, 5), 5), ((8, 0), None)):
            found = iter(limits)
            monkeypatch.setattr(sum_streams, "most_rows", lambda n, layout, found=found: next(found))
            for _, launch in made(ranks):
                assert (None if launch.few is None else launch.few.most) == want
        monkeypatch.setattr(sum_streams, "most_rows", most)

        def load(rank: int) -> sum_streams.SumStreams:
            own = streams_cuda.bind(SPEC) if rank else TorchStreams(SPEC)
            return sum_streams.summing(ranks.of(rank), own)

        assert [launch.few for launch in ranks.run(load)] == [None, None], "one has the reference alone"


@needs_compiler
@pytest.mark.parametrize("where", [Tensor, Shares])
def test_a_kernel_that_is_wrong_on_one_rank_is_left_out_on_all(where: type, caplog: pytest.LogCaptureFixture) -> None:
    inner = sum_streams.FewSummed.__call__

    def wrong(self: sum_streams.FewSummed, y: Any, *given: Any) -> Any:
        out = inner(self, y, *given)
        if self.peers.rank == 1 and isinstance(y, where):
            out[0][0] += 1
        return out

    with kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_streams.FewSummed, "__call__", wrong)
        found = made(Ranks(2))
    assert [(group.peers, launch.few) for group, launch in found] == [(None, None)] * 2, (
        "numbers may lie where the next sum finds them"
    )
    what = "" if where is Tensor else " of what experts gave"
    assert f"rank 1: 1 rows{what} are not those of a sum and a launch behind it" in caplog.text
    assert not found[0][1].sums_of(1), "experts sum what they gave, and then ranks do"


@needs_compiler
def test_ranks_that_another_check_has_made_distrust_their_places_use_them_no_more() -> None:
    with kernels():
        ranks = Ranks(2)
        own = made(ranks)
        gen = torch.Generator().manual_seed(0)
        x, post, comb = given(SPEC, 2, gen)
        mix, y = streams_cuda.random_mix(24, SPEC, gen), torch.randn(2, SPEC.n, generator=gen)
        before = [place.clone() for place in ranks.places]
        for group, launch in own:
            group.distrust_peers()
            launch.ranks = group
            group.sum = lambda x: 2 * x
            want = launch.streams.merge_split(2 * y, x, post, comb, mix)
            assert not launch.sums_of(2)
            assert same(bits(launch.merge_split(y, x, post, comb, mix)), bits(want))
        assert same((t.view(torch.int32) for t in ranks.places), (t.view(torch.int32) for t in before))


def test_rows_that_go_so_have_places_and_are_few() -> None:
    for n in (64, 132, 4096, 7168, 16384):
        for n_rank in range(2, peer_sum.MOST_RANKS + 1):
            layout = peer_sum.Places(n_rank)
            most, n_chunk = sum_streams.most_rows(n, layout), -(-n // streams_cuda.THREADS)
            assert most <= streams_cuda.FEW and most * n * 16 * (n_rank - 1) <= sum_streams.SENT
            for n_row in range(1, most + 1):
                lines = min(n_row, layout.blocks // n_chunk)
                assert -(-n_row // lines) * sum_streams.NUMBERS <= layout.place and lines * n_chunk <= layout.blocks
    assert [sum_streams.most_rows(n, peer_sum.Places(2)) for n in (4096, 7168)] == [8, 8], "Flash and Pro"
    assert sum_streams.most_rows(4096, peer_sum.Places(2, blocks=31)) == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for n, n_rank in ((64, 3), (4096, 2), (7168, 8)):
        macros = streams_cuda.defines(n, 20) | peer_sum.Places(n_rank).defines
        found = compile_cubin("streams", arch, macros, use_cache=False).resources
        assert set(found) == set(streams_cuda.MERGES) and not any(of.spill_bytes for of in found.values())
        assert all(of.registers * streams_cuda.THREADS * 2 <= 65536 for of in found.values())
