"""The best token: plain torch against a loop, the check, and best.cu in any order of its parts, in graphs, for every architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from machines import CPU, ON_CARD, Machine, cases, compiled
from sampling import slow
from torch import Tensor

from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec, TorchBest
from pyspec.sample.choose import top

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
    assert own.tokens(logits, place[:3]).data_ptr() == place.data_ptr() and place.tolist() == [0, 1, 2, 9, 9]  # fmt: skip
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


FEW = ((1, 9000), (12, 2051), (5, 8190), (12, 1), (12, 2), (12, 3), (12, 6))


ON_A_CARD = [
    [(n_row, n_vocab)]
    for n_vocab in (1, 7, 2049, 32_000, 50_257)
    for n_row in (1, 2, 8, 33, 128, 300, 1500)
]


@cases(
    "seed, sizes",
    emulated=[(0, FEW), *(slow(seed, FEW) for seed in (1, 2, 3))],
    card=[(0, None), *((0, of) for of in ON_A_CARD)],
)
def test_tokens_and_values_are_the_references(
    machine: Machine, seed: int, sizes: Sequence[tuple[int, int]] | None
) -> None:
    """The op's own check: ties in several parts, no numbers, rows that begin anywhere."""
    spec = BestSpec(machine.device)
    assert machine.is_emulated or limits_of(best_cuda)(spec) is None
    with machine.started(seed=seed, n_multiprocessor=13):
        own, other = best_cuda.bind(spec), best.reference.bind(spec)
        assert best_cuda.check(own, other, spec, *([sizes] if sizes else [])) is None


def test_older_gpus_find_the_same(machine: Machine) -> None:
    with machine.started((8, 0), n_multiprocessor=2):
        assert best_cuda.check(best_cuda.bind(SPEC), TorchBest(), SPEC, ((13, 4101),)) is None


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_vocab", [20_480, 20_479, 20_483])
def test_of_equal_logits_in_all_parts_the_first_is_found_in_every_order(
    machine: Machine, n_vocab: int
) -> None:
    """Each row has one more of the largest than the row before, the lowest ones last; the threads of a part share some."""
    logits = torch.zeros(9, n_vocab)
    for row in range(9):
        logits[row, n_vocab - 1 - 2501 * torch.arange(row)] = 3.0
    want = [0, *(n_vocab - 1 - 2501 * (row - 1) for row in range(1, 9))]
    for seed in range(6):
        with machine.started(seed=seed, n_multiprocessor=40):
            assert best_cuda.n_parts(9, n_vocab, 40) == 9
            own = best_cuda.bind(SPEC)
            assert own.tokens(logits).tolist() == want
            assert own.pairs(logits)[0].tolist() == want


def test_more_quads_than_threads_have_under_way(machine: Machine) -> None:
    gen = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 400, (3, 70_001), generator=gen).float()
    with machine.started(n_multiprocessor=2):
        assert best_cuda.n_parts(3, 70_001, 2) == 2
        assert torch.equal(best_cuda.bind(SPEC).tokens(logits), logits.argmax(-1))


def test_many_rows_go_in_passes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_cuda, "MAX_ROWS", 4)
    logits = best_cuda.hostile(11, 2055, torch.Generator().manual_seed(3))
    with machine.started(n_multiprocessor=5):
        own, other = best_cuda.bind(SPEC), TorchBest()
        assert torch.equal(own.tokens(logits), other.tokens(logits))
        assert torch.equal(best_cuda._bits(own.pairs(logits)), best_cuda._bits(other.pairs(logits)))


def test_tickets_are_back_at_zero_for_launches_of_other_sizes(machine: Machine) -> None:
    with machine.started(seed=5, n_multiprocessor=20):
        own = best_cuda.bind(SPEC)
        for n_row, n_vocab in ((2, 9000), (5, 12_001), (1, 2500), (5, 12_001)):
            logits = torch.randn(n_row, n_vocab)
            assert torch.equal(own.tokens(logits), logits.argmax(-1)) and not own.tickets.any()


def test_tokens_go_where_they_are_wanted_and_nowhere_else(machine: Machine) -> None:
    place = torch.full((6,), 7)
    with machine.started():
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


@ON_CARD
def test_what_is_found_is_what_a_cpu_finds(machine: Machine) -> None:
    logits = best_cuda.hostile(24, 151_936, torch.Generator().manual_seed(1))
    assert torch.equal(
        best_cuda.bind(BestSpec(machine.device)).tokens(logits.to(machine.device)).cpu(),
        TorchBest().tokens(logits),
    )


@ON_CARD
def test_graphs_replay_it_on_new_logits_and_tickets_are_back_at_zero(machine: Machine) -> None:
    own = best_cuda.bind(BestSpec(machine.device))
    logits = torch.randn(5, 248_320, device=machine.device)
    place = torch.zeros(8, dtype=torch.int64, device=machine.device)
    replay, pairs = machine.captured(lambda: (own.tokens(logits, place[:5]), own.pairs(logits))[1])
    for seed in range(50):
        new = torch.randint(0, 3, logits.shape, generator=torch.Generator().manual_seed(seed)).float()
        new[:, : 4000 * seed] = 0.0
        logits.copy_(new)
        replay()
        want = TorchBest().pairs(new)
        assert torch.equal(pairs.cpu(), want)
        assert torch.equal(place[:5].cpu(), want[0].long())
        assert not place[5:].any()
        assert not own.tickets.any()


@ON_CARD
def test_launches_behind_each_other_do_not_mix(machine: Machine) -> None:
    """Rows of other numbers and sizes, nothing waited for in between."""
    gen = torch.Generator().manual_seed(4)
    own = best_cuda.bind(BestSpec(machine.device))
    sizes = [(1, 248_320), (8, 32_003), (3, 151_936), (100, 4097), (1, 5)]
    all_logits = [
        torch.randn(n_row, n_vocab, generator=gen).to(machine.device) for n_row, n_vocab in sizes
    ]
    found = [(i, own.tokens(logits)) for _ in range(40) for i, logits in enumerate(all_logits)]
    want = [logits.argmax(-1) for logits in all_logits]
    assert all(torch.equal(tokens, want[i]) for i, tokens in found)


@pytest.mark.parametrize("arch", ARCHS)
def test_best_compiles_for_every_architecture(arch: str) -> None:
    found = compiled("best", arch, best_cuda.FILE.defines(BestSpec(CPU)))["best"]
    assert found.registers * best_cuda.THREADS * 2 * best_cuda.PER_SM <= 65536
