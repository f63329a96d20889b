"""DeepSeek-V4 over ranks whose streams sum what goes back into them, emulated on the CPU: the bits of sums of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_bench import FIXTURES, RankBench, together
from torch import Tensor

from pyspec.cuda import fuse, sum_streams
from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.ref import Added, MoeSpec, Stacks, combine
from pyspec.cuda.ops.peer_sum import cuda as peer_sum
from pyspec.cuda.ops.rows.cuda import Rows, Shares
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.ops.streams import cuda as streams_cuda
from pyspec.models import deepseek4

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from emulated.machine import emulate, needs_compiler
from test_emulated_sum_rows import Ranks, kernels

CAPTURED = SimpleNamespace(capturable=True)
Heard = list[tuple[int, str, int]]


class Experts:
    """The reference's, which leave what each of them gave to whoever sums it, as kernels do."""

    def __init__(self, spec: MoeSpec, stacks: Stacks) -> None:
        self.run = moe_ref.bind(spec)(stacks)

    def prepare(self, x: Tensor, norm: Norm) -> Rows:
        return Rows(norm(x), x, x, len(x), len(x))

    def room(self, n_row: int) -> None:
        raise AssertionError("the reference's router puts rows nowhere")

    def each(self, ready: Rows, ids: Tensor, weights: Tensor) -> Tensor:
        ones = torch.ones_like(weights[:, :1])
        return torch.stack([self.run(ready.blocks, ids[:, i : i + 1], ones) for i in range(ids.shape[1])], 1)

    def shares(self, ready: Rows, ids: Tensor, weights: Tensor, added: Added) -> Shares:
        y = self.each(ready, ids, weights)
        return Shares(y.flatten(0, 1), weights, None, None, added.residual, 0)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, norm: Norm, added: Added, ready: Rows) -> Tensor:
        return combine(self.each(ready, ids, weights), weights, added)


@contextmanager
def emulated(heard: Heard) -> Iterator[None]:
    """Streams bound to their kernels; heard: of each merge the rank, what it was given, of how many rows."""
    inner = sum_streams.SumStreams.merge_split

    def merge_split(self: sum_streams.SumStreams, y: Tensor | Shares, x: Tensor, *more: Any, **told: Any) -> Any:
        kind = "shares" if isinstance(y, Shares) else "rows"
        heard.append((self.ranks.rank.index, kind if self._few(len(x)) is not None else "sum", len(x)))
        return inner(self, y, x, *more, **told)

    with kernels(), pytest.MonkeyPatch.context() as patch:
        for name, bind in (("streams", streams_cuda.bind), ("moe", lambda spec: partial(Experts, spec))):
            patch.setattr(deepseek4, name, SimpleNamespace(bind=bind, chosen=lambda spec: CAPTURED))
        patch.setattr(sum_streams.SumStreams, "merge_split", merge_split)
        yield


def with_peers(ranks: Collective, places: Ranks) -> None:
    """They reach each other's memory, and take turns with the one device."""
    kernel = emulate("peer_sum", places.layout.defines).kernel("peer_sum", peer_sum.SIGNATURE)
    late = torch.zeros(1, dtype=torch.int32)
    ranks.peers = peer_sum.PeerSum(kernel, ranks.rank.index, places.places, late, lambda: None)
    ranks.peers.layout = places.layout
    ranks.peers.meet = lambda: places.meeting.wait() and None


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek4", "deepseek4_pro"])
def test_a_forward_has_the_bits_of_sums_of_their_own(name: str) -> None:
    heard: Heard = []

    def forwards(ranks: Collective, is_on: bool) -> list[Tensor]:
        if is_on:
            with_peers(ranks, places)
        return RankBench(FIXTURES / f"{name}.gguf", ranks).forwards()

    with emulated(heard):
        places = Ranks(2)
        want = together(2, lambda ranks: forwards(ranks, False))
        assert {kind for _, kind, _ in heard} == {"sum"}
        heard.clear()
        got = together(2, lambda ranks: forwards(ranks, True))
    assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    for rank in range(2):
        mine = [(kind, n) for r, kind, n in heard if r == rank]
        assert {kind for kind, n in mine if n > sum_streams.MOST} == {"sum"}
        assert {kind for kind, n in mine if streams_cuda.SUMMED < n <= sum_streams.MOST} == {"rows"}
        assert {kind for kind, n in mine if n <= streams_cuda.SUMMED} == {"rows", "shares"}


@needs_compiler
@pytest.mark.slow
def test_experts_that_take_rows_in_parts_sum_what_they_gave_even_of_a_last_part_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which streams would take, were it alone."""
    with emulated([]):
        want = RankBench(FIXTURES / "deepseek4.gguf", None).forwards()
        monkeypatch.setattr(fuse, "at_once", lambda route, experts, n, *norms: [slice(0, n - 1), slice(n - 1, n)] if n > 4 else [slice(n)])  # fmt: skip
        got = RankBench(FIXTURES / "deepseek4.gguf", None).forwards()
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(got, want, strict=True))
