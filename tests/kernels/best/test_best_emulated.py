"""The kernel of `best` run thread by thread on the CPU: it finds the first of the largest in any order of its parts."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from sampling import few

from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best.ref import BestSpec, TorchBest

pytestmark = needs_compiler
SPEC = BestSpec(CPU)
FEW = ((1, 9000), (12, 2051), (5, 8190), (12, 1), (12, 2), (12, 3), (12, 6))


@pytest.mark.parametrize("seed", few(range(4), 0))
def test_tokens_and_values_are_the_references(seed: int) -> None:
    """The op's own check: ties in several parts, no numbers, rows that begin anywhere."""
    with emulated_gpu(seed=seed, n_multiprocessor=13):
        assert best_cuda.check(best_cuda.bind(SPEC), TorchBest(), SPEC, FEW) is None


def test_older_gpus_find_the_same() -> None:
    with emulated_gpu((8, 0), n_multiprocessor=2):
        assert best_cuda.check(best_cuda.bind(SPEC), TorchBest(), SPEC, ((13, 4101),)) is None


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_vocab", [20_480, 20_479, 20_483])
def test_of_equal_logits_in_all_parts_the_first_is_found_in_every_order(n_vocab: int) -> None:
    """Each row has one more of the largest than the row before, the lowest ones last; the threads of a part share some."""
    logits = torch.zeros(9, n_vocab)
    for row in range(9):
        logits[row, n_vocab - 1 - 2501 * torch.arange(row)] = 3.0
    want = [0, *(n_vocab - 1 - 2501 * (row - 1) for row in range(1, 9))]
    for seed in range(6):
        with emulated_gpu(seed=seed, n_multiprocessor=40):
            assert best_cuda.n_parts(9, n_vocab, 40) == 9
            own = best_cuda.bind(SPEC)
            assert own.tokens(logits).tolist() == want
            assert own.pairs(logits)[0].tolist() == want


def test_more_quads_than_threads_have_under_way() -> None:
    gen = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 400, (3, 70_001), generator=gen).float()
    with emulated_gpu(n_multiprocessor=2):
        assert best_cuda.n_parts(3, 70_001, 2) == 2
        assert torch.equal(best_cuda.bind(SPEC).tokens(logits), logits.argmax(-1))


def test_many_rows_go_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_cuda, "MAX_ROWS", 4)
    logits = best_cuda.hostile(11, 2055, torch.Generator().manual_seed(3))
    with emulated_gpu(n_multiprocessor=5):
        own, other = best_cuda.bind(SPEC), TorchBest()
        assert torch.equal(own.tokens(logits), other.tokens(logits))
        assert torch.equal(best_cuda._bits(own.pairs(logits)), best_cuda._bits(other.pairs(logits)))


def test_tickets_are_back_at_zero_for_launches_of_other_sizes() -> None:
    with emulated_gpu(seed=5, n_multiprocessor=20):
        own = best_cuda.bind(SPEC)
        for n_row, n_vocab in ((2, 9000), (5, 12_001), (1, 2500), (5, 12_001)):
            logits = torch.randn(n_row, n_vocab)
            assert torch.equal(own.tokens(logits), logits.argmax(-1)) and not own.tickets.any()


def test_tokens_go_where_they_are_wanted_and_nowhere_else() -> None:
    place = torch.full((6,), 7)
    with emulated_gpu():
        own = best_cuda.bind(SPEC)
        assert own.tokens(torch.eye(3), place[2:5]).data_ptr() == place[2:].data_ptr()
        assert own.tokens(torch.eye(8)[:0]).shape == (0,) and own.pairs(torch.eye(8)[:0]).shape == (2, 0)
        assert own.tokens(torch.eye(8)[:, :5]).tolist() == [
            0,
            1,
            2,
            3,
            4,
            0,
            0,
            0,
        ]  # of which rows lie apart
    assert place.tolist() == [7, 7, 0, 1, 2, 7]
