"""The best token in plain torch, against a loop over the logits; and the check, which rejects wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec, TorchBest
from pyspec.sample.choose import top

CPU = torch.device("cpu")
SPEC = BestSpec(CPU)


def first_best(row: list[float]) -> int:
    found = 0
    for i, x in enumerate(row):
        if x > row[found] or (math.isnan(x) and not math.isnan(row[found])):
            found = i
    return found


@pytest.mark.parametrize("n_vocab", [1, 2, 5, 127, 128, 384, 1000])
def test_the_first_of_the_largest_counts_and_none_is_larger_than_all(n_vocab: int) -> None:
    logits = best_cuda.hostile(37, n_vocab, torch.Generator().manual_seed(n_vocab))
    want = [first_best(row) for row in logits.tolist()]
    own = best.reference.bind(SPEC)
    assert isinstance(own, TorchBest) and best.chosen(SPEC).capturable
    tokens, pairs = own.tokens(logits), own.pairs(logits)
    assert tokens.dtype == torch.int64 and tokens.tolist() == want
    assert pairs.dtype == torch.float64 and pairs[0].tolist() == want
    values = logits[torch.arange(37), tokens].double()
    assert torch.equal(pairs[1].nan_to_num(5.0), values.nan_to_num(5.0))
    assert torch.equal(pairs[1].signbit(), values.signbit())
    assert torch.equal(top(logits).nan_to_num(5.0), pairs.nan_to_num(5.0))


def test_tokens_go_where_they_are_wanted() -> None:
    logits, place = torch.eye(3), torch.full((5,), 9)
    own = TorchBest()
    assert own.tokens(logits, place[:3]).data_ptr() == place.data_ptr() and place.tolist() == [
        0,
        1,
        2,
        9,
        9,
    ]
    assert own.tokens(logits[:0]).shape == (0,) and own.pairs(logits[:0]).shape == (2, 0)


class Wrong(TorchBest):
    """Tokens are those of `argmax`; values are multiplied with `sign`."""

    def __init__(self, argmax: Callable[[Tensor], Tensor], sign: float = 1.0) -> None:
        self.argmax, self.sign = argmax, sign

    def tokens(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        return self.argmax(logits)

    def pairs(self, logits: Tensor) -> Tensor:
        return super().pairs(logits) * torch.tensor([[1.0], [self.sign]])


def last_best(logits: Tensor) -> Tensor:
    return logits.shape[1] - 1 - logits.flip(-1).argmax(-1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Wrong(last_best), "another best token"),
        (Wrong(lambda x: x.nan_to_num(-9.0).argmax(-1)), "another best token"),
        (Wrong(lambda x: x.topk(1).indices[:, 0].clamp(max=x.shape[1] - 2)), "another best token"),
        (Wrong(lambda x: x.argmax(-1), -1.0), "values of"),
    ],
)
def test_the_check_finds_what_is_wrong(wrong: Wrong, said: str) -> None:
    assert said in (best_cuda.check(wrong, TorchBest(), SPEC, ((30, 517),)) or "")


def test_every_column_has_a_part_and_shares_have_room() -> None:
    for n_sm in (1, 3, 84, 132, 188):
        for n_vocab in (1, 2048, 2049, 32_000, 248_320, 1 << 30):
            for n_row in (1, 2, 8, 9, 128, best_cuda.MAX_ROWS):
                n = best_cuda.n_parts(n_row, n_vocab, n_sm)
                assert 1 <= n <= best_cuda.THREADS
                assert n_row * n <= best_cuda.PER_SM * n_sm + best_cuda.MAX_ROWS


def test_a_cpu_is_refused() -> None:
    assert best_cuda.limits(SPEC) == "runs on NVIDIA GPUs only"
    assert best_cuda.limits(BestSpec(torch.device("cuda", 0))) is None
