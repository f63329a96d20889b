"""The way that a sum of ranks takes, without other ranks: the library's results and the others' are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pyspec.cuda.collective import SMALL, Collective
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.rank import Rank
from pyspec.cuda.sum_rows import SumRows


class Alone(Collective):
    """One of `n` ranks on a GPU without their memory; the others have 10, 100 ... times its numbers."""

    def __init__(self, n: int) -> None:
        self.rank, self.capturable, self._is_gpu, self.peers = Rank(0, n), True, True, None
        self.heard: list[tuple[str, int]] = []
        self._group = SimpleNamespace(allreduce=self._library)

    def _library(self, tensors: list[Tensor]) -> SimpleNamespace:
        self.heard.append(("library", tensors[0].numel()))
        tensors[0].mul_(sum(10**i for i in range(self.rank.n)))
        return SimpleNamespace(wait=lambda: None)

    def _all(self, x: Tensor) -> list[Tensor]:
        self.heard.append(("gathered", x.numel()))
        return [x * 10**i for i in range(self.rank.n)]


@pytest.mark.parametrize(
    ("n", "exact", "many", "ways"),
    [
        (3, False, False, ["gathered"]),
        (3, False, True, ["library"]),
        (2, True, True, ["library"]),
        (3, True, True, ["gathered", "gathered", "gathered"]),
        (3, True, False, ["gathered"]),
    ],
)
def test_the_library_sums_what_is_large_but_for_exact_sums_of_more_than_two(
    n: int, exact: bool, many: bool, ways: list[str]
) -> None:
    use(KernelContext(is_exact=exact))
    ranks, x = Alone(n), torch.arange(2 * SMALL // 4 + 24 if many else 24).float().view(-1, 8)
    want = x * sum(10**i for i in range(n))
    assert torch.equal(ranks.sum(x.clone()), want)
    assert [way for way, _ in ranks.heard] == ways and sum(size for _, size in ranks.heard) == x.numel()
    assert all(size <= SMALL // 4 for way, size in ranks.heard if way == "gathered")


def test_sums_that_prepare_rows_leave_peers_that_are_given_up() -> None:
    """The check of a drafter's sums may fail behind the model's: then nothing of the model reads peers' memory either."""
    ranks, x = Alone(2), torch.ones(2, 8)
    into = SumRows.__new__(SumRows)
    into.ranks, into.peers, into.most = ranks, SimpleNamespace(), 64  # type: ignore[assignment]
    assert torch.equal(into(x), 11 * x) and ranks.heard == [("gathered", 16)]
